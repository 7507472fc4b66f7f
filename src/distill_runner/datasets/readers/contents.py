"""The files of splits: a fingerprint of their content, and the rows that two splits share."""

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from itertools import combinations
from pathlib import Path

from distill_runner.common.errors import UserError
from distill_runner.common.files import file_sha256
from distill_runner.datasets import embedded
from distill_runner.datasets.readers import hub
from distill_runner.datasets.readers.dataset import EMBEDDED, Dataset, is_embedded, locate_split, parse_split
from distill_runner.datasets.readers.files import (
    BINARY_FORMATS,
    PLAIN_TEXT,
    file_format,
    file_names,
    local_data,
    split_files,
)

READER_VERSION = 2
"""Version of what is read from files of text; raised when the same bytes come to mean other rows or values."""


def data_fingerprint(data: Dataset) -> str:
    """Return a fingerprint of the data; equal for equal files, independent of the location of their folder.

    Local files and hub: hash of the names and bytes of the files of the splits in use.
    Embedded data: hash of the files that they are made from.

    Raises:
        UserError: a folder, a configuration or the files of a split are missing, or the hub cannot be reached.
    """
    own = [split for split in data.splits if data.locate(split)[0] is data]
    parts = [_fingerprint(data, own)] if own else []
    for split in sorted(data.splits - set(own)):
        with locate_split(data, split) as (source, name):
            parts.append(f"{split}={_fingerprint(source, [name])}")
    return "+".join(parts)


def _fingerprint(data: Dataset, splits: Iterable[str]) -> str:
    if is_embedded(data):
        return f"{data.dataset}:{embedded.embedded_fingerprint(data.dataset.removeprefix(EMBEDDED))}"
    folder = local_data(data)
    if folder is None:
        return f"{hub.fingerprint(data, splits)}/{READER_VERSION}/{data.encoding or ''}"
    total = hashlib.sha256()
    for split in sorted({parse_split(split)[0] for split in splits}):
        for file in split_files(folder, split, data):
            path = file.name if file == folder else file.relative_to(folder).as_posix()
            status = file.stat()
            total.update(f"{split}\0{path}\0{_file_hash(file, status.st_size, status.st_mtime_ns)}".encode())
            if (kind := file_format(file)) is not None and kind not in BINARY_FORMATS:  # what its text is read as
                unit = "lines" if kind == PLAIN_TEXT and data.lines_are_texts else ""
                total.update(f"\0{READER_VERSION}{unit}{data.encoding or ''}".encode())
            total.update(b"\n")
    return f"sha256:{total.hexdigest()}"


@lru_cache(maxsize=4096)
def _file_hash(file: Path, _size: int, _mtime_ns: int) -> str:
    """Return the sha256 of a file; one that was changed has another size or time, and misses the cache."""
    return file_sha256(file)


def local_files(data: Dataset, split: str) -> list[Path]:
    """Return the files of a split, or of the split of which it is a part; empty if they are not on this machine."""
    with locate_split(data, split) as (source, name):
        folder = local_data(source)
        return split_files(folder, parse_split(name)[0], source) if folder and data.has_split_files else []


def share_rows(data: Dataset, first: str, second: str) -> list[Path]:
    """Return the files of which two splits read the same rows, as ``*`` and ``validation`` in one folder do."""
    files, others = local_files(data, first), local_files(data, second)
    parts = [parse_split(split)[1] for split in (first, second)]
    if files == others and parts[0] and parts[1] and not parts[0].overlaps(parts[1]):
        return []
    return sorted(set(files) & set(others))


def require_own_rows(data: Dataset) -> None:
    """Check that no split reads rows of one of another role: of training, validation and test.

    Raises:
        UserError: one does, or the files of a split are missing.
    """

    def role(split: str) -> str:
        return data.split_key(split).removeprefix(f"{data.key}.").partition(".")[0]

    splits = sorted((split for split in data.splits if not split.endswith("?")), key=lambda split: (role(split), split))
    for first, second in combinations(splits, 2):
        if role(first) != role(second) and (shared := share_rows(data, first, second)):
            problem = f"reads {file_names(shared)}, and so does {data.split_key(second)}={second}"
            remedy = "Name other files, or parts: train[:90%], train[90%:]."
            raise UserError(data.split_key(first), first, problem, remedy)


def hub_commit(data: Dataset) -> str | None:
    """Return the commit of a dataset on the hub; None for local and embedded data."""
    return None if is_embedded(data) or local_data(data) else hub.dataset_commit(data).sha
