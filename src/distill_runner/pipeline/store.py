"""Artifacts addressed by the hash of everything that determines them.

An artifact is a folder ``<store>/<kind>/<key>`` with ``spec.json`` (what determined it) and ``manifest.json`` (its
files with sizes and checksums). It is built in ``<key>.partial`` under a lock, and renamed when it is complete. After
an interrupted build, the next one finds the partial folder and may resume from its content.

A run holds a shared lock on ``<key>.use`` of each artifact that it needs, which keeps others from deleting it.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from distill_runner.common.errors import Unavailable, UserError
from distill_runner.common.files import atomic_replacement, file_sha256, locked, owner_name, share_remedy
from distill_runner.pipeline import status

log = logging.getLogger(__name__)

SCHEMA = 5
"""Version of what artifacts mean. Raising it makes every artifact be built again."""
Spec = Mapping[str, Any]
MANIFEST, SPEC = "manifest.json", "spec.json"
_NOT_DAMAGE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EINTR}
"""Errors that say nothing about the file that was to be read."""


def key_of(spec: Spec) -> str:
    """Return the key of ``spec``: the first 16 hexadecimal digits of the SHA-256 of its canonical JSON."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Store:
    """Folder of artifacts, shared by any number of processes.

    Raises:
        UserError: the folder cannot be created or written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._verified = set[Path]()
        """Artifacts whose checksums this object has verified."""
        self._uses: dict[Path, int] | None = None
        """Descriptors of the files ``<key>.use`` that this object has locked; None outside of ``protected``."""
        remedy = "Set store.dir to a writable folder."
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError("store.dir", folder, f"cannot be used: {error.strerror}", remedy) from error
        if not os.access(self.folder, os.W_OK):
            raise UserError("store.dir", folder, "is not writable", remedy)

    def path(self, spec: Spec) -> Path:
        """Return the folder of the artifact of ``spec``, which need not exist. ``spec["kind"]`` names the parent."""
        return self.folder / spec["kind"] / key_of(spec)

    def has(self, spec: Spec) -> bool:
        """Whether the artifact exists, by the sizes of its files; takes milliseconds."""
        return is_complete(self.path(spec))

    def find(self, spec: Spec) -> Path | None:
        """Return the folder of the artifact of ``spec`` if it exists and its checksums are correct, else None."""
        path = self.path(spec)
        self.protect(spec)
        if not is_complete(path, checksums=path not in self._verified):
            return None
        self._verified.add(path)
        return path

    @contextmanager
    def protected(self) -> Iterator[None]:
        """Protect from deletion, within the context, the artifacts that ``protect`` names, and all that are read."""
        self._uses, number = {}, self.folder.stat().st_ino
        try:
            yield
        except Exception as error:
            if self.folder.is_dir() and self.folder.stat().st_ino == number:
                raise
            problem = "was moved or removed while this run used it"
            raise Unavailable("store.dir", self.folder, problem, "Put it back, and repeat the command.") from error
        finally:
            for descriptor in self._uses.values():
                os.close(descriptor)
            self._uses = None

    def protect(self, *specs: Spec) -> None:
        """Protect artifacts, which need not exist, until the end of the context of ``protected``; else do nothing.

        A user who may not write to the store protects nothing there.
        """
        for file in (self.path(spec).with_suffix(".use") for spec in specs):
            if self._uses is not None and file not in self._uses:
                with suppress(OSError):
                    file.parent.mkdir(exist_ok=True)
                    self._uses[file] = os.open(file, os.O_RDONLY | os.O_CREAT, 0o666)
                    fcntl.flock(self._uses[file], fcntl.LOCK_SH)  # waits for a deletion, which takes milliseconds

    def specs(self, kind: str) -> Iterator[Spec]:
        """Yield the specs of all artifacts of one kind, including partial and damaged ones."""
        for file in sorted((self.folder / kind).glob(f"*/{SPEC}")):
            with suppress(OSError, ValueError):  # the file is being written or deleted
                yield json.loads(file.read_text(encoding="utf-8"))

    def get(self, spec: Spec, build: Callable[[Path], None]) -> Path:
        """Return the artifact of ``spec``; build it if it is missing or damaged.

        Args:
            build: function that fills the folder it receives, which may hold the rest of an interrupted build.
        Returns:
            the artifact's folder; the checksums of an existing artifact have been verified.
        """
        path = self.path(spec)
        if self.find(spec):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f"{path.name}.lock"), f"waiting for another process, which is building {path}"):
            if self.find(spec):  # another process built it meanwhile
                return path
            if path.exists():
                damaged = path.with_name(f"{path.name}.damaged-{_unique_id()}")
                log.warning("%s is damaged: moved to %s and built again", path, damaged.name)
                path.rename(damaged)
                self._verified.discard(path)
            partial = path.with_name(f"{path.name}.partial")
            if partial.exists() and not _is_usable(partial):
                log.info("%s belongs to %s and cannot be resumed here", partial, owner_name(partial))
                partial.rename(partial.with_name(f"{partial.name}-{_unique_id()}"))
            partial.mkdir(exist_ok=True)
            (partial / SPEC).unlink(missing_ok=True)  # it may belong to another user
            (partial / SPEC).write_text(json.dumps(spec, indent=1, sort_keys=True), encoding="utf-8")
            build(partial)
            _write_manifest(partial)
            partial.rename(path)
        return path

    def delete(self, path: Path) -> str | None:
        """Delete the folder of an artifact, or what is left of one, unless a process needs it.

        The folder is renamed first. After an interrupted deletion, the rest is not taken for an artifact.

        Returns:
            Why the folder was not deleted; None if it is gone.
        """
        key = path.name.partition(".")[0]
        trash = path.with_name(f"{key}.deleted-{_unique_id()}")
        with locked(path.with_name(f"{key}.lock")) as is_own:
            if not is_own:
                return "is being built"
            if foreign := next((folder for folder, _, _ in os.walk(path) if not os.access(folder, os.W_OK)), None):
                return f"belongs to {owner_name(Path(foreign))}, and this user may not delete it"
            with path.with_name(f"{key}.use").open("ab") as use:
                try:
                    fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return IN_USE
                with suppress(FileNotFoundError):  # another process has deleted it
                    path.rename(trash)
        remove(trash)
        return None


IN_USE = "is in use by a run"
"""Why ``Store.delete`` leaves an artifact that a process protects."""


def _unique_id() -> str:
    return uuid4().hex[:8]


def _is_usable(partial: Path) -> bool:
    """Whether this user can read all files of an interrupted build, and write in its folders."""
    return all(
        os.access(folder, os.W_OK) and all(os.access(Path(folder, file), os.R_OK) for file in files)
        for folder, _, files in os.walk(partial)
    )


def _write_manifest(folder: Path) -> None:
    """Write the manifest, and give all files the mode of a new file: libraries write some that only their owner reads.

    The mode follows the umask; folders hand on their group as the parent folder does.
    """
    (folder / MANIFEST).unlink(missing_ok=True)  # its mode is that of a new file
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    manifest = {str(f.relative_to(folder)): {"size": f.stat().st_size, "sha256": file_sha256(f)} for f in files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    mode = stat.S_IMODE((folder / MANIFEST).stat().st_mode)
    folder_mode = mode | (mode & 0o444) >> 2 | folder.parent.stat().st_mode & stat.S_ISGID
    for path in (folder, *folder.rglob("*")):
        expected = folder_mode if path.is_dir() else mode
        with suppress(OSError):  # of another user, who began to build the artifact
            if stat.S_IMODE(path.stat().st_mode) != expected:
                path.chmod(expected)


def is_complete(folder: Path, checksums: bool = False) -> bool:
    """Whether a folder holds the files of its manifest, by size and, with ``checksums``, also by content.

    Raises:
        UserError: a file belongs to another user, and this user may not read it.
        OSError: the file system or the process cannot open files at the moment.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return SPEC in manifest and all(
            (folder / name).stat().st_size == entry["size"]
            and (not checksums or file_sha256(folder / name) == entry["sha256"])
            for name, entry in manifest.items()
        )
    except PermissionError as error:
        store = folder.parent.parent
        problem = f"{error.filename} belongs to {owner_name(folder)}, and this user may not read it"
        raise UserError("store.dir", store, problem, share_remedy(store)) from error
    except OSError as error:
        if error.errno in _NOT_DAMAGE:
            raise
        return False
    except (ValueError, LookupError, TypeError, AttributeError):  # the manifest is truncated, or none
        return False


def link_tree(source: Path, target: Path) -> None:
    """Link all files below ``source`` into ``target``, another folder of the store, where nobody writes to files.

    Files are copied where the file system allows no hard links.
    """

    def link(original: str, copy: str) -> None:
        Path(copy).unlink(missing_ok=True)  # not overwritten in place: it may be a hard link itself
        try:
            os.link(original, copy)
        except OSError:
            shutil.copy2(original, copy)

    shutil.copytree(source, target, copy_function=link, dirs_exist_ok=True)


def copy_tree(source: Path, target: Path) -> None:
    """Replace the files in ``target`` by copies of those below ``source``; all modes follow the umask."""
    for file in filter(Path.is_file, source.rglob("*")):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replacement(copy) as partial:
            shutil.copyfile(file, partial)


def remove(path: Path) -> None:
    """Delete a file or folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- Contents of a store


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
    pending = {run["key"] for run in filter(None, map(status.read_run, runs.glob("*/"))) if run["status"] == "done"}
    if not pending:
        raise UserError("--runs", runs, "holds no finished run, so all would count as unused", "Give the runs' folder.")
    by_key = {entry.key: entry for entry in entries if entry.state == "complete"}
    used = set[str]()
    while pending:
        key = pending.pop()
        used.add(key)
        pending |= (by_key[key].references if key in by_key else frozenset()) - used
    return [entry for entry in by_key.values() if entry.key not in used]
