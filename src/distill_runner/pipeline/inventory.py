"""Contents of a store: sizes and ages of artifacts, what each was made from, and which ones no run uses."""

import json
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from distill_runner.common.errors import UserError
from distill_runner.pipeline import status
from distill_runner.pipeline.store import SPEC, Spec, is_complete, key_of

KINDS = ("checkpoints", "targets", "onnx", "test", "tokens", "vocabulary", "speed", "products", "stage")
"""Kinds of artifacts in the order in which to delete them: the first are the largest and easiest to make again."""
State = Literal["complete", "damaged", "partial", "unreadable"]
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

    Attributes:
        state: ``partial`` while it is built or deleted, or after an interruption; ``damaged`` if its files changed;
            ``unreadable`` if they belong to another user who keeps them private.
        name: what distinguishes the artifact from others of its kind.
        references: keys of all artifacts that its spec names, whether or not they are in the store.
        changed: time in seconds since 1970.
    """

    path: Path
    kind: str
    key: str
    state: State
    name: str
    references: frozenset[str]
    files: tuple[File, ...]
    changed: float

    @property
    def age(self) -> float:
        """Age in seconds."""
        return time.time() - self.changed


def list_entries(store: Path) -> list[Entry]:
    """Return all artifacts of a store, sorted by kind and then by age, the oldest first."""
    artifacts = [entry for path in store.glob("*/*/") if _KEY.match(path.name) if (entry := _entry(path))]
    order = {kind: number for number, kind in enumerate(KINDS)}
    return sorted(artifacts, key=lambda entry: (order.get(entry.kind, len(KINDS)), entry.changed))


def _entry(path: Path) -> Entry | None:
    """Return the artifact in a folder; None if the folder is gone."""
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
    files = tuple(_files(path))
    try:
        changed = path.stat().st_mtime
    except FileNotFoundError:
        return None
    return Entry(path, path.parent.name, key, state, _name(spec), frozenset(_references(spec)), files, changed)


def _files(folder: Path | str) -> Iterator[File]:
    """Yield all readable files below a folder, which may change meanwhile.

    For ten thousand artifacts, ``Path.rglob`` alone would take a second.
    """
    with suppress(FileNotFoundError, PermissionError), os.scandir(folder) as children:
        for child in children:
            with suppress(FileNotFoundError, PermissionError):
                if child.is_dir():
                    yield from _files(child.path)
                else:
                    info = os.stat(child.path)
                    yield File((info.st_dev, info.st_ino), info.st_size, info.st_nlink)


def _name(spec: Spec) -> str:
    """Return a name that distinguishes an artifact from others of its kind."""
    if "checkpoint" in spec:
        return f"of epoch {spec['checkpoint']}"
    if "tokens" in spec and spec.get("kind") == "test":
        return f"of {spec['tokens']['split']}"
    return str(spec.get("split") or (spec.get("stage", "") if spec.get("kind") == "stage" else ""))


def _references(value: Any) -> Iterator[str]:
    """Yield the keys of other artifacts in a spec, and the keys of complete specs nested in it."""
    if isinstance(value, dict):
        for part in value.values():
            if isinstance(part, dict) and {"kind", "schema"} <= part.keys():
                yield key_of(part)
            yield from _references(part)
    elif isinstance(value, list):
        for part in value:
            yield from _references(part)
    elif isinstance(value, str) and _KEY.fullmatch(value):
        yield value


def occupied_bytes(entries: Iterable[Entry]) -> int:
    """Return the bytes on disk; a file with several names counts once."""
    return sum({file.identity: file.size for entry in entries for file in entry.files}.values())


def freed_bytes(entries: Iterable[Entry]) -> int:
    """Return the bytes that deleting ``entries`` would free; files that have another name elsewhere free nothing."""
    names: dict[tuple[int, int], list[File]] = {}
    for entry in entries:
        for file in entry.files:
            names.setdefault(file.identity, []).append(file)
    return sum(files[0].size for files in names.values() if len(files) == files[0].links)


def unused_entries(entries: Sequence[Entry], runs: Path) -> list[Entry]:
    """Return the complete artifacts that no finished run in the folder ``runs`` was made from.

    Caches (``tokens``, ``targets``, ``checkpoints``, ``onnx``, ``test``, ``speed``, ``products``) always count as
    unused: no stage names them.

    Raises:
        UserError: ``runs`` holds no finished run, so that every artifact would be unused.
    """
    pending = set(_finished_keys(runs))
    if not pending:
        raise UserError("--runs", runs, "holds no finished run, so all would count as unused", "Give the runs' folder.")
    by_key = {entry.key: entry for entry in entries if entry.state == "complete"}
    used: set[str] = set()
    while pending:
        key = pending.pop()
        used.add(key)
        pending |= (by_key[key].references if key in by_key else frozenset()) - used
    return [entry for entry in by_key.values() if entry.key not in used]


def _finished_keys(runs: Path) -> Iterator[str]:
    """Yield the key of the requested stage of each finished run, whether it is a student or another stage."""
    for folder in runs.glob("*/"):
        if (run := status.read_run(folder)) and run["status"] == "done":
            yield run["key"]


def dependent_entries(entries: Sequence[Entry], selection: Collection[Entry]) -> list[Entry]:
    """Return the artifacts that were made from one of ``selection`` and are not in ``selection`` themselves."""
    keys, paths = {entry.key for entry in selection}, {entry.path for entry in selection}
    return [entry for entry in entries if entry.path not in paths and entry.references & keys]
