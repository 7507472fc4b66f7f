"""Records of hits: they print what was printed before, until anything that was read has changed."""

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from distill_runner.pipeline import hits
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


def with_record(root: Path, during: Callable[[], object]) -> object:
    """What a repetition gives after one that did ``during``."""
    record = HitRecord(root / RUN, SETTINGS)
    record.start()
    during()
    record.save("the result", root / "store")
    record.stop()
    return replay(root)


def test_a_file_that_changes_after_it_was_read_counts(root: Path) -> None:
    def read_and_change(change: Callable[[Path], object]) -> Callable[[], object]:
        return lambda: ((root / "data/train.csv").read_text(), change(root))

    assert with_record(root, read_and_change(lambda root: None)) is not None
    assert with_record(root, read_and_change(edited("data/train.csv"))) is None

    def swap(root: Path) -> None:
        """Another content of the same size and with the same time."""
        file = root / "data/train.csv"
        time = file.stat().st_mtime_ns
        file.write_text(file.read_text()[::-1])
        os.utime(file, ns=(time, time))

    assert with_record(root, read_and_change(swap)) is None


def test_a_file_that_was_missing_counts_when_it_is_there(root: Path) -> None:
    def read() -> None:
        with suppress(FileNotFoundError):
            (root / "absent" / "options.json").read_text()

    assert with_record(root, read) is not None
    (root / "absent").mkdir()
    assert replay(root) is not None
    (root / "absent" / "options.json").write_text("{}")
    assert replay(root) is None


def test_compiled_code_counts_as_its_source(root: Path) -> None:
    cache = root / "code" / "__pycache__"
    cache.mkdir(parents=True)
    (root / "code" / "one.py").write_text("x = 1")
    compiled = [cache / "one.cpython-311.pyc", root / "code" / "alone.pyc"]
    for file in compiled:
        file.write_bytes(b"1")
    assert with_record(root, lambda: [file.read_bytes() for file in compiled]) is not None
    compiled[0].write_bytes(b"22")
    assert replay(root) is not None, "Python may compile anew"
    edited("code/one.py")(root)
    assert replay(root) is None


def test_files_that_are_opened_to_write_do_not_count(root: Path) -> None:
    lock = root / "locks" / "run.lock"
    lock.parent.mkdir()
    assert with_record(root, lambda: os.close(os.open(lock, os.O_RDWR | os.O_CREAT))) is not None


def test_caches_of_python_are_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hits, "PACKAGE", tmp_path)
    (tmp_path / "one.py").write_text("x = 1")
    digest = hits._code_digest()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "one.cpython-311.pyc").write_bytes(b"1")
    assert hits._code_digest() == digest
    (tmp_path / "two.py").write_text("")
    assert hits._code_digest() != digest


def test_a_process_that_has_run_before_records_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / RUN / HIT).unlink()
    monkeypatch.setitem(sys.modules, "torch", sys)
    record = HitRecord(root / RUN, SETTINGS)
    record.start()
    record.save("the result", root / "store")
    record.stop()
    assert not (root / RUN / HIT).exists()
