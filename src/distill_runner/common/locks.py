"""Locks between processes, by a mechanism that works on the file system that holds the lock file.

``flock`` is preferred: the kernel releases it when the process ends, however the process ends. Some network file
systems have no ``flock``, or one that other machines do not see. There the lock is a lease: a file that its holder
refreshes. The lock is free two minutes after the last refresh. A process that is suspended for so long loses its lease
and does not notice, so what a lease protects must stay correct with two holders.

Whoever may create files in a lock's folder may use the lock: users of a shared folder lock each other out.
"""

import fcntl
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from filelock import BaseFileLock, FileLock, SoftFileLease, Timeout

from distill_runner.common.errors import UserError
from distill_runner.common.files import owner_name, share_remedy

log = logging.getLogger(__name__)

MECHANISM = "DISTILL_LOCKS"
LEASE_SECONDS = 120.0
MOUNTS = Path("/proc/self/mounts")
SHARED = {"9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3"}
"""Types of file systems that several machines may see; for ``fuse.sshfs``, the part before the dot counts."""
LOCAL = {"nolock", "local_lock=flock", "local_lock=all", "localflock"}
"""Mount options of NFS and Lustre with which other machines do not see an ``flock``."""
_TRY_LOCK = """import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "a"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(3)
"""


class Mount(NamedTuple):
    point: str
    type: str
    options: frozenset[str]


_WORKS: dict[Mount, bool] = {}


def lock(file: Path) -> BaseFileLock:
    """Return a lock shared by all processes that name the same file, on all machines that see the file.

    ``DISTILL_LOCKS=flock`` or ``lease`` selects the mechanism, which must be the same on all machines.

    Raises:
        UserError: ``DISTILL_LOCKS`` has another value.
    """
    mechanism = os.environ.get(MECHANISM)
    if mechanism not in (None, "flock", "lease"):
        raise UserError(MECHANISM, mechanism, "is not a way to lock files", "Set it to flock or lease, or unset it.")
    if mechanism == "flock" or (mechanism is None and flock_works(mount_of(file.parent), file.parent)):
        mode = file.parent.stat().st_mode & 0o666 if file.parent.is_dir() else 0o600
        return FileLock(file, mode=mode | 0o600)
    return SoftFileLease(file.with_suffix(".lease"), lease_duration=LEASE_SECONDS)


@contextmanager
def locked(file: Path, wait_message: str | None = None) -> Iterator[BaseFileLock]:
    """Hold the lock of ``lock(file)``, whose folder must exist; wait for it as long as it takes.

    Args:
        wait_message: message to log before waiting for another process; None logs nothing.
    Raises:
        UserError: this user may not use the lock file, since another user keeps it from the group.
    """
    own = lock(file)
    with _explained_permissions(file):
        try:
            own.acquire(timeout=0)
        except Timeout:
            if wait_message:
                log.info("%s", wait_message)
            own.acquire()
    try:
        with suppress(OSError):  # the group of the folder, where the folder does not hand it on itself
            if (group := file.parent.stat().st_gid) != (status := file.stat()).st_gid and status.st_uid == os.geteuid():
                os.chown(file, -1, group)
        yield own
    finally:
        own.release()


@contextmanager
def try_locked(file: Path) -> Iterator[BaseFileLock | None]:
    """Hold the lock of ``lock(file)``; yield None if another process holds it.

    Raises:
        UserError: as in ``locked``.
    """
    own = lock(file)
    with _explained_permissions(file):
        try:
            own.acquire(timeout=0)
        except Timeout:
            yield None
            return
    try:
        yield own
    finally:
        own.release()


@contextmanager
def _explained_permissions(file: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        subject = file if file.exists() else file.parent
        problem = f"belongs to {owner_name(subject)}, and this user may not write it"
        raise UserError(str(subject), None, problem, share_remedy(file.parent)) from error


def is_lost(own: BaseFileLock) -> bool:
    """Return whether another process has taken a lock over that this process acquired; only a lease can be lost."""
    return isinstance(own, SoftFileLease) and ((owner := own.owner) is None or owner.token != own.token)


def is_locked(file: Path, patient: bool = False) -> bool:
    """Return whether a process holds the lock of ``lock(file)``; it needs only read access to the folder.

    A lease that was not refreshed for ``LEASE_SECONDS`` by the clock of the file system counts as free.

    Args:
        patient: whether to watch such a lease for ``LEASE_SECONDS``: a host with a wrong clock may refresh it.
    """
    own = lock(file)
    if not isinstance(own, SoftFileLease):
        return _is_flocked(file)
    try:
        marker = os.stat(own.lock_file)
    except OSError:
        return False
    try:
        own.acquire(timeout=0)  # a holder on this host that has ended is recognized at once
    except (Timeout, PermissionError):
        if _file_system_time(file.parent) - marker.st_mtime <= LEASE_SECONDS:
            return True
        try:
            if patient:
                own.acquire(timeout=LEASE_SECONDS * 1.2)
        except (Timeout, PermissionError):
            return True
    own.release()
    return False


def _is_flocked(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no lock file
        return False
    return False


def _file_system_time(folder: Path) -> float:
    """Return the time by the clock that sets the times of files in ``folder``, which may be that of a server."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".locks-") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


class MachineLock:
    """Lock in a folder that all users of a machine share, such as ``/tmp``; the kernel frees it with its process.

    Any user who can read the file can lock it, since ``flock`` needs no write access.

    Raises:
        UserError: another user has made the file unreadable.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Acquire the lock, and return True; return False if another process holds it."""
        descriptor = self._open()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            try:
                return os.open(self.file, flags)
            except FileNotFoundError:
                with suppress(FileExistsError):
                    descriptor = os.open(self.file, flags | os.O_CREAT | os.O_EXCL, 0o644)
                    os.fchmod(descriptor, 0o644)  # whatever the umask: other users lock it too
                    return descriptor
                return os.open(self.file, flags)
        except OSError as error:
            problem = f"{self.file} cannot be opened: {error.strerror} (it belongs to {owner_name(self.file)})"
            remedy = "Name the device (runtime.device=cuda:0), or set TMPDIR to a folder of your own."
            raise UserError("runtime.device", "auto", problem, remedy) from error


def flock_works(mount: Mount, folder: Path) -> bool:
    """Return whether ``flock`` excludes other processes here and, as the mount options tell, on other machines.

    Only types in ``SHARED`` are tested, once per process and mount, with a second process in ``folder``.
    """
    if mount.type.partition(".")[0] not in SHARED:
        return True
    if mount not in _WORKS:
        local = ", ".join(sorted(mount.options & LOCAL))
        reason = f"mounted with {local}" if local else None
        if not local and os.access(folder, os.W_OK) and not excludes(folder):
            reason = "a second process got the same lock"
        if reason:
            where = f"{mount.point} ({mount.type})"
            log.info("locks on %s are renewed lease files, since flock does not work there: %s", where, reason)
        _WORKS[mount] = reason is None
    return _WORKS[mount]


def excludes(folder: Path) -> bool:
    """Return whether a second process cannot lock a file in ``folder`` that this process has locked."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".locks-") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return subprocess.run([sys.executable, "-S", "-E", "-c", _TRY_LOCK, file.name], check=False).returncode == 3


def mount_of(folder: Path) -> Mount:
    """Return the file system that holds ``folder``; a local one if the operating system does not list its mounts."""
    try:
        lines = [line.split(" ") for line in os.fsdecode(MOUNTS.read_bytes()).split("\n") if line]
    except OSError:
        return Mount("/", "unknown", frozenset())
    # Spaces in mount points are written as \040. Of several mounts at one point, only the last one is visible.
    mounts = [
        Mount(
            re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), name), file_system, frozenset(options.split(","))
        )
        for _, name, file_system, options, *_ in lines
    ]
    matches = [mount for mount in mounts if folder.resolve().is_relative_to(mount.point)]
    return max(reversed(matches), key=lambda mount: len(mount.point), default=Mount("/", "unknown", frozenset()))
