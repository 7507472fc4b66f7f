"""Several users, hosts and suspended processes on one store."""

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

from distill_runner.common import locks
from distill_runner.common.errors import UserError
from distill_runner.common.locks import MachineLock, is_locked, try_locked
from distill_runner.pipeline import status
from distill_runner.pipeline.store import Store, key_of
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
@pytest.mark.parametrize("umask", [0o002, 0o022, 0o027, 0o077], ids=oct)
@pytest.mark.parametrize("handed_on", [True, False], ids=["setgid", "plain"])
def test_modes_and_group_are_those_of_a_new_file(folder: Path, umask: int, handed_on: bool) -> None:
    folder.chmod(0o2775 if handed_on else 0o775)
    run_as(ALICE, lambda: Store(folder).get(SPEC, build_with_libraries), umask)
    (artifact,) = (path for path in (folder / "stage").iterdir() if path.is_dir())
    for path in (artifact, *artifact.rglob("*")):
        status = path.stat()
        expected = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(status.st_mode) & 0o777 == expected, path
        assert status.st_gid == (GROUP if handed_on else ALICE), path
        assert bool(status.st_mode & stat.S_ISGID) == (handed_on and path.is_dir())


@as_root
@pytest.mark.parametrize("mechanism", ["flock", "lease"])
def test_a_second_user_reads_builds_and_deletes(folder: Path, monkeypatch: pytest.MonkeyPatch, mechanism: str) -> None:
    monkeypatch.setenv("DISTILL_LOCKS", mechanism)
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
    next((folder / "stage").glob("*.lock")).chmod(0o664)
    run_as(BOB, check_delete)
    assert Store(folder).find(SPEC)


@as_root
def test_two_users_share_the_gpus_of_a_machine(folder: Path) -> None:
    folder.chmod(0o1777)  # as /tmp
    file, ready = folder / "distill-run-gpu-0.lock", folder / "ready"

    own: list[MachineLock] = []

    def claim_and_wait() -> None:
        own.append(MachineLock(file))
        assert own[0].try_acquire()
        ready.touch()
        time.sleep(60)

    def refused() -> None:
        assert not MachineLock(file).try_acquire()

    def taken() -> None:
        assert MachineLock(file).try_acquire()

    process = start(claim_and_wait, ALICE, 0o077)
    until(ready.exists)
    run_as(BOB, refused)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    run_as(BOB, taken)
    file.chmod(0o600)

    def told() -> None:
        with pytest.raises(UserError, match="cannot be opened: Permission denied"):
            MachineLock(file).try_acquire()

    run_as(BOB, told)


@as_root
@pytest.mark.parametrize("mechanism", ["flock", "lease"])
def test_the_state_of_a_run_is_read_without_write_access(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mechanism: str
) -> None:
    monkeypatch.setenv("DISTILL_LOCKS", mechanism)
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
    if mechanism == "lease":  # whether the process lives, only its own host can say; its lease has run out
        past = time.time() - 2 * locks.LEASE_SECONDS
        os.utime(run / ".lock.lease", (past, past))
    run_as(BOB, lambda: check("killed"))


# Clocks and suspended processes.


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTILL_LOCKS", "lease")
    monkeypatch.setattr(locks, "LEASE_SECONDS", 1.5)


def builds(folder: Path, name: str) -> Callable[[Path], None]:
    """A build that resumes, notes who began it, and ends when the test lets it."""

    def build(place: Path) -> None:
        with (folder / "begun").open("a") as file:
            file.write(f"{name} {(place / 'step').read_text() if (place / 'step').exists() else 'new'}\n")
        (place / "step").write_text("resumed")
        with (place / "weights").open("wb", buffering=0) as file:
            file.write(b"01234")
            (folder / f"{name}.begun").touch()
            until((folder / f"{name}.end").exists)
            file.write(b"56789")
        (place / "step").unlink()

    return build


@pytest.mark.usefixtures("short_leases")
@pytest.mark.parametrize("first", ["thief", "suspended"])
def test_a_suspended_process_loses_its_lease_and_nothing_else(tmp_path: Path, first: str) -> None:
    """It goes on after another process has taken its place; either may be the first to end."""
    store = Store(tmp_path / "store")

    def get(name: str) -> Callable[[], None]:
        def function() -> None:
            folder = store.get(SPEC, builds(tmp_path, name))
            assert (folder / "weights").read_bytes() == b"0123456789"

        return function

    suspended = start(get("suspended"))
    until((tmp_path / "suspended.begun").exists)
    os.kill(suspended, signal.SIGSTOP)
    thief = start(get("thief"))
    until((tmp_path / "thief.begun").exists)
    os.kill(suspended, signal.SIGCONT)
    order = [("thief", thief), ("suspended", suspended)]
    for name, process in order if first == "thief" else reversed(order):
        (tmp_path / f"{name}.end").touch()
        finish(process)
        assert store.find(SPEC)
    assert (tmp_path / "begun").read_text().splitlines() == ["suspended new", "thief resumed"]
    assert [path.name for path in (tmp_path / "store" / "stage").iterdir()] == [key_of(SPEC)]


@pytest.mark.usefixtures("short_leases")
def test_a_suspended_build_whose_remains_were_deleted_takes_the_artifact(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")

    def build(place: Path) -> None:
        (place / "weights").write_text("1")

    def suspended_build(place: Path) -> None:
        (tmp_path / "suspended.begun").touch()
        until((tmp_path / "suspended.end").exists)
        build(place)

    suspended = start(lambda: store.get(SPEC, suspended_build))
    until((tmp_path / "suspended.begun").exists)
    os.kill(suspended, signal.SIGSTOP)
    store.get(SPEC, build)
    (remains,) = (tmp_path / "store" / "stage").glob("*.partial-*")
    assert store.delete(remains) is None
    (tmp_path / "suspended.end").touch()
    os.kill(suspended, signal.SIGCONT)
    finish(suspended)
    assert store.find(SPEC)


@pytest.mark.usefixtures("short_leases")
def test_a_suspended_run_records_nothing_once_another_process_has_taken_it_over(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def suspended() -> None:
        with status.locked_run(run):
            status.write_status(run, "running", {"by": "suspended"})
            assert not status.is_taken_over(run)
            (tmp_path / "begun").touch()
            until((tmp_path / "end").exists)
            assert status.is_taken_over(run)
            status.write_status(run, "failed", {"by": "suspended"})

    process = start(suspended)
    until((tmp_path / "begun").exists)
    os.kill(process, signal.SIGSTOP)
    with status.locked_run(run):
        status.write_status(run, "running", {"by": "thief"})
        (tmp_path / "end").touch()
        os.kill(process, signal.SIGCONT)
        finish(process)
        recorded = status.read_run(run) or {}
    assert (recorded["status"], recorded["by"]) == ("running", "thief")


@pytest.mark.usefixtures("short_leases")
@pytest.mark.parametrize("hours", [-1.0, 1.0])
def test_a_host_with_a_wrong_clock_keeps_its_lease(
    tmp_path: Path, hours: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refreshes its lease with times an hour off, as file systems do that take the time of the client."""
    begun = tmp_path / "begun"
    true_utime = os.utime

    def wrong_utime(path: Any, times: Any = None, **options: Any) -> None:
        shifted = time.time() + 3600 * hours
        true_utime(path, times or (shifted, shifted), **options)

    def work() -> None:
        monkeypatch.setattr(os, "utime", wrong_utime)
        monkeypatch.setattr(time, "time", lambda clock=time.time: clock() + 3600 * hours)
        with try_locked(tmp_path / "a.lock") as own:
            assert own is not None
            time.sleep(0.6)  # until the first refresh
            begun.touch()
            time.sleep(60)

    process = start(work)
    until(begun.exists)
    assert is_locked(tmp_path / "a.lock", patient=True)
    with try_locked(tmp_path / "a.lock") as own:
        assert own is None
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert not is_locked(tmp_path / "a.lock", patient=True)


def test_a_suspended_process_keeps_its_flock(tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def work() -> None:
        with try_locked(tmp_path / "a.lock") as own:
            assert own is not None
            begun.touch()
            time.sleep(60)

    process = start(work)
    until(begun.exists)
    os.kill(process, signal.SIGSTOP)
    assert is_locked(tmp_path / "a.lock")
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert not is_locked(tmp_path / "a.lock")
