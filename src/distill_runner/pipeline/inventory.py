"""Contents of a store: sizes and ages of artifacts, what each was made from, and which ones no run uses."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from distill_runner.common.errors import UserError
from distill_runner.pipeline import status
from distill_runner.pipeline.store import SPEC, is_complete, key_of

KINDS = ("checkpoints", "targets", "onnx", "test", "tokens", "vocabulary", "speed", "stage")
"""Kinds of artifacts in the order in which to delete them: the first are the largest and easiest to make again."""
State = Literal["complete", "damaged", "partial", "unreadable"]
_KEY = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Entry:
    """Artifact in the store, or what is left of one.

    Attributes:
        state: ``partial`` while it is built or deleted, or after an interruption; ``damaged`` if its files changed;
            ``unreadable`` if they belong to another user who keeps them private.
        name: what distinguishes the artifact from others of its kind.
        references: keys of all artifacts that its spec names, whether or not they are in the store.
        files: of each file, device and inode, size in bytes, and number of its names (hard links), of which several
            may be in the store.
        changed: time in seconds since 1970.
    """

    path: Path
    kind: str
    key: str
    state: State
    name: str
    references: frozenset[str]
    files: tuple[tuple[tuple[int, int], int, int], ...]
    changed: float


def list_entries(store: Path) -> list[Entry]:
    """Return all artifacts of a store, sorted by kind and then by age, the oldest first."""
    entries = []
    for path in store.glob("*/*/"):
        if _KEY.match(path.name):
            with suppress(FileNotFoundError):  # it has just been deleted
                entries.append(_entry(path))
    order = {kind: number for number, kind in enumerate(KINDS)}
    return sorted(entries, key=lambda entry: (order.get(entry.kind, len(KINDS)), entry.changed))


def _entry(path: Path) -> Entry:
    try:
        spec = json.loads((path / SPEC).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        spec = {}
    key, _, rest = path.name.partition(".")
    state: State = "partial" if rest.startswith(("partial", "deleted")) else "damaged"
    try:
        if not rest and is_complete(path):
            state = "complete"
    except UserError:
        state = "unreadable"
    name = spec.get("split") or (spec.get("stage", "") if spec.get("kind") == "stage" else "")
    if spec.get("checkpoint") is not None:
        name = f"of epoch {spec['checkpoint']}"
    elif spec.get("kind") == "test":
        name = f"of {spec['tokens']['split']}"
    files = []
    for folder, _, names in os.walk(path):  # leaves out folders that this user may not read
        for file in names:
            with suppress(FileNotFoundError):
                info = os.stat(os.path.join(folder, file))
                files.append(((info.st_dev, info.st_ino), info.st_size, info.st_nlink))
    references = frozenset(_references(spec))
    return Entry(path, path.parent.name, key, state, str(name), references, tuple(files), path.stat().st_mtime)


def _references(value: Any) -> Iterator[str]:
    """Yield the keys of other artifacts in a spec, and the keys of complete specs nested in it."""
    if isinstance(value, str):
        if _KEY.fullmatch(value):
            yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            if isinstance(part, dict) and {"kind", "schema"} <= part.keys():
                yield key_of(part)
            yield from _references(part)


def occupied_bytes(entries: Iterable[Entry]) -> int:
    """Return the bytes on disk; a file with several names counts once."""
    return sum({identity: size for entry in entries for identity, size, _ in entry.files}.values())


def freed_bytes(entries: Iterable[Entry]) -> int:
    """Return the bytes that deleting ``entries`` would free; files that have another name elsewhere free nothing."""
    names = Counter(file for entry in entries for file in entry.files)
    return sum(size for (_, size, links), count in names.items() if count == links)


def unused_entries(entries: Sequence[Entry], runs: Path) -> list[Entry]:
    """Return the complete artifacts that no finished run in the folder ``runs`` was made from.

    Caches, such as ``tokens`` and ``targets``, always count as unused: no stage names them.

    Raises:
        UserError: ``runs`` holds no finished run, so that every artifact would be unused.
    """
    results = filter(None, map(status.read_run, runs.glob("*/")))
    pending = {run["key"] for run in results if run["status"] == "done"}
    if not pending:
        raise UserError("--runs", runs, "holds no finished run, so all would count as unused", "Give the runs' folder.")
    by_key = {entry.key: entry for entry in entries if entry.state == "complete"}
    used = set[str]()
    while pending:
        key = pending.pop()
        used.add(key)
        pending |= (by_key[key].references if key in by_key else frozenset()) - used
    return [entry for entry in by_key.values() if entry.key not in used]
