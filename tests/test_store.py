"""Artifacts by the hash of what determines them: whole or absent, built once, mended when damaged."""

import json
import logging
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_runner.common.errors import UserError
from distill_runner.common.files import file_sha256
from distill_runner.pipeline import store as store_module
from distill_runner.pipeline.store import Store, key_of

SPEC = {"kind": "thing", "seed": 1, "data": {"content": "abc", "columns": ["a", "b"]}}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


class Builder:
    """Writes two files, and counts."""

    def __init__(self) -> None:
        self.built = 0

    def __call__(self, folder: Path) -> None:
        self.built += 1
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "weights").write_bytes(b"0123456789")
        (folder / "metrics.json").write_text("{}")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def turned(value: Any) -> Any:
    """The same value, every mapping in the opposite order."""
    if isinstance(value, dict):
        return {key: turned(item) for key, item in reversed(value.items())}
    return [turned(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=40)
@given(spec=st.dictionaries(st.text(), json_values, max_size=4), extra=st.integers())
def test_a_key_is_of_the_content_in_any_order(spec: dict[str, Any], extra: int) -> None:
    assert key_of(spec) == key_of(turned(spec))
    assert key_of(spec) == key_of(json.loads(json.dumps(spec)))
    assert key_of(spec | {"extra": extra}) != key_of(spec | {"extra": extra + 1})


def test_a_key_by_hand() -> None:
    # printf '{"a":[1,"x"],"b":null}' | sha256sum
    assert key_of({"b": None, "a": [1, "x"]}) == "854ef06dc57f5dfe"
    assert key_of({"a": [1, 2]}) != key_of({"a": [2, 1]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        key_of({"a": float("nan")})


def test_a_file_named_as_the_manifest_is_verified_in_a_folder_below(store: Store) -> None:
    def build(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "manifest.json").write_text("{}")

    folder = store.get(SPEC, build)
    assert set(json.loads((folder / "manifest.json").read_text())) == {"spec.json", "model/manifest.json"}
    (folder / "model" / "manifest.json").write_text("[]")
    assert store.find(SPEC) is None


def test_an_artifact_is_built_once_and_says_what_it_is(store: Store) -> None:
    build = Builder()
    assert not store.has(SPEC)
    folder = store.get(SPEC, build)
    assert folder == store.path(SPEC) == store.folder / "thing" / key_of(SPEC)
    assert store.has(SPEC)
    assert store.get(SPEC, build) == folder
    assert store.get(turned(SPEC), build) == folder
    assert build.built == 1
    assert json.loads((folder / "spec.json").read_text()) == SPEC
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest) == {"metrics.json", "model/weights", "spec.json"}
    # printf 0123456789 | sha256sum
    digest = "84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882"
    assert manifest["model/weights"] == {"size": 10, "sha256": digest}
    # Another store object, as another process would have.
    assert Store(store.folder).has(SPEC)
    assert not store.has(SPEC | {"seed": 2})


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)])
def test_a_build_that_raises_leaves_nothing_but_what_it_can_resume(store: Store, error: BaseException) -> None:
    def half(folder: Path) -> None:
        (folder / "checkpoint").write_text("half way")
        raise error

    with pytest.raises(type(error)):
        store.get(SPEC, half)
    assert not store.has(SPEC)
    assert not store.path(SPEC).exists()

    def rest(folder: Path) -> None:
        assert (folder / "checkpoint").read_text() == "half way"
        (folder / "checkpoint").unlink()
        (folder / "whole").touch()

    folder = store.get(SPEC, rest)
    assert {file.name for file in folder.iterdir()} == {"whole", "spec.json", "manifest.json"}
    assert not list(folder.parent.glob("*.partial"))


def change(file: Path) -> None:
    file.write_bytes(b"0123456780")


def shorten(file: Path) -> None:
    file.write_bytes(b"01234")


@pytest.mark.parametrize("damage", [change, shorten, Path.unlink])
@pytest.mark.parametrize("name", ["model/weights", "manifest.json"])
def test_damage_is_found_and_mended(store: Store, caplog: pytest.LogCaptureFixture, damage: Any, name: str) -> None:
    build = Builder()
    damage(store.get(SPEC, build) / name)
    # ``has`` looks at sizes only, ``get`` at every bit.
    assert store.has(SPEC) == (damage is change and name == "model/weights")
    with caplog.at_level(logging.WARNING):
        folder = store.get(SPEC, build)
    assert build.built == 2
    assert "damaged" in caplog.text
    assert (folder / "model" / "weights").read_bytes() == b"0123456789"
    assert store.has(SPEC)
    assert len(list(folder.parent.glob("*.damaged-*"))) == 1
    # It may happen twice in one process.
    damage(folder / name)
    store.get(SPEC, build)
    assert build.built == 3


def test_a_large_file_is_read_once_while_nobody_writes_to_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(file: Path) -> str:
        read.append(file.name)
        return file_sha256(file)

    def build(folder: Path) -> None:
        (folder / "large").write_bytes(bytes(2**20))
        (folder / "small").write_bytes(b"1")

    monkeypatch.setattr(store_module, "file_sha256", counted)
    monkeypatch.setattr(store_module, "_VERIFIED", store.folder / "verified")
    large = store.get(SPEC, build) / "large"
    for expected in (["large"], ["large"]):  # written just now, it may change within a tick of the clock
        read.clear()
        store.get(SPEC, build)
        assert [name for name in read if name == "large"] == expected
    before = time.time() - 60
    os.utime(large, (before, before))
    for expected in (["large"], [], []):
        read.clear()
        assert Store(store.folder).find(SPEC)
        assert "small" in read
        assert [name for name in read if name == "large"] == expected
    large.write_bytes(bytes(2**20 - 1) + b"1")
    assert store.has(SPEC)
    assert store.find(SPEC) is None


def _build_slowly(folder: Path, barrier: Any, number: int) -> None:
    """A process that wants the same artifact as another one."""

    def build(place: Path) -> None:
        with (folder / "built").open("a") as file:
            file.write(f"{number}\n")
        time.sleep(0.5)
        (place / "content").write_text(str(number))

    barrier.wait(60)
    Store(folder / "store").get(SPEC, build)


def test_two_processes_build_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    processes = [context.Process(target=_build_slowly, args=(tmp_path, barrier, number)) for number in (1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    built = (tmp_path / "built").read_text().split()
    assert len(built) == 1
    assert (Store(tmp_path / "store").path(SPEC) / "content").read_text() == built[0]


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(UserError, match=r"store\.dir=.*cannot be used") as caught:
            Store(folder)
        assert "Set store.dir to a writable folder." in str(caught.value)
    monkeypatch.setattr(os, "access", lambda _folder, _mode: False)  # permissions do not bind a superuser
    with pytest.raises(UserError, match="is not writable"):
        Store(tmp_path)
