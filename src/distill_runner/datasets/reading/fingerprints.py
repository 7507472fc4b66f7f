"""Fingerprints of the content of a data set, independent of its location."""

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from distill_runner.datasets.reading import hub
from distill_runner.datasets.reading.dataset import EMBEDDED, Dataset, is_embedded
from distill_runner.datasets.reading.folders import local_data, split_files
from distill_runner.datasets.reading.slices import parse
from distill_runner.datasets.reading.split_table import placed


def data_fingerprint(data: Dataset) -> str:
    """Return a fingerprint of the data; equal for equal files, independent of the location of their folder.

    Local files: hash of the names and bytes of the files of the splits in use. Hub: commit and configuration.
    Embedded data: hash of the content; the text may differ between versions of Python.

    Raises:
        UserError: a folder, a configuration or the files of a split are missing, or the hub cannot be asked.
    """
    own = [split for split in data.splits if data.placed(split)[0] is data]
    others = sorted(data.splits - set(own))
    parts = [_fingerprint(data, own)] if own else []
    for split in others:
        with placed(data, split) as (where, name):
            parts.append(f"{split}={_fingerprint(where, [name])}")
    return "+".join(parts)


def _fingerprint(data: Dataset, splits: Iterable[str]) -> str:
    if is_embedded(data):
        from distill_runner.datasets.embedded import embedded_fingerprint
        from distill_runner.datasets.images.digits import digits_fingerprint

        of_images = data.dataset == f"{EMBEDDED}digits"
        return f"{data.dataset}:{digits_fingerprint() if of_images else embedded_fingerprint()}"
    folder = local_data(data)
    if folder is None:
        return f"hub:{hub.commit(data).sha}/{data.config or ''}"
    total = hashlib.sha256()
    for split in sorted({parse(split)[0] for split in splits}):
        for file in split_files(folder, split, data):
            status = file.stat()
            digest = _digest(str(file), status.st_size, status.st_mtime_ns)
            where = file.name if file == folder else file.relative_to(folder).as_posix()
            total.update(f"{split}\0{where}\0{digest}\n".encode())
    return f"sha256:{total.hexdigest()}"


def on_hub(data: Dataset) -> str | None:
    """Return the commit of a data set on the hub; None for local and embedded data."""
    return None if is_embedded(data) or local_data(data) else hub.commit(data).sha


@lru_cache(maxsize=4096)
def _digest(path: str, size: int, mtime_ns: int) -> str:
    """Return the sha256 of a file; ``size`` and ``mtime_ns`` are arguments so that a changed file misses the cache."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
