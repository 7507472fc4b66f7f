"""Locks: of the kernel where they hold between machines, else files that are refreshed."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock, SoftFileLease, Timeout

from distill_runner.common import locks
from distill_runner.common.errors import UserError
from distill_runner.common.locks import Mount, excludes, flock_works, lock, mount_of
from distill_runner.pipeline import status
from distill_runner.pipeline.store import Store

HELD = """import sys, time
from pathlib import Path
from distill_runner.common import locks
locks.LEASE_SECONDS = 3.0
own = locks.lock(Path(sys.argv[1]))
own.acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_WORKS", {})


def mounted(folder: Path, kind: str, options: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``folder`` lies on a file system of this type."""
    listed = tmp_path / "mounts"
    listed.write_text(f"disk / ext4 rw,relatime 0 0\nserver:/home {folder} {kind} {options} 0 0\n")
    monkeypatch.setattr(locks, "MOUNTS", listed)


def test_a_second_process_is_kept_out_here(tmp_path: Path) -> None:
    assert excludes(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_where_locking_fails_nobody_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert not excludes(tmp_path)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("ext4", "rw,relatime", FileLock),
        ("nfs4", "rw,vers=4.2,local_lock=none", FileLock),
        ("nfs", "rw,vers=3,nolock,local_lock=all", SoftFileLease),
        ("nfs", "rw,vers=3,local_lock=flock", SoftFileLease),
        ("lustre", "rw,localflock", SoftFileLease),
        ("lustre", "rw,flock", FileLock),
    ],
)
def test_the_mount_decides(
    kind: str, options: str, expected: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    mounted(folder, kind, options, monkeypatch, tmp_path)
    assert isinstance(lock(folder / "a.lock"), expected)
    assert isinstance(lock(tmp_path / "a.lock"), FileLock)


def test_a_shared_disk_without_locks_is_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(locks, "excludes", lambda _: False)
    mount = Mount("/scratch", "fuse.sshfs", frozenset({"rw"}))
    with caplog.at_level(logging.INFO):
        assert not any(flock_works(mount, tmp_path) for _ in range(3))
    assert [record.getMessage() for record in caplog.records] == [
        "locks on /scratch (fuse.sshfs) are renewed lease files, since flock does not work there: "
        "a second process got the same lock"
    ]


@pytest.mark.parametrize("name", ["my disk", "größe", "ディスク"])
def test_names_of_mounts_may_hold_spaces_and_any_letters(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    mounted(Path(str(folder).replace(" ", "\\040")), "nfs", "rw", monkeypatch, tmp_path)
    assert mount_of(folder) == Mount(str(folder), "nfs", frozenset({"rw"}))


def test_an_unknown_way_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DISTILL_LOCKS", "prayer")
    with pytest.raises(UserError, match="DISTILL_LOCKS=prayer"):
        lock(tmp_path / "a.lock")


@pytest.mark.parametrize("way", ["flock", "lease"])
def test_a_killed_holder_frees_the_lock(way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DISTILL_LOCKS", way)
    monkeypatch.setattr(locks, "LEASE_SECONDS", 3.0)
    file = tmp_path / "a.lock"
    with subprocess.Popen([sys.executable, "-c", HELD, str(file)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Timeout):
            lock(file).acquire(timeout=0)
        holder.kill()
    lock(file).acquire(timeout=30).lock.release()


def test_the_store_and_runs_work_with_files_that_are_refreshed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DISTILL_LOCKS", "lease")

    def fill(folder: Path) -> None:
        (folder / "x").write_text("1")

    store, spec = Store(tmp_path / "store"), {"kind": "stage", "name": "a"}
    artifact = store.get(spec, fill)
    assert store.has(spec)
    assert store.delete(artifact) is None
    assert not store.has(spec)
    with status.locked_run(tmp_path / "run") as known:
        assert known is None
        status.write_status(tmp_path / "run", "running", {})
        assert (status.read_run(tmp_path / "run") or {})["status"] == "running"
    assert (status.read_run(tmp_path / "run") or {})["status"] == "killed"
