"""Locks between processes: of the kernel, or files where the user says that the kernel's do not reach others."""

import os
import signal
import time
from pathlib import Path

import pytest

from distill_runner.common.errors import UserError
from distill_runner.common.files import is_locked, locked, try_machine_lock
from helpers.processes import finish, start, until


@pytest.mark.parametrize("mechanism", ["flock", "soft"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "suspended"])
def test_a_dead_process_frees_its_lock_and_a_suspended_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mechanism: str, number: signal.Signals
) -> None:
    monkeypatch.setenv("DISTILL_LOCKS", mechanism)
    file, ready = tmp_path / "a.lock", tmp_path / "ready"

    def work() -> None:
        with locked(file) as is_own:
            assert is_own
            ready.touch()
            time.sleep(60)

    process = start(work)
    until(ready.exists)
    assert is_locked(file)
    os.kill(process, number)
    if number == signal.SIGSTOP:
        with locked(file) as is_own:
            assert not is_own
        assert is_locked(file)
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert not is_locked(file)
    with locked(file, "waiting") as is_own:
        assert is_own


def test_a_second_process_says_that_it_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def wait() -> None:
        with caplog.at_level("INFO"), locked(tmp_path / "a.lock", "waiting for another process") as is_own:
            assert is_own
        assert caplog.messages == ["waiting for another process"]

    with locked(tmp_path / "a.lock"):
        process = start(wait)
        time.sleep(0.5)
    finish(process)


def test_an_unknown_way_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DISTILL_LOCKS", "prayer")
    with pytest.raises(UserError, match="DISTILL_LOCKS=prayer"), locked(tmp_path / "a.lock"):
        pass


def test_a_lock_of_the_machine_is_taken_once(tmp_path: Path) -> None:
    first = try_machine_lock(tmp_path / "gpu.lock")
    assert first is not None
    assert try_machine_lock(tmp_path / "gpu.lock") is None
    first.release()
    assert try_machine_lock(tmp_path / "gpu.lock") is not None
