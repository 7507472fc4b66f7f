"""Contents of a store: sizes and ages of artifacts, what each was made from, and which ones no run uses."""

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
"""Kinds of artifacts in the order in which they are best deleted: the first are the largest and least missed."""
State = Literal["whole", "damaged", "partial"]
_KEY = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class File:
    """File on disk, identified by device and inode, with its size in bytes.

    ``links`` counts all names of the file (hard links); several of them may be in the store.
    """

    identity: tuple[int, int]
    size: int
    links: int


@dataclass(frozen=True)
class Entry:
    """Artifact in the store, or what is left of one.

    ``state`` is ``partial`` if the artifact was being built or deleted, and ``damaged`` if its files are not as they
    were built. ``what`` distinguishes the artifact from others of its kind. ``refers`` holds the keys of all artifacts
    that its spec names, whether or not they are in the store. ``changed`` is a time in seconds since 1970.
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
        """Age in seconds."""
        return time.time() - self.changed


def entries(store: Path) -> list[Entry]:
    """Return all artifacts of a store, sorted by kind and then by age, the oldest first."""
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
    """Yield all files below a folder. For ten thousand artifacts, ``Path.rglob`` alone would take a second."""
    with os.scandir(folder) as found:
        for one in found:
            if one.is_dir():
                yield from _files(one.path)
            else:
                stat = os.stat(one.path)
                yield File((stat.st_dev, stat.st_ino), stat.st_size, stat.st_nlink)


def _what(spec: Spec) -> str:
    """Return a name that distinguishes an artifact from others of its kind."""
    if "checkpoint" in spec:
        return f"of epoch {spec['checkpoint']}"
    return str(spec.get("split") or (spec.get("stage", "") if spec.get("kind") == "stage" else ""))


def _refers(value: Any) -> Iterator[str]:
    """Yield the keys of other artifacts in a spec, and the keys of whole specs nested in it."""
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
    """Return the bytes on disk; a file with several names counts once."""
    return sum({file.identity: file.size for entry in chosen for file in entry.files}.values())


def freed(chosen: Iterable[Entry]) -> int:
    """Return the bytes that deleting ``chosen`` would free; files that have another name elsewhere free nothing."""
    names: dict[tuple[int, int], list[File]] = {}
    for entry in chosen:
        for file in entry.files:
            names.setdefault(file.identity, []).append(file)
    return sum(files[0].size for files in names.values() if len(files) == files[0].links)


def unused(known: Sequence[Entry], runs: Path) -> list[Entry]:
    """Return the whole artifacts that no finished run was made from.

    Caches (``tokens``, ``targets``, ``checkpoints``) always count as unused, since no stage's spec names them.

    Raises:
        UserError: ``runs`` holds no finished run, so that every artifact would be unused.
    """
    needed = set(_finished(runs))
    if not needed:
        raise UserError("--runs", runs, "holds no finished run, so all would count as unused", "Give the runs' folder.")
    by_key = {entry.key: entry for entry in known if entry.state == "whole"}
    reached: set[str] = set()
    while needed:
        key = needed.pop()
        reached.add(key)
        needed |= (by_key[key].refers if key in by_key else frozenset()) - reached
    return [entry for entry in by_key.values() if entry.key not in reached]


def _finished(runs: Path) -> Iterator[str]:
    """Yield the key of the requested stage of each finished run, whether it is a student or another stage."""
    for folder in runs.glob("*/"):
        if (known := status.read(folder)) and known["status"] == "done":
            yield known["key"]


def users(known: Sequence[Entry], chosen: Collection[Entry]) -> list[Entry]:
    """Return the artifacts that were made from one of ``chosen`` and are not in ``chosen`` themselves."""
    keys, paths = {entry.key for entry in chosen}, {entry.path for entry in chosen}
    return [entry for entry in known if entry.path not in paths and entry.refers & keys]
