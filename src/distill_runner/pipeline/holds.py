"""What runs in progress hold: the artifacts that ``distill-run store delete`` must not delete.

A hold is a file ``<store>/holds/<id>.json`` with the keys of artifacts, the process, and the folder of its run. It
counts as long as its process holds the lock ``<id>.lock``, so the hold of a process that ended by any means is void.
Where locks are leases, it also counts while its process lives on this host, even if it is suspended.
Keys are added, and artifacts are deleted, under one lock of the store. An artifact is therefore deleted either before
a run looks for it, or after the run.
"""

import getpass
import json
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from filelock import BaseFileLock

from distill_runner.common.files import atomic_replacement
from distill_runner.common.locks import is_locked, locked

FOLDER = "holds"
"""Folder in the store, beside those of the kinds of artifacts."""


@dataclass(frozen=True)
class Holder:
    """A run in progress, and the keys of the artifacts that it holds."""

    keys: frozenset[str]
    process: int
    host: str
    user: str
    purpose: str
    started: str | None

    @property
    def lives_here(self) -> bool:
        """Whether the process is one of this host that has not ended."""
        return self.host == socket.gethostname() and None is not self.started == _start_time(self.process)

    def __str__(self) -> str:
        return f"process {self.process} of {self.user} on {self.host}, for {self.purpose}"


class Hold:
    """Keys of artifacts that this process holds.

    Args:
        file: record of the hold.
        purpose: what needs the artifacts, for messages.
    """

    def __init__(self, file: Path, purpose: str) -> None:
        self.file, self.purpose = file, purpose
        self.keys = frozenset[str]()

    def add(self, keys: Iterable[str]) -> None:
        """Hold more artifacts, whether or not they exist yet."""
        new = self.keys.union(keys)
        if new == self.keys:
            return
        record = {
            "keys": sorted(new),
            "process": os.getpid(),
            "host": socket.gethostname(),
            "user": _user(),
            "purpose": self.purpose,
            "started": _start_time(os.getpid()),
        }
        with deletion_lock(self.file.parent.parent), atomic_replacement(self.file, exclusive=True) as partial:
            partial.write_text(json.dumps(record), encoding="utf-8")
        self.keys = new


@contextmanager
def hold(store: Path, purpose: str) -> Iterator[Hold]:
    """Hold artifacts of ``store`` within the context; those to hold are added to the ``Hold``."""
    (store / FOLDER).mkdir(exist_ok=True)
    file = store / FOLDER / f"{uuid4().hex[:16]}.json"
    with locked(file.with_suffix(".lock")):
        try:
            yield Hold(file, purpose)
        finally:
            _remove(file)


def deletion_lock(store: Path) -> AbstractContextManager[BaseFileLock]:
    """Return the lock under which keys are added to holds, and artifacts get out of reach of runs."""
    (store / FOLDER).mkdir(exist_ok=True)
    return locked(store / FOLDER / "deletion.lock")


def remove_void_holds(store: Path) -> None:
    """Remove the records of processes that have ended.

    Where locks are leases, a process on another host that shows no sign of life is watched for two minutes.
    """
    for file in (store / FOLDER).glob("*.json"):
        holder = _read_holder(file)
        if holder and not holder.lives_here and not is_locked(file.with_suffix(".lock"), patient=True):
            _remove(file)


def holders(store: Path) -> list[Holder]:
    """Return all recorded holders, some of which may have ended since ``remove_void_holds``."""
    return [holder for file in sorted((store / FOLDER).glob("*.json")) if (holder := _read_holder(file))]


def _read_holder(file: Path) -> Holder | None:
    """Return the record of a hold; None if it was released meanwhile."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Holder(**(record | {"keys": frozenset(record["keys"])}))


def _remove(file: Path) -> None:
    for path in (file, file.with_suffix(".lock"), file.with_name(f"{file.name}.tmp")):
        path.unlink(missing_ok=True)


def _start_time(process: int) -> str | None:
    """Return when a process of this host started, in ticks since the host did; None if there is no such process."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in some containers
        return f"user {os.getuid()}"
