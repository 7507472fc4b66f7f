"""Locks between processes (``filelock``), also of several machines and users that share a folder.

The kernel releases such a lock when its process ends, however it ends, and keeps it while the process is suspended.
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from distill_runner.common.errors import UserError, override
from distill_runner.common.files import owner_name, share_remedy

log = logging.getLogger(__name__)

MECHANISM = "DISTILL_LOCKS"


def file_lock(file: Path) -> BaseFileLock:
    """Return a lock shared by all processes that name the same file.

    ``DISTILL_LOCKS=soft`` is for file systems on which ``flock`` does not reach other machines: the lock is then held
    as long as its file exists. After the crash of another machine, the file has to be removed by hand.

    Raises:
        UserError: ``DISTILL_LOCKS`` has another value.
    """
    mechanism = os.environ.get(MECHANISM, "flock")
    if mechanism not in ("flock", "soft"):
        raise UserError(MECHANISM, mechanism, "is not a way to lock files", "Set it to flock or soft, or unset it.")
    return SoftFileLock(file) if mechanism == "soft" else FileLock(file)


@contextmanager
def locked(file: Path, wait_message: str | None = None) -> Iterator[bool]:
    """Hold the lock of a file, whose folder must exist, within the context.

    Args:
        wait_message: message to log before waiting for another process that holds it; None does not wait.
    Yields:
        Whether this process holds the lock.
    Raises:
        UserError: this user may not use the lock file, since another user keeps it from the group.
    """
    lock = file_lock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if wait_message is not None:
            log.info("%s", wait_message)
            lock.acquire()
    except PermissionError as error:
        subject = file if file.exists() else file.parent
        problem = f"belongs to {owner_name(subject)}, and this user may not write it"
        raise UserError(str(subject), None, problem, share_remedy(file.parent)) from error
    try:
        yield lock.is_locked
    finally:
        lock.release()


def is_locked(file: Path) -> bool:
    """Return whether a process holds the lock of a file; it needs only read access."""
    if isinstance(lock := file_lock(file), SoftFileLock):
        try:
            lock.acquire(timeout=0)  # removes what a process of this machine has left
        except (Timeout, PermissionError):
            return file.exists()
        lock.release()
        return False
    try:
        with file.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no lock file
        return False
    return False


def try_machine_lock(file: Path) -> BaseFileLock | None:
    """Return the acquired lock of a file that all users of a machine share, such as in ``/tmp``; None if it is taken.

    Raises:
        UserError: another user has made the file private.
    """
    lock = FileLock(file, mode=0o666)  # whatever the umask
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    except OSError as error:
        problem = f"{file} cannot be opened: {error.strerror} (it belongs to {owner_name(file)})"
        remedy = "Name the device, " + override("runtime.device", "cuda:0") + ", or set TMPDIR to a folder of your own."
        raise UserError("runtime.device", "auto", problem, remedy) from error
    return lock
