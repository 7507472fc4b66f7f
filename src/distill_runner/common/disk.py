"""A disk that is full: no mistake of the user's, and nothing is lost by it."""

import errno
from pathlib import Path
from shutil import disk_usage

from distill_runner.common.errors import Unavailable, causes

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WORDS = ("No space left on device", "os error 28", "Disk quota exceeded", "inline_container.cc", "iostream error")
"""Of libraries that do not pass the number of an error on; the last two are torch's."""
REMEDY = "Nothing is lost: make room (distill-run-store), and the same command goes on from here."


def when_full(error: BaseException) -> Unavailable | None:
    """What is said of an error, if a full disk was its cause."""
    for cause in causes(error):
        if (isinstance(cause, OSError) and cause.errno in FULL) or any(word in str(cause) for word in WORDS):
            place = getattr(cause, "filename", None) or "disk"
            return Unavailable(str(place), None, "there is no space left on the disk, or no file more", REMEDY)
    return None


def require(folder: Path, num_bytes: int, what: str) -> None:
    """See to it that a folder's disk has room.

    Raises:
        Unavailable: it has not.
    """
    if num_bytes > (free := disk_usage(folder).free):
        problem = f"{what} take {num_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB of the disk are free"
        raise Unavailable("store.dir", folder, problem, REMEDY)
