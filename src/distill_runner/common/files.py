"""Files: checksums, copies, atomic replacement, locks, exhausted resources, and texts without paths of this machine.

Full disks and too many open files are not the user's mistake, and lose no work. Model cards and tracked values leave
this machine, without its folders, its user and its tokens.
"""

import errno
import fcntl
import hashlib
import logging
import os
import re
import resource
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from distill_runner.common.errors import Unavailable, UserError, causes, override

log = logging.getLogger(__name__)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK_FULL_MESSAGES = (
    "No space left on device",
    "os error 28",
    "Disk quota exceeded",
    "os error 27",
    "inline_container.cc",
    "iostream error",
)
"""Messages for a full disk from libraries that do not pass on the error number; the last two are from torch."""
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
TOO_MANY_FILES_MESSAGES = ("Too many open files", "os error 24")
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$", re.IGNORECASE)
"""End of the names of environment variables that hold secrets."""
PATH = re.compile(r"(?<![\w:./~])(?:file://)?(?:~\w*|\.{1,2})?/(?:[^\s'\",;\]/]+/)*([^\s'\",;\]/]+)")
"""A path on this machine; the group is the last name of the path."""
_REMEDY = "Nothing is lost: free some space (distill-run store), then repeat the command to resume."


def placeholder(file: Path) -> str | None:
    """Return what is in the place of a file that was not downloaded, and what to do; None if it is not that.

    Clones without Git LFS hold pointers, and a failed download may leave the page of its error.
    """
    with file.open("rb") as stream:
        begin = stream.read(64).lstrip().lower()
    if begin.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS, without the content: run git lfs pull in its folder"
    if begin.startswith((b"<!doctype html", b"<html")):
        return "is a web page, such as that of a failed download: download the file itself"
    return None


def typed_path(text: str | Path) -> Path:
    """Return what a user typed as a path, with the home folder for ``~``; that of an unknown user stays as it is."""
    return Path(os.path.expanduser(text))


def file_sha256(file: Path) -> str:
    """Return the SHA-256 checksum of a file's content as hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def owner_name(file: Path) -> str:
    """Return the name of the user to whom a file belongs, for messages."""
    try:
        return file.owner()
    except KeyError:  # without a name
        return f"user {file.stat().st_uid}"
    except OSError:
        return "another user"


def share_remedy(folder: Path) -> str:
    """Return what the owner of a folder types to share it with its group."""
    return f"To share it with its group: chmod -R g+rwX {folder}, and umask 002 for all users."


@contextmanager
def atomic_replacement(file: Path, exclusive: bool = False) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``file``; what is written there replaces ``file`` at the end.

    Readers see the old content or all of the new content. After an error, ``file`` stays as it was.

    Args:
        exclusive: whether no other process writes ``file``. The temporary name is then fixed, so that what a killed
            process left is overwritten.
    """
    partial = file.with_name(f"{file.name}.tmp" if exclusive else f"{file.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield partial
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


# Locks between processes, also of several machines and users that share a folder

MECHANISM = "DISTILL_LOCKS"


def file_lock(file: Path) -> BaseFileLock:
    """Return a lock shared by all processes that name the same file.

    The kernel releases it when its process ends, however it ends, and keeps it while the process is suspended.

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


# Resources


def resource_error(error: BaseException) -> Unavailable | None:
    """Return the error to show to the user if a full disk or too many open files caused ``error``, else None."""
    for cause in causes(error):
        number = cause.errno if isinstance(cause, OSError) else None
        if number in DISK_FULL or any(message in str(cause) for message in DISK_FULL_MESSAGES):
            place = getattr(cause, "filename", None) or "disk"
            return Unavailable(str(place), None, "there is no space left on the disk, or a quota is reached", _REMEDY)
        if isinstance(cause, FileNotFoundError) and cause.filename is None:  # of getcwd
            return Unavailable("working folder", None, "has been deleted", "Change to another folder: cd")
        if number in TOO_MANY_FILES or any(message in str(cause) for message in TOO_MANY_FILES_MESSAGES):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            place, problem = getattr(cause, "filename", None) or "files", f"too many are open (the limit is {limit})"
            remedy = "Nothing is lost: ulimit -n 4096, then repeat the command to resume."
            return Unavailable(str(place), None, problem, remedy)
    return None


def require_disk_space(folder: Path, num_bytes: int, content: str) -> None:
    """Require ``num_bytes`` of free space on the disk that holds ``folder``.

    Args:
        content: the data to be written, as a plural noun for the message.
    Raises:
        Unavailable: the disk has less free space.
    """
    if num_bytes > (free := shutil.disk_usage(folder).free):
        problem = f"{content} need {num_bytes / 1e9:.2f} GB, but only {free / 1e9:.2f} GB of the disk are free"
        raise Unavailable("store.dir", folder, problem, _REMEDY)


# Texts


def without_secrets(text: str) -> str:
    """Return the text with ``***`` in place of the values of environment variables that hold secrets."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= 8:  # a shorter value may be a word
            text = text.replace(value, "***")
    return text


def without_paths(text: str) -> str:
    """Return the text with each path shortened to its last name, since folders of this machine mean nothing to others.

    The home folder becomes ``~``, and secrets become ``***``.
    """
    text, home = without_secrets(text), os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    return PATH.sub(r"\1", text)


def shareable(value: Any) -> Any:
    """Return a value, or a nested one, with ``without_paths`` applied to every text and to every key in it."""
    if isinstance(value, Mapping):
        return {shareable(key): shareable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [shareable(part) for part in value]
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        if os.path.isabs(value) and "\n" not in value and value != os.path.expanduser("~"):
            return without_paths(os.path.basename(value.rstrip("/")))  # also if it has blanks
        return without_paths(value)
    return value
