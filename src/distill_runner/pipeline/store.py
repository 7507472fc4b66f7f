"""Artifacts addressed by the hash of everything that determines them.

An artifact is a folder ``<store>/<kind>/<key>`` with ``spec.json`` (what determined it) and ``manifest.json`` (its
files with sizes and checksums). It is built in ``<key>.partial`` under a lock, and renamed when it is complete. After
an interrupted build, the next one finds the partial folder and may resume from its content.

Where the lock is a lease (``common/locks.py``), a process that was suspended may go on after another one has taken its
place. There each process builds in its own folder ``<key>.partial-<id>``; the first complete one becomes the artifact.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from filelock import BaseFileLock, SoftFileLease

from distill_runner.common.errors import UserError
from distill_runner.common.files import copy_file, file_sha256, owner_name, share_remedy
from distill_runner.common.locks import is_lost, locked, try_locked
from distill_runner.pipeline.holds import Hold, deletion_lock, hold, holders

log = logging.getLogger(__name__)

SCHEMA = 4
"""Version of what artifacts mean. Raising it makes every artifact be built again."""
Spec = Mapping[str, Any]
MANIFEST, SPEC = "manifest.json", "spec.json"
_CLOCK_SECONDS = 2.0
_NOT_DAMAGE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EINTR}
"""Errors that say nothing about the file that was to be read."""
_VERIFIED = set[tuple[Any, ...]]()
"""Identities and checksums of the files whose content this process has verified."""


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
        self._hold: Hold | None = None
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
        return self.has_key(spec["kind"], key_of(spec))

    def has_key(self, kind: str, key: str) -> bool:
        """As ``has``, where the key is known: to hash a spec takes a tenth of a millisecond."""
        return is_complete(self.folder / kind / key)

    def find(self, spec: Spec) -> Path | None:
        """Return the folder of the artifact of ``spec`` if it exists and its checksums are correct, else None."""
        path = self.path(spec)
        self.hold([path.name])
        return path if is_complete(path, checksums=True) else None

    @contextmanager
    def protected(self, purpose: str) -> Iterator[None]:
        """Protect from deletion, within the context, the artifacts that ``hold`` names, and all that are looked for.

        Args:
            purpose: what needs them, as a noun for messages, such as the folder of a run.
        """
        with hold(self.folder, purpose) as self._hold:
            try:
                yield
            finally:
                self._hold = None

    def hold(self, keys: Iterable[str]) -> None:
        """Protect artifacts, which need not exist, until the end of the context of ``protected``; else do nothing."""
        if self._hold is not None:
            self._hold.add(keys)

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
        self.hold([path.name])
        if is_complete(path, checksums=True):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        wait_message = f"waiting for another process, which is building {path}"
        with locked(path.with_name(f"{path.name}.lock"), wait_message) as own:
            if is_complete(path, checksums=True):  # another process built it meanwhile
                return path
            if path.exists():
                damaged = path.with_name(f"{path.name}.damaged-{_unique_id()}")
                log.warning("%s is damaged: moved to %s and built again", path, damaged.name)
                with suppress(FileNotFoundError):  # only if this process has lost its lease
                    path.rename(damaged)
            with _partial_folder(path, own) as partial:
                try:
                    (partial / SPEC).unlink(missing_ok=True)  # it may belong to another user
                    (partial / SPEC).write_text(json.dumps(spec, indent=1, sort_keys=True), encoding="utf-8")
                    build(partial)
                    _publish(partial, path)
                except OSError:
                    if not (is_lost(own) and is_complete(path, checksums=True)):
                        raise
                    remove(partial)
        return path

    def delete(self, path: Path) -> str | None:
        """Delete the folder of an artifact, or what is left of one, unless a process needs it.

        The folder is renamed first. After an interrupted deletion, the rest is not taken for an artifact.

        Returns:
            Why the folder was not deleted; None if it is gone.
        """
        key = path.name.partition(".")[0]
        with try_locked(path.with_name(f"{key}.lock")) as own:
            if own is None:
                return "is being built"
            if protected := next((folder for folder in _folders(path) if not os.access(folder, os.W_OK)), None):
                return f"belongs to {owner_name(protected)}, and this user may not delete it"
            trash = path.with_name(f"{key}.deleted-{_unique_id()}")
            with deletion_lock(self.folder):
                for holder in holders(self.folder) if is_readable(path) else ():
                    if key in holder.keys:
                        return f"is held by {holder}"
                with suppress(FileNotFoundError):  # another process has deleted it
                    path.rename(trash)
            remove(trash)
        return None


def is_readable(path: Path) -> bool:
    """Return whether runs read a folder by its name; they leave alone what was moved away or half deleted."""
    return not path.name.partition(".")[2].startswith(("damaged", "deleted"))


def _unique_id() -> str:
    return uuid4().hex[:8]


def _folders(path: Path) -> Iterator[Path]:
    """Yield a folder and all folders in it."""
    return (Path(folder) for folder, _, _ in os.walk(path))


@contextmanager
def _partial_folder(path: Path, own: BaseFileLock) -> Iterator[Path]:
    """Yield the folder in which to build the artifact ``path``, with what an interrupted build has left.

    Under a lease, the process that left it may only be suspended, unless it has given the folder up by its name
    ``<key>.partial``. Its folder is then copied, and it keeps its own.
    """
    remains = sorted(path.parent.glob(f"{path.name}.partial*"), key=_changed)
    given_up = path.with_name(f"{path.name}.partial")
    partial = given_up.with_name(f"{given_up.name}-{_unique_id()}") if isinstance(own, SoftFileLease) else given_up
    if remains and not _is_usable(remains[-1]):
        log.info("%s belongs to %s and cannot be resumed here", remains[-1], owner_name(remains[-1]))
        if remains[-1] == partial:
            partial.rename(partial.with_name(f"{partial.name}-{_unique_id()}"))
    elif remains and remains[-1] != partial:
        if partial == given_up or remains[-1] == given_up:
            remains[-1].rename(partial)
        else:
            _copy_snapshot(remains[-1], partial)
    partial.mkdir(exist_ok=True)
    try:
        yield partial
    finally:
        if partial != given_up and partial.exists() and not given_up.exists() and not is_lost(own):
            partial.rename(given_up)


def _changed(folder: Path) -> float:
    """Return the time of the last change in a folder; 0 if the folder is gone."""
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_usable(partial: Path) -> bool:
    """Whether this user can read all files of an interrupted build, and write in its folders."""
    return all(
        os.access(folder, os.W_OK) and all(os.access(Path(folder, file), os.R_OK) for file in files)
        for folder, _, files in os.walk(partial)
    )


def _copy_snapshot(source: Path, target: Path) -> None:
    """Copy a folder to which another process may be writing; leave ``target`` out if it changes in the meantime."""

    def state() -> list[tuple[str, int, int]]:
        files = [file for folder in _folders(source) for file in folder.iterdir() if file.is_file()]
        return sorted((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)

    for _ in range(3):
        with suppress(OSError, shutil.Error):  # a file has been replaced
            first_state = state()
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.tmp"))
            if state() == first_state:
                return
        remove(target)


def _publish(partial: Path, path: Path) -> None:
    """Turn a complete folder into the artifact ``path``, unless another process has been faster."""
    _write_manifest(partial)
    _share(partial)
    try:
        partial.rename(path)
    except OSError:
        if not is_complete(path, checksums=True):
            raise
        log.info("%s was built by another process in the meantime", path)
        remove(partial)


def _share(folder: Path) -> None:
    """Give all files of an artifact the mode and the group that the system gives to a new file in the folder.

    They follow the umask and the parent folder. Libraries may write files that only their owner can read.
    """
    new = (folder / MANIFEST).stat()
    mode = stat.S_IMODE(new.st_mode)
    folder_mode = mode | (mode & 0o444) >> 2 | folder.parent.stat().st_mode & stat.S_ISGID
    for parent, _, files in os.walk(folder):
        for path, expected in [(Path(parent), folder_mode), *((Path(parent, file), mode) for file in files)]:
            with suppress(OSError):  # of another user, who began to build the artifact
                if path.stat().st_gid != new.st_gid:
                    os.chown(path, -1, new.st_gid)
                if stat.S_IMODE(path.stat().st_mode) != expected:
                    path.chmod(expected)


def _is_verified(file: Path, checksum: str) -> bool:
    """Whether a file has this checksum. Each process reads a file once, as long as nobody writes to it.

    A file that was written in the last two seconds is read again: file systems have coarse clocks, so another write
    could leave its time unchanged.
    """
    status = file.stat()
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, checksum)
    if identity in _VERIFIED:
        return True
    same = file_sha256(file) == checksum
    if same and time.time() - status.st_ctime > _CLOCK_SECONDS:
        _VERIFIED.add(identity)
    return same


def _write_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink(missing_ok=True)  # its mode is that of a new file
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    manifest = {str(f.relative_to(folder)): {"size": f.stat().st_size, "sha256": file_sha256(f)} for f in files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def is_complete(folder: Path, checksums: bool = False) -> bool:
    """Whether a folder holds the files of its manifest, by size and, with ``checksums``, also by content.

    Raises:
        UserError: a file belongs to another user, and this user may not read it.
        OSError: the file system or the process cannot open files at the moment.
    """
    try:
        manifest = _read_manifest(folder)
        return SPEC in manifest and all(
            (folder / name).stat().st_size == size and (not checksums or _is_verified(folder / name, checksum))
            for name, (size, checksum) in manifest.items()
        )
    except PermissionError as error:
        store = folder.parent.parent
        problem = f"{error.filename} belongs to {owner_name(folder)}, and this user may not read it"
        raise UserError("store.dir", store, problem, share_remedy(store)) from error
    except OSError as error:
        if error.errno in _NOT_DAMAGE:
            raise
        return False
    except ValueError:  # not a manifest, or the name of a file is none
        return False


def _read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """Return size and checksum of each file of an artifact.

    Raises:
        ValueError: the manifest is truncated, or is JSON of another structure.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {name: (entry["size"], entry["sha256"]) for name, entry in manifest.items()}
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} has no manifest") from error


def link_tree(source: Path, target: Path) -> None:
    """Link all files below ``source`` into ``target``, another folder of the store, where nobody writes to files.

    Files are copied where the file system allows no hard links.
    """
    shutil.copytree(source, target, copy_function=_link, dirs_exist_ok=True)


def copy_tree(source: Path, target: Path) -> None:
    """Copy all files below ``source`` into ``target``, where the user may write to them; equal files are left out."""
    for folder in _folders(source):
        (target / folder.relative_to(source)).mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            if file.is_file():
                copy_file(file, target / file.relative_to(source))


def _link(source: str, target: str) -> None:
    Path(target).unlink(missing_ok=True)  # not overwritten in place: it may be a hard link itself
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def remove(path: Path) -> None:
    """Delete a file or folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
