"""Runs in progress hold their artifacts; whoever deletes learns who holds what."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from distill_runner.common import locks
from distill_runner.pipeline.holds import holders, remove_void_holds
from distill_runner.pipeline.store import Store, key_of
from helpers.processes import exit_code, start, until

SPECS = [{"kind": "stage", "seed": seed} for seed in range(4)]


def fill(folder: Path) -> None:
    (folder / "weights").write_bytes(b"0123456789")


@pytest.fixture(params=["flock", "lease"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("DISTILL_LOCKS", request.param)
    monkeypatch.setattr(locks, "LEASE_SECONDS", 1.5)
    return Store(tmp_path / "store")


def test_what_a_run_names_or_looks_for_stays_until_its_end(store: Store, tmp_path: Path) -> None:
    named, read, searched, other = (store.get(spec, fill) for spec in SPECS)
    with store.protected("a run"):
        store.hold([named.name])
        store.get(SPECS[1], fill)
        store.find(SPECS[2])
        for folder in (named, read, searched):
            reason = store.delete(folder) or ""
            assert reason.startswith("is held by process ")
            assert str(os.getpid()) in reason
            assert reason.endswith("for a run")
            assert folder.exists()
        assert store.delete(other) is None
        (damaged := named.with_name(f"{named.name}.damaged-1")).mkdir()
        assert store.delete(damaged) is None  # no run reads it
    assert holders(store.folder) == []
    for folder in (named, read, searched):
        assert store.delete(folder) is None


def test_what_does_not_exist_yet_is_held_too(store: Store, tmp_path: Path) -> None:
    with store.protected("a run"):
        store.hold([key_of(SPECS[0])])
        folder = Store(store.folder).get(SPECS[0], fill)  # by another run
        assert store.delete(folder)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "suspended"])
def test_a_dead_process_holds_nothing_and_a_suspended_one_does(
    store: Store, tmp_path: Path, number: signal.Signals
) -> None:
    folder = store.get(SPECS[0], fill)

    def run() -> None:
        with store.protected("a run"):
            store.hold([folder.name])
            (tmp_path / "begun").touch()
            time.sleep(60)

    process = start(run)
    until((tmp_path / "begun").exists)
    assert store.delete(folder)
    os.kill(process, number)
    if number == signal.SIGKILL:
        exit_code(process)
    remove_void_holds(store.folder)
    if number == signal.SIGSTOP:
        time.sleep(2 * locks.LEASE_SECONDS if os.environ["DISTILL_LOCKS"] == "lease" else 0)
        remove_void_holds(store.folder)
        assert store.delete(folder)
        os.kill(process, signal.SIGKILL)
        exit_code(process)
        remove_void_holds(store.folder)
    assert store.delete(folder) is None
    assert not [file for file in (store.folder / "holds").iterdir() if file.name != "deletion.lock"]


def test_deletions_during_many_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a run was given is there until its end, however often all is deleted."""
    monkeypatch.setenv("DISTILL_LOCKS", "flock")
    store, end = Store(tmp_path / "store"), time.monotonic() + 1.5

    def runs(seed: int) -> Callable[[], None]:
        def work() -> None:
            rng, number = random.Random(seed), 0
            while time.monotonic() < end:
                number += 1
                with store.protected(f"run {seed}"):
                    specs = rng.sample(SPECS, 2)
                    folders = [store.get(spec, fill) for spec in specs]
                    for _ in range(3):
                        assert [(folder / "weights").read_bytes() for folder in folders] == [b"0123456789"] * 2
                        time.sleep(rng.uniform(0, 0.003))
            assert number  # few on a busy machine

        return work

    processes = [start(runs(seed)) for seed in range(3)]
    deleted = retained = 0
    while time.monotonic() < end:
        remove_void_holds(store.folder)
        for spec in SPECS:
            with suppress(FileNotFoundError):
                if store.path(spec).exists():
                    reason = store.delete(store.path(spec))
                    deleted, retained = deleted + (reason is None), retained + (reason is not None)
    assert [exit_code(process) for process in processes] == [0, 0, 0]
    assert deleted
    assert retained
    assert not list(store.folder.glob("*/*.damaged-*"))
