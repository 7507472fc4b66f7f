"""Artifacts addressed by the hash of everything that determines them.

An artifact is a folder ``<store>/<kind>/<key>`` with ``spec.json`` (what determined it) and ``manifest.json`` (its
files with sizes and checksums). It is built in ``<key>.partial`` under a lock, and renamed when it is complete. After
an interrupted build, the next one finds the partial folder and may resume from its content.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import AcquireReturnProxy, Timeout

from distill_runner.common.errors import UserError
from distill_runner.common.files import file_sha256
from distill_runner.common.locks import lock

log = logging.getLogger(__name__)

Spec = Mapping[str, Any]
MANIFEST, SPEC = "manifest.json", "spec.json"
_VERIFIED = Path(tempfile.gettempdir()) / f"distill-run-verified-{os.getuid()}"
_LARGE, _CLOCK_SECONDS = 2**20, 2.0


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
        return path if is_complete(path, checksums=True) else None

    def specs(self, kind: str) -> Iterator[Spec]:
        """Yield the specs of all artifacts of one kind, including partial and damaged ones."""
        for file in sorted((self.folder / kind).glob(f"*/{SPEC}")):
            with suppress(OSError, ValueError):  # the file is being written or deleted
                yield json.loads(file.read_text())

    def get(self, spec: Spec, build: Callable[[Path], None]) -> Path:
        """Return the artifact of ``spec``; build it if it is missing or damaged.

        Args:
            build: function that fills the folder it receives, which may hold the rest of an interrupted build.
        Returns:
            the artifact's folder; the checksums of an existing artifact have been verified.
        """
        path = self.path(spec)
        if is_complete(path, checksums=True):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            if is_complete(path, checksums=True):  # another process built it meanwhile
                return path
            if path.exists():
                damaged = path.with_name(f"{path.name}.damaged-{os.getpid()}")
                remove(damaged)
                log.warning("%s is damaged: moved to %s and built again", path, damaged.name)
                path.rename(damaged)
            partial = path.with_name(f"{path.name}.partial")
            partial.mkdir(exist_ok=True)
            (partial / SPEC).write_text(json.dumps(spec, indent=1, sort_keys=True))
            build(partial)
            _write_manifest(partial)
            partial.rename(path)
        return path

    def delete(self, path: Path) -> bool:
        """Delete the folder of an artifact, or what is left of one.

        The folder is renamed first. After an interrupted deletion, the rest is not taken for an artifact.

        Returns:
            False if a process is building the artifact; the folder is then kept.
        """
        key = path.name.partition(".")[0]
        try:
            with lock(path.with_name(f"{key}.lock")).acquire(timeout=0):
                trash = path.with_name(f"{key}.deleted-{os.getpid()}")
                path.rename(trash)
                remove(trash)
        except Timeout:
            return False
        return True


def _locked(path: Path) -> AcquireReturnProxy:
    artifact_lock = lock(path.with_name(f"{path.name}.lock"))
    try:
        return artifact_lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process, which is building %s", path)
        return artifact_lock.acquire()


def _is_verified(file: Path, checksum: str) -> bool:
    """Whether a file has this checksum. Each machine reads a large file only once, as long as nobody writes to it.

    A verified file is recorded as an empty file in the machine's temporary folder, named by a hash of inode, size, time
    and checksum. A file written in the last two seconds is not recorded: file systems have coarse clocks, so another
    write could leave its time unchanged.
    """
    status = file.stat()
    identity = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{checksum}"
    record = _VERIFIED / hashlib.sha256(identity.encode()).hexdigest()[:32]
    large = status.st_size >= _LARGE
    if large and record.exists():
        return True
    same = file_sha256(file) == checksum
    if same and large and time.time() - status.st_mtime > _CLOCK_SECONDS:
        with suppress(OSError):
            _VERIFIED.mkdir(exist_ok=True)
            record.touch()
    return same


def _write_manifest(folder: Path) -> None:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / MANIFEST)
    manifest = {str(f.relative_to(folder)): {"size": f.stat().st_size, "sha256": file_sha256(f)} for f in files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def is_complete(folder: Path, checksums: bool = False) -> bool:
    """Whether a folder holds the files of its manifest, by size and, with ``checksums``, also by content."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return SPEC in manifest and all(
            (folder / name).stat().st_size == entry["size"]
            and (not checksums or _is_verified(folder / name, entry["sha256"]))
            for name, entry in manifest.items()
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # missing, truncated, or other JSON
        return False


def link_tree(source: Path, target: Path) -> None:
    """Link all files below ``source`` into ``target``; copy them where the file system allows no hard links."""
    shutil.copytree(source, target, copy_function=_link, dirs_exist_ok=True)


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
