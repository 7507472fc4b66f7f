"""Records of hits: they print what was printed before, until anything that was read has changed."""

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from distill_runner.pipeline.hits import HIT, HitRecord

SETTINGS = {"stages": {"student": {"seed": 1}}}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run whose repetition has been recorded: it read a file of ``data`` and a manifest of the store."""
    folder = tmp_path / "outputs" / "runs" / "rte-alp"
    for file in (tmp_path / "data" / "train.csv", tmp_path / "store" / "stage" / "k" / "manifest.json"):
        file.parent.mkdir(parents=True)
        file.write_text("one")
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({"score": 0.5}))
    (folder / "status.json").write_text(json.dumps({"status": "done"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    record = HitRecord(folder, SETTINGS)
    assert record.replay() is None
    record.start()
    Path("data/train.csv").read_text()
    os.listdir("data")
    (tmp_path / "store" / "stage" / "k" / "manifest.json").read_text()
    logging.getLogger("distill_runner.running").warning("warning: %s", "one class")
    record.save("the result", tmp_path / "store")
    record.stop()
    Path("outputs/runs/another-run").mkdir()
    Path("store/stage/another").mkdir()
    return tmp_path


def replay(root: Path, settings: Mapping[str, object] = SETTINGS) -> object:
    return HitRecord(root / "outputs" / "runs" / "rte-alp", settings).replay()


def test_a_hit_prints_and_logs_the_same(
    root: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    result = replay(root)
    assert isinstance(result, dict)
    assert result["score"] == 0.5
    assert capsys.readouterr().out == "the result\n"
    assert caplog.record_tuples == [("distill_runner.running", logging.WARNING, "warning: one class")]


def edited(name: str) -> Callable[[Path], object]:
    return lambda root: (root / name).write_text("other text")


RUN = "outputs/runs/rte-alp"


@pytest.mark.parametrize(
    "change",
    [
        edited("data/train.csv"),
        edited("data/test.csv"),
        edited("store/stage/k/manifest.json"),
        edited(f"{RUN}/result.json"),
        edited(f"{RUN}/{HIT}"),
        lambda root: (root / "data/train.csv").unlink(),
        lambda root: os.utime(root / "data/train.csv", (1, 1)),
        lambda root: (root / RUN / "result.json").unlink(),
        lambda root: (root / RUN / HIT).write_text("[1]"),
    ],
    ids=["data", "new-split", "artifact", "result", "record", "no-data", "time", "no-result", "other-json"],
)
def test_a_change_takes_the_usual_way(root: Path, change: Callable[[Path], object]) -> None:
    assert replay(root) is not None
    change(root)
    assert replay(root) is None


def test_other_settings_or_variables_take_the_usual_way(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert replay(root, {"stages": {"student": {"seed": 2}}}) is None
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    assert replay(root) is None


def test_a_process_that_has_run_before_records_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / RUN / HIT).unlink()
    monkeypatch.setitem(sys.modules, "torch", sys)
    record = HitRecord(root / RUN, SETTINGS)
    record.start()
    record.save("the result", root / "store")
    record.stop()
    assert not (root / RUN / HIT).exists()
