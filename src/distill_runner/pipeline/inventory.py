"""What a store holds: sizes, ages, what was made from what, and what nothing was made from."""

import json
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from distill_runner.common.errors import UserError
from distill_runner.pipeline import status
from distill_runner.pipeline.store import SPEC, Spec, is_whole, key_of

KINDS = ("checkpoints", "targets", "tokens", "vocabulary", "stage")
"""In the order in which they are best deleted: the first are largest and soonest missed by nobody."""
State = Literal["whole", "damaged", "partial"]
_KEY = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class File:
    """A file as the disk has it: ``links`` names anywhere, of which several may lie in the store."""

    identity: tuple[int, int]
    size: int
    links: int


@dataclass(frozen=True)
class Entry:
    """An artifact, or what is left of one: ``partial`` was being built or deleted, ``damaged`` is not what it was.

    ``refers`` are the keys of all that its spec names, whether they are in the store or not; ``changed`` is in seconds
    since the epoch.
    """

    path: Path
    kind: str
    key: str
    state: State
    what: str
    refers: frozenset[str]
    files: tuple[File, ...]
    changed: float

    @property
    def age(self) -> float:
        """Seconds."""
        return time.time() - self.changed


def entries(store: Path) -> list[Entry]:
    """All of a store, by kind and age, the oldest first."""
    found = [_entry(path) for path in store.glob("*/*/") if _KEY.match(path.name)]
    order = {kind: number for number, kind in enumerate(KINDS)}
    return sorted(found, key=lambda entry: (order.get(entry.kind, len(KINDS)), entry.changed))


def _entry(path: Path) -> Entry:
    try:
        spec = json.loads((path / SPEC).read_text())
    except (OSError, ValueError):
        spec = {}
    key, _, rest = path.name.partition(".")
    state: State = "partial" if rest.startswith(("partial", "deleted")) else "damaged"
    if not rest and is_whole(path):
        state = "whole"
    files, changed = tuple(_files(path)), path.stat().st_mtime
    return Entry(path, path.parent.name, key, state, _what(spec), frozenset(_refers(spec)), files, changed)


def _files(folder: Path | str) -> Iterator[File]:
    """All below a folder. Of ten thousand artifacts ``Path.rglob`` alone would take a second."""
    with os.scandir(folder) as found:
        for one in found:
            if one.is_dir():
                yield from _files(one.path)
            else:
                stat = os.stat(one.path)
                yield File((stat.st_dev, stat.st_ino), stat.st_size, stat.st_nlink)


def _what(spec: Spec) -> str:
    """The name that tells one artifact from another of its kind."""
    if "checkpoint" in spec:
        return f"of epoch {spec['checkpoint']}"
    return str(spec.get("split") or (spec.get("stage", "") if spec.get("kind") == "stage" else ""))


def _refers(value: Any) -> Iterator[str]:
    """The keys of other artifacts in a spec, and those of whole specs within it."""
    if isinstance(value, dict):
        for part in value.values():
            if isinstance(part, dict) and {"kind", "schema"} <= part.keys():
                yield key_of(part)
            yield from _refers(part)
    elif isinstance(value, list):
        for part in value:
            yield from _refers(part)
    elif isinstance(value, str) and _KEY.fullmatch(value):
        yield value


def occupied(chosen: Iterable[Entry]) -> int:
    """Bytes on disk, a file of several names counted once."""
    return sum({file.identity: file.size for entry in chosen for file in entry.files}.values())


def freed(chosen: Iterable[Entry]) -> int:
    """Bytes that deleting ``chosen`` would free: not those of files that have another name elsewhere."""
    names: dict[tuple[int, int], list[File]] = {}
    for entry in chosen:
        for file in entry.files:
            names.setdefault(file.identity, []).append(file)
    return sum(files[0].size for files in names.values() if len(files) == files[0].links)


def unused(known: Sequence[Entry], runs: Path) -> list[Entry]:
    """The whole artifacts that no finished run was made from; caches are among them.

    Raises:
        UserError: there is no finished run in ``runs``, so that everything would be.
    """
    needed = set(_finished(runs))
    if not needed:
        raise UserError("--runs", runs, "holds no finished run, so that all would be unused", "Name the runs' folder.")
    by_key = {entry.key: entry for entry in known if entry.state == "whole"}
    reached: set[str] = set()
    while needed:
        key = needed.pop()
        reached.add(key)
        needed |= (by_key[key].refers if key in by_key else frozenset()) - reached
    return [entry for entry in by_key.values() if entry.key not in reached]


def _finished(runs: Path) -> Iterator[str]:
    """The keys of all stages that a run was asked for, students or others."""
    for folder in runs.glob("*/"):
        if (known := status.read(folder)) and known["status"] == "done":
            yield known["key"]


def users(known: Sequence[Entry], chosen: Collection[Entry]) -> list[Entry]:
    """What was made from one of ``chosen``, and is not among them."""
    keys, paths = {entry.key for entry in chosen}, {entry.path for entry in chosen}
    return [entry for entry in known if entry.path not in paths and entry.refers & keys]
