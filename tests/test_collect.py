"""Results from run folders, whatever lies in them."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distill_runner import api
from distill_runner.pipeline.status import locked_run, write_status
from distill_runner.report.collect import read_results
from helpers.fake_results import failed, result, run_folder

DONE = failed(status="done", error=None)


def test_finished_and_unfinished_runs_in_the_order_of_their_names(tmp_path: Path) -> None:
    run_folder(tmp_path, "c", status=failed())
    run_folder(tmp_path, "a", result=result(), status=DONE)
    run_folder(tmp_path, "b", status=failed(status="paused"))
    statuses = {Path(run["folder"]).name: run["status"] for run in read_results([tmp_path])}
    assert list(statuses.items()) == [("a", "done"), ("b", "paused"), ("c", "failed")]


@pytest.mark.parametrize("content", ['{"status": "do', "[1, 2]", "null", "{}", "\x00\x01", {"status": "failed"}])
def test_what_is_no_result_is_left_out(tmp_path: Path, content: Any, caplog: pytest.LogCaptureFixture) -> None:
    run_folder(tmp_path, "whole", result=result(), status=DONE)
    run_folder(tmp_path, "other", status=content)
    assert len(read_results([tmp_path])) == 1
    assert "other is left out: it holds no complete result" in caplog.text


@pytest.mark.parametrize("content", ['{"status": "do', "[1, 2]", "{}", "\x00\x01", ""])
def test_a_finished_run_whose_result_is_damaged_is_named(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_folder(tmp_path, "good", result=result(), status=DONE)
    (run_folder(tmp_path, "bad", status=DONE) / "result.json").write_text(content)
    assert [Path(run["folder"]).name for run in read_results([tmp_path])] == ["good"]
    assert "bad is left out: result.json cannot be read" in caplog.text


def _changed(content: Any, depth: int = 2) -> Iterator[Any]:
    """Yield ``content`` with one value of it, at each place of the first levels, replaced by one of another type."""
    if isinstance(content, dict) and depth:
        for key, value in content.items():
            for part in _changed(value, depth - 1):
                yield {**content, key: part}
            yield {name: other for name, other in content.items() if name != key}
    yield from ("x", None, [1], math.nan)


def test_no_value_of_a_result_hides_the_others(tmp_path: Path) -> None:
    """One malformed file among a hundred ended the table with a traceback."""
    good = result(seed=77, specs={"a": {}})
    run_folder(tmp_path, "a", result=good, status=DONE)
    bad = run_folder(tmp_path, "b", result=good, status=DONE) / "result.json"
    for content in _changed({**result(), "specs": {"a": {}}}):
        bad.write_text(json.dumps(content))
        results = read_results([tmp_path])
        assert api.table(results, "terminal")
        assert 77 in api.frame(results)["seed"].tolist()


def test_folders_and_files_of_others_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("hello")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert read_results([tmp_path]) == []
    assert caplog.text == ""


def test_a_run_that_is_going_and_one_whose_process_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with locked_run(folder):
        write_status(folder, "running", failed())
        assert [run["status"] for run in read_results([tmp_path])] == ["running"]
    assert [run["status"] for run in read_results([tmp_path])] == ["killed"]
