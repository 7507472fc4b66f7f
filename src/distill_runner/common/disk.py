"""Detection of a full disk, which is not the user's mistake and loses no work."""

import errno
from pathlib import Path
from shutil import disk_usage

from distill_runner.common.errors import Unavailable, causes

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WORDS = ("No space left on device", "os error 28", "Disk quota exceeded", "inline_container.cc", "iostream error")
"""Messages for a full disk from libraries that do not pass on the error number; the last two are from torch."""
REMEDY = "Nothing is lost: make room (distill-run-store), then repeat the command to resume."


def when_full(error: BaseException) -> Unavailable | None:
    """Return the error to show to the user if a full disk caused ``error``, else None."""
    for cause in causes(error):
        if (isinstance(cause, OSError) and cause.errno in FULL) or any(word in str(cause) for word in WORDS):
            place = getattr(cause, "filename", None) or "disk"
            return Unavailable(str(place), None, "there is no space left on the disk, or a quota is reached", REMEDY)
    return None


def require(folder: Path, num_bytes: int, what: str) -> None:
    """Require ``num_bytes`` of free space on the disk that holds ``folder``.

    Args:
        what: the data to be written, as a plural noun for the message.
    Raises:
        Unavailable: the disk has less free space.
    """
    if num_bytes > (free := disk_usage(folder).free):
        problem = f"{what} need {num_bytes / 1e9:.2f} GB, but only {free / 1e9:.2f} GB of the disk are free"
        raise Unavailable("store.dir", folder, problem, REMEDY)
