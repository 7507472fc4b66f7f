"""What determines the content of a data set, wherever it lies."""

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from distill_runner.datasets.reading import hub
from distill_runner.datasets.reading.dataset import EMBEDDED, Dataset, is_embedded
from distill_runner.datasets.reading.folders import local_data, split_files
from distill_runner.datasets.reading.slices import parse
from distill_runner.datasets.reading.split_table import placed


def data_fingerprint(data: Dataset) -> str:
    """A hash of what can be read; equal for equal content, wherever a folder lies.

    Local files: over names and bytes of the files of the splits in use. Hub: the commit and the configuration.
    Embedded: over the text, which may differ between versions of Python.

    Raises:
        UserError: a folder, a configuration or a split's files are absent.
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
    """The commit that is read of data on the hub."""
    return None if is_embedded(data) or local_data(data) else hub.commit(data).sha


@lru_cache(maxsize=4096)
def _digest(path: str, size: int, mtime_ns: int) -> str:
    """sha256 of a file; size and time are arguments so that a changed file is hashed anew."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
