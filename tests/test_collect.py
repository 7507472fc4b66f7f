"""Results from run folders, whatever lies in them."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distill_runner.report.collect import read, results
from fake_results import failed, result, run_folder


def test_finished_and_unfinished_runs_in_the_order_of_their_names(tmp_path: Path) -> None:
    run_folder(tmp_path, "c", status=failed())
    run_folder(tmp_path, "a", result=result(), status=failed(status="running"))
    run_folder(tmp_path, "b", status=failed(status="paused"))
    found = results([tmp_path])
    assert [(Path(run["folder"]).name, run["status"]) for run in found] == [
        ("a", "done"),
        ("b", "paused"),
        ("c", "failed"),
    ]


def test_a_run_named_twice_counts_once(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "a", result=result())
    assert len(results([tmp_path, folder, folder])) == 1


@pytest.mark.parametrize(
    "content", ['{"status": "do', "[1, 2]", "null", "{}", "\x00\x01", {"status": "done"}, result(score="high")]
)
def test_what_is_no_result_is_left_out(tmp_path: Path, content: Any, caplog: pytest.LogCaptureFixture) -> None:
    run_folder(tmp_path, "whole", result=result())
    run_folder(tmp_path, "other", result=content)
    assert len(results([tmp_path])) == 1
    assert "other/result.json is left out" in caplog.text


def test_half_a_result_leaves_the_status(tmp_path: Path) -> None:
    found = read(run_folder(tmp_path, "a", result='{"status": "do', status=failed(status="interrupted")))
    assert found is not None
    assert found["status"] == "interrupted"


def test_folders_and_files_of_others_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("hello")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert results([tmp_path]) == []


def test_a_running_process_that_is_gone_was_killed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = socket.gethostname()
    for name, pid, host, expected in [
        ("gone", gone.pid, here, "killed"),
        ("alive", os.getpid(), here, "running"),
        ("elsewhere", gone.pid, f"not-{here}", "running"),
        ("unknown", None, here, "running"),
    ]:
        found = read(run_folder(tmp_path, name, status=failed(status="running", pid=pid, host=host)))
        assert found is not None
        assert found["status"] == expected
