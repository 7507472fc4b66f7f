"""Version of the code that computes, which is part of every stage's key."""

import shutil
from pathlib import Path

import pytest

from distill_runner.pipeline import code_version as module
from distill_runner.pipeline.code_version import ROOT, SOURCES, code_version, source_hash


def test_each_edit_of_code_that_computes_counts_and_others_do_not(tmp_path: Path) -> None:
    """Two checkouts on one store would take each other's artifacts."""
    assert all((ROOT / source).exists() for source in SOURCES)
    for source in ("methods", "common", "pipeline", "report"):
        shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
    hashes = [source_hash(tmp_path)]
    for name in ("methods/predictions.py", "common/seeds.py", "pipeline/build.py", "methods/new.py"):
        with (tmp_path / name).open("a") as file:
            file.write("x = 1\n")
        hashes.append(source_hash(tmp_path))
    (tmp_path / "report" / "frame.py").unlink()
    (tmp_path / "pipeline" / "planning.py").unlink()
    assert source_hash(tmp_path) == hashes[-1]
    assert len({*hashes}) == 5


def test_recorded_code_has_a_number_and_other_code_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for recorded, expected in ((source_hash(), 7), ("other", source_hash())):
        (tmp_path / "record.json").write_text(f'{{"version": 7, "sha256": "{recorded}"}}')
        monkeypatch.setattr(module, "RECORD", tmp_path / "record.json")
        code_version.cache_clear()
        assert code_version() == expected
    code_version.cache_clear()
