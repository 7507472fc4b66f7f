"""Several users on one store, and on the GPUs of one machine."""

import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from distill_runner.common.errors import UserError
from distill_runner.common.files import try_machine_lock
from distill_runner.pipeline import status
from distill_runner.pipeline.store import Store
from helpers.processes import GROUP, finish, start, until

ALICE, BOB = 4001, 4002
SPEC = {"kind": "stage", "seed": 1}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to become two users")


def run_as(uid: int, function: Callable[[], Any], umask: int = 0o022) -> None:
    finish(start(function, uid, umask))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that users of the group share; pytest's own is private."""
    place = Path(tempfile.mkdtemp(prefix="shared-"))
    if os.geteuid() == 0:
        os.chown(place, ALICE, GROUP)
    place.chmod(0o2775)
    yield place
    shutil.rmtree(place)


def build_with_libraries(place: Path) -> None:
    """Files as libraries write them: private ones, and a private folder."""
    (place / "model").mkdir(mode=0o700)
    save_file({"weights": torch.arange(4.0)}, place / "model" / "model.safetensors")
    (place / "model" / "model.safetensors").chmod(0o600)
    descriptor, name = tempfile.mkstemp(dir=place)
    os.write(descriptor, b"private")
    os.close(descriptor)
    os.replace(name, place / "private.bin")


def must_not_build(_folder: Path) -> None:
    raise AssertionError("the artifact is there")


# Modes.


@as_root
@pytest.mark.parametrize("umask", [0o002, 0o027], ids=oct)
def test_modes_and_group_are_those_of_a_new_file(folder: Path, umask: int) -> None:
    run_as(ALICE, lambda: Store(folder).get(SPEC, build_with_libraries), umask)
    (artifact,) = (path for path in (folder / "stage").iterdir() if path.is_dir())
    for path in (artifact, *artifact.rglob("*")):
        status = path.stat()
        expected = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(status.st_mode) & 0o777 == expected, path
        assert status.st_gid == GROUP, path


@as_root
def test_a_second_user_reads_builds_and_deletes(folder: Path) -> None:
    run_as(ALICE, lambda: Store(folder).get(SPEC, build_with_libraries), 0o002)
    run_as(BOB, lambda: Store(folder).get(SPEC, must_not_build), 0o002)
    run_as(BOB, lambda: Store(folder).get(SPEC | {"seed": 2}, build_with_libraries), 0o002)
    run_as(ALICE, lambda: Store(folder).get(SPEC | {"seed": 2}, must_not_build), 0o002)

    def delete() -> None:
        store = Store(folder)
        assert store.delete(store.path(SPEC)) is None

    run_as(BOB, delete, 0o002)
    assert not Store(folder).has(SPEC)
    assert not list(folder.rglob("*.damaged-*"))


@as_root
def test_a_private_artifact_is_reported_and_left_in_place(folder: Path) -> None:
    """As ``safetensors`` has written them until now."""
    run_as(ALICE, lambda: Store(folder).get(SPEC, build_with_libraries), 0o002)
    weights = Store(folder).path(SPEC) / "model" / "model.safetensors"
    weights.chmod(0o600)
    os.chown(weights, ALICE, GROUP)

    def read() -> None:
        for _ in range(2):
            with pytest.raises(
                UserError, match=rf"model\.safetensors belongs to user {ALICE}, and this user may not read it"
            ):
                Store(folder).get(SPEC, must_not_build)

    run_as(BOB, read, 0o002)
    run_as(ALICE, lambda: Store(folder).get(SPEC, must_not_build), 0o002)


@as_root
@pytest.mark.parametrize("private", [False, True], ids=["shared", "private"])
def test_a_second_user_goes_on_with_an_interrupted_build(folder: Path, private: bool) -> None:
    def half(place: Path) -> None:
        (place / "checkpoint").write_text("half way")
        (place / "checkpoint").chmod(0o600 if private else 0o660)
        raise KeyboardInterrupt

    def interrupted() -> None:
        with suppress(KeyboardInterrupt):
            Store(folder).get(SPEC, half)

    def rest(place: Path) -> None:
        assert (place / "checkpoint").exists() != private  # what cannot be read is not resumed
        (place / "whole").touch()

    run_as(ALICE, interrupted, 0o002)
    run_as(BOB, lambda: Store(folder).get(SPEC, rest), 0o002)
    assert Store(folder).find(SPEC)


@as_root
def test_a_user_who_may_only_read_reads_and_is_refused_the_rest(folder: Path) -> None:
    run_as(ALICE, lambda: Store(folder).get(SPEC, build_with_libraries), 0o022)

    def check() -> None:
        store = Store(folder)
        assert store.get(SPEC, must_not_build) == store.path(SPEC)
        for refused in (lambda: store.get(SPEC | {"seed": 2}, must_not_build), lambda: store.delete(store.path(SPEC))):
            with pytest.raises(UserError, match=rf"belongs to user {ALICE}, and this user may not write it") as caught:
                refused()
            assert len(str(caught.value).splitlines()) == 2

    def check_delete() -> None:
        store = Store(folder)
        assert "and this user may not delete it" in (store.delete(store.path(SPEC)) or "")

    run_as(BOB, check)
    (folder / "stage").chmod(0o2775)
    for file in (folder / "stage").glob("*.[lu]*"):
        file.chmod(0o664)
    run_as(BOB, check_delete)
    assert Store(folder).find(SPEC)


@as_root
def test_two_users_share_the_gpus_of_a_machine(folder: Path) -> None:
    folder.chmod(0o1777)  # as /tmp
    file, ready = folder / "distill-run-gpu-0.lock", folder / "ready"

    def claim_and_wait() -> None:
        lock = try_machine_lock(file)  # held as long as it is referred to
        assert lock is not None
        ready.touch()
        time.sleep(60)

    def refused() -> None:
        assert try_machine_lock(file) is None

    def taken() -> None:
        assert try_machine_lock(file) is not None

    process = start(claim_and_wait, ALICE, 0o077)
    until(ready.exists)
    run_as(BOB, refused)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    run_as(BOB, taken)
    file.chmod(0o600)

    def told() -> None:
        with pytest.raises(UserError, match="cannot be opened: Permission denied"):
            try_machine_lock(file)

    run_as(BOB, told)


@as_root
def test_the_state_of_a_run_is_read_without_write_access(folder: Path) -> None:
    run, ready = folder / "run", folder / "ready"

    def work() -> None:
        with status.locked_run(run):
            status.write_status(run, "running", {})
            ready.touch()
            time.sleep(60)

    def check(expected: str) -> None:
        assert (status.read_run(run) or {})["status"] == expected

    process = start(work, ALICE, 0o022)
    until(ready.exists)
    run_as(BOB, lambda: check("running"))
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    run_as(BOB, lambda: check("killed"))
