"""Artifacts by the hash of what determines them: whole or absent, built once, mended when damaged."""

import errno
import json
import logging
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_runner.common.errors import UserError
from distill_runner.common.files import file_sha256
from distill_runner.pipeline import store as store_module
from distill_runner.pipeline.store import Store, copy_tree, key_of
from helpers.processes import exit_code, start

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


def test_what_is_built_again_is_verified_again(store: Store) -> None:
    build = Builder()
    store.get(SPEC, build)
    for damage in (shorten, change):
        damage(store.get(SPEC, build) / "model" / "weights")
    store.get(SPEC, build)
    assert build.built == 3


def test_a_process_reads_an_artifact_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, names = store.get(SPEC, Builder()), list[str]()

    def counted(file: Path) -> str:
        names.append(file.name)
        return file_sha256(file)

    monkeypatch.setattr(store_module, "file_sha256", counted)
    for _ in range(2):
        assert store.find(SPEC) == folder
        assert sorted(names) == ["metrics.json", "spec.json", "weights"]


def _fill(folder: Path, size: int) -> None:
    (folder / "large").write_bytes(bytes(size))


@settings(max_examples=25)
@given(size=st.sampled_from([1, 4096, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20]), data=st.data())
def test_a_bit_that_flips_under_an_unchanged_time_is_detected(size: int, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        artifact = store.get(SPEC, partial(_fill, size=size))
        status = (artifact / "large").stat()
        with (artifact / "large").open("r+b") as file:
            file.seek(data.draw(st.integers(0, size - 1)))
            file.write(bytes([1 << data.draw(st.integers(0, 7))]))
        os.utime(artifact / "large", ns=(status.st_atime_ns, status.st_mtime_ns))
        assert store.has(SPEC)
        assert store.find(SPEC) is None


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.ESTALE])
def test_a_file_that_cannot_be_opened_now_is_not_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    build = Builder()
    folder = store.get(SPEC, build)

    def fails(_file: Path) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store_module, "file_sha256", fails)
    with pytest.raises(OSError, match=os.strerror(number)):
        store.get(SPEC, build)
    monkeypatch.undo()
    assert store.get(SPEC, build) == folder
    assert build.built == 1
    assert not list(folder.parent.glob("*.damaged-*"))


def test_what_leaves_the_store_is_a_copy(store: Store, tmp_path: Path) -> None:
    artifact, target = store.get(SPEC, Builder()), tmp_path / "run" / "model"
    (artifact / "model").chmod(0o555)
    copy_tree(artifact / "model", target)
    assert target.stat().st_mode & 0o200, "the user may write to the copy"
    (target / "weights").write_bytes(b"0000000000")
    copy_tree(artifact / "model", target)
    assert (target / "weights").read_bytes() == b"0123456789"


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


def test_what_a_run_names_or_looks_for_is_not_deleted_until_its_end(store: Store) -> None:
    specs = [SPEC | {"seed": seed} for seed in range(5)]
    named, read, searched, other = (store.get(spec, Builder()) for spec in specs[:4])
    with store.protected():
        store.protect(specs[0], specs[4])
        store.get(specs[1], Builder())
        store.find(specs[2])
        absent = Store(store.folder).get(specs[4], Builder())  # by another run
        for folder in (named, read, searched, absent):
            assert Store(store.folder).delete(folder) == store_module.IN_USE
            assert store_module.is_complete(folder)
        assert store.delete(other) is None
    for folder in (named, read, searched, absent):
        assert store.delete(folder) is None
        assert not folder.exists()


def test_a_store_that_is_moved_during_a_run_is_said(store: Store) -> None:
    """The error was that of the first file that was missing."""

    def work() -> None:
        with store.protected():
            store.folder.rename(store.folder.with_name("moved"))
            (store.folder / "absent").read_text()

    with pytest.raises(UserError, match=r"store\.dir=.*was moved or removed while this run used it"):
        work()


def test_deletions_during_runs(store: Store, tmp_path: Path) -> None:
    """What a run was given is there until its end, however often all is deleted; a killed run protects nothing."""
    specs, end = [SPEC | {"seed": seed} for seed in range(4)], time.monotonic() + 1.5

    def runs(seed: int) -> Callable[[], None]:
        def work() -> None:
            rng = random.Random(seed)
            while time.monotonic() < end:
                with store.protected():
                    folders = [store.get(spec, Builder()) for spec in rng.sample(specs, 2)]
                    for _ in range(3):
                        weights = [(folder / "model" / "weights").read_bytes() for folder in folders]
                        assert weights == [b"0123456789"] * 2
                        time.sleep(rng.uniform(0, 0.003))

        return work

    def killed() -> None:
        with store.protected():
            store.protect(*specs)
            os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(start(killed)) == -signal.SIGKILL
    processes, reasons = [start(runs(seed)) for seed in range(3)], Counter[str | None]()
    while time.monotonic() < end:
        reasons.update(store.delete(store.path(spec)) for spec in specs if store.path(spec).exists())
    assert [exit_code(process) for process in processes] == [0, 0, 0]
    assert reasons[None]
    assert reasons[store_module.IN_USE]
    assert not list(store.folder.glob("*/*.damaged-*"))


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(UserError, match=r"store\.dir=.*cannot be used") as caught:
            Store(folder)
        assert "Set store.dir to a writable folder." in str(caught.value)
    monkeypatch.setattr(os, "access", lambda _folder, _mode: False)  # permissions do not bind a superuser
    with pytest.raises(UserError, match="is not writable"):
        Store(tmp_path)
