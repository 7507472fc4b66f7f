"""Locks between processes, by a mechanism that works on the file system that holds the lock file.

``flock`` is preferred: the kernel releases it when the process ends, however the process ends. Some network file
systems have no ``flock``, or one that other machines do not see. There the lock is a lease: a file that its holder
refreshes. The lock is free two minutes after the last refresh.
"""

import fcntl
import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from filelock import BaseFileLock, FileLock, SoftFileLease

from distill_runner.common.errors import UserError

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
        return FileLock(file)
    return SoftFileLease(file.with_suffix(".lease"), lease_duration=LEASE_SECONDS)


def flock_works(mount: Mount, folder: Path) -> bool:
    """Return whether ``flock`` excludes other processes here and, as the mount options tell, on other machines.

    Only types in ``SHARED`` are tested, once per process and mount, with a second process in ``folder``.
    """
    if mount.type.partition(".")[0] not in SHARED:
        return True
    if mount not in _WORKS:
        local = ", ".join(sorted(mount.options & LOCAL))
        reason = f"mounted with {local}" if local else None
        if not local and not excludes(folder):
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
