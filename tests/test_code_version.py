"""Tests of the version of the code that computes, which is part of every stage's key."""

import ast
from pathlib import Path
from typing import Any

import pytest

from distill_runner.pipeline import code_version as module
from distill_runner.pipeline.code_version import (
    changed_modules,
    module_hashes,
    record,
    recorded_or_parsed,
    seal,
    source_hash,
    total_hash,
)
from distill_runner.pipeline.store import Store, key_of


def test_the_recorded_code_is_the_current_code() -> None:
    """A release whose record is stale would share no artifact with a checkout of the same code."""
    modules = ", ".join(changed_modules(record()["modules"])[:5])
    command = "python -m distill_runner.pipeline.code_version"
    message = (
        f"{modules} changed since the code was recorded. If it computes the same: {command} --same; if not: --next"
    )
    assert record()["sha256"] == total_hash(module_hashes()), message


def test_modules_are_parsed_unless_their_bytes_were_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that two branches have merged may hold the hash of one and the seal of the other."""
    for package in module.PACKAGES:
        (tmp_path / package).mkdir()
    monkeypatch.setattr(module, "MODULES", ())
    one, other = tmp_path / "methods" / "one.py", tmp_path / "models" / "other.py"
    one.write_text("x = 1\n")
    other.write_text("y = 1\n")
    hashes = module_hashes(tmp_path)
    seals = {path: seal((tmp_path / path).read_bytes(), own) for path, own in hashes.items()}
    one.write_text("x = 1  # one\n")
    parsed = list[str]()

    def counted(source: str) -> str:
        parsed.append(source)
        return source_hash(source)

    monkeypatch.setattr(module, "source_hash", counted)
    assert recorded_or_parsed({"modules": hashes, "seals": seals}, tmp_path) == hashes
    assert parsed == ["x = 1  # one\n"]
    for recorded in ({"modules": hashes}, {"modules": {**hashes, "models/other.py": "0"}, "seals": seals}):
        assert recorded_or_parsed(recorded, tmp_path) == hashes
    assert parsed[1:] == ["x = 1  # one\n", "y = 1\n"] * 2


def test_words_and_formatting_do_not_count() -> None:
    """A better docstring would make everybody train again."""
    plain = "def f(x):\n    return x + 1\n"
    assert source_hash(plain) == source_hash(
        '"""Module."""\n\ndef f( x ):  # one\n    """Add."""\n    return (x + 1)\n'
    )


def test_each_version_of_python_gives_the_same_hash() -> None:
    """A colleague with Python 3.12 would train everything again: its syntax trees have fields that 3.11 lacks."""
    source = """class A(B[int]):
    x: int = -1
    def f(self, *y, z=None) -> str:
        with g() as h, i:
            return f"{y!r:>{z}} {self.x:.2f}" if z else [j async for j in k if (m := j)]
"""
    assert source_hash(source) == "d373bbcf59f1"


def test_a_parser_that_another_thread_disturbs_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's traceback in another thread once ended a run with a SystemError (Python 3.11)."""
    parse, errors = ast.parse, [SystemError("AST constructor recursion depth mismatch")]

    def disturbed(source: str) -> ast.AST:
        if errors:
            raise errors.pop()
        return parse(source)

    expected = source_hash("x = 1")
    monkeypatch.setattr(ast, "parse", disturbed)
    assert source_hash("x = 1") == expected
    assert not errors


@pytest.mark.parametrize("edit", ["x + 2", "1 + x", "100 * (x + 1)", "x - 1"])
def test_every_change_of_an_expression_counts(edit: str) -> None:
    """A researcher who edits a loss would see the old loss's score."""
    assert ast.parse(edit)
    assert source_hash(f"def f(x):\n    return {edit}\n") != source_hash("def f(x):\n    return x + 1\n")


def test_edited_code_has_its_own_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checkouts on one store would take each other's artifacts; an edited loss must not tokenize again."""
    recorded = record()["modules"]
    monkeypatch.setattr(module, "loaded_hashes", lambda: recorded)
    module.code_version.cache_clear()
    assert module.code_version() == record()["version"]
    monkeypatch.setattr(module, "loaded_hashes", lambda: {**recorded, "methods/predictions.py": "other"})
    module.code_version.cache_clear()
    assert isinstance(module.code_version(), str)
    assert module.code_version(module.DATA_CODE) == record()["version"]
    assert changed_modules(recorded) == ["methods/predictions.py"]
    monkeypatch.setattr(module, "loaded_hashes", lambda: {**recorded, "pipeline/inputs.py": "other"})
    module.code_version.cache_clear()
    assert isinstance(module.code_version(module.DATA_CODE), str), "it writes the stored splits"
    module.code_version.cache_clear()


def test_two_versions_of_the_source_on_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A colleague with another checkout: each builds its own artifacts beside the other's, and neither is damaged."""
    store, recorded, keys = Store(tmp_path), record()["modules"], []
    for edited in ({}, {"training/train.py": "other"}, {"common/seeds.py": "other"}, {}):
        monkeypatch.setattr(module, "loaded_hashes", lambda edited=edited: {**recorded, **edited})
        module.code_version.cache_clear()
        spec = {"kind": "stage", "code": module.code_version(), "seed": 1}
        built: list[str] = []

        def build(place: Path, built: list[str] = built, spec: dict[str, Any] = spec) -> None:
            built.append(key_of(spec))
            (place / "weights").write_text(key_of(spec))

        folder = store.get(spec, build)
        keys.append((folder.name, bool(built)))
        assert all((path / "weights").read_text() == path.name for path in folder.parent.iterdir() if path.is_dir())
    assert [is_built for _, is_built in keys] == [True, True, True, False]
    assert len({key for key, _ in keys}) == 3
    assert keys[0][0] == keys[3][0]
    module.code_version.cache_clear()


def test_modules_of_other_packages_that_compute_exist() -> None:
    paths = set(module._modules(module.ROOT))
    assert set(module.MODULES) <= paths
    assert not paths & set(module.UNCOUNTED)
    assert all((module.ROOT / path).exists() for path in (*module.MODULES, *module.UNCOUNTED))
