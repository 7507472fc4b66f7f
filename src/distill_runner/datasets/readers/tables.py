"""The content of a dataset: its splits as tables of columns, and a fingerprint. Labels are not interpreted here.

Every format becomes a ``Table`` in ``open_split``, and is read from there alone.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distill_runner.common.errors import UserError, format_list
from distill_runner.common.files import file_sha256
from distill_runner.common.process import quiet_datasets
from distill_runner.datasets import embedded
from distill_runner.datasets.readers import hub
from distill_runner.datasets.readers.dataset import EMBEDDED, Dataset, is_embedded, locate_split, parse_split
from distill_runner.datasets.readers.files import (
    IMAGE_FORMATS,
    empty_split,
    file_names,
    load_files,
    local_data,
    missing_split,
    split_files,
    unreadable_split,
)


class Table(ABC):
    """One split as its reader opened it: named columns and rows, the same for every format.

    Attributes:
        origin: the files or the dataset that the rows come from, for messages.
        column_names: names of all columns, in the order of the data; a stream may not know them before its first row.
        num_rows: number of rows; None for a stream.
    """

    origin: str
    column_names: list[str]
    num_rows: int | None

    @abstractmethod
    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows one by one, each with all columns."""

    @abstractmethod
    def columns(self, names: Iterable[str]) -> dict[str, list[Any]]:
        """Return columns with all their values."""

    @abstractmethod
    def class_names(self, column: str) -> list[str] | None:
        """Return the names that the data itself gives to the values of a column, if any."""


class MemoryTable(Table):
    """Columns in memory: an embedded dataset or the files of a folder of images."""

    def __init__(self, origin: str, values: Mapping[str, list[Any]], class_names: Mapping[str, list[str]]) -> None:
        self.origin, self.column_names = origin, list(values)
        self.num_rows = len(next(iter(values.values())))
        self._values, self._class_names = values, class_names

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in zip(*self._values.values(), strict=True):
            yield dict(zip(self.column_names, row, strict=True))

    def columns(self, names: Iterable[str]) -> dict[str, list[Any]]:
        return {name: self._values[name] for name in names}

    def class_names(self, column: str) -> list[str] | None:
        return self._class_names.get(column)


class LibraryTable(Table):
    """Dataset of the library ``datasets``: completely loaded, or a stream of rows."""

    def __init__(self, origin: str, dataset: Any) -> None:
        self.origin, self.column_names = origin, dataset.column_names or []
        self.num_rows = len(dataset) if hasattr(dataset, "__len__") else None
        self._dataset = dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._dataset)

    def columns(self, names: Iterable[str]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = self._dataset.select_columns(list(names)).to_dict()
        return columns

    def class_names(self, column: str) -> list[str] | None:
        feature = self._dataset.features.get(column)
        # The names are those of the elements of a list, or of a single value.
        return getattr(getattr(feature, "feature", feature), "names", None)


@contextmanager
def open_split(data: Dataset, split: str, stream: bool = False, download: bool = True) -> Iterator[Table]:
    """Open a split in whichever format and place it is; it can be read until the context ends.

    Args:
        stream: the table is only iterated over, with little memory.
        download: save the files of the hub first; False reads them over the network while iterating.
    Raises:
        UserError: files or split are missing, damaged or empty, or the hub cannot be reached.
    """
    if is_embedded(data):
        yield _embedded_table(data, split)
        return
    folder = local_data(data)
    files = [] if folder is None else split_files(folder, split, data)
    if files and files[0].suffix.lower() in IMAGE_FORMATS:
        yield _image_table(files)
        return
    # The cache of ``datasets`` identifies a file by path and time, which may be equal for different content
    # (archives often set one time for all their files). A temporary cache cannot be stale.
    with quiet_datasets(), TemporaryDirectory() as cache:
        options: dict[str, Any] = {"streaming": True} if stream else {"cache_dir": cache}
        if files:
            yield LibraryTable(file_names(files), load_files(data, split, files, **options))
        elif download:
            dataset = hub.load_from_hub(data, split, Path(cache, "links"), **options)
            yield LibraryTable(f"{data.dataset} on the hub", dataset)
        else:
            yield LibraryTable(f"{data.dataset} on the hub", hub.stream_from_hub(data, split))


def _embedded_table(data: Dataset, split: str) -> Table:
    name = next((name for name in embedded.SPLITS if name == split), None)
    if name is None:
        raise missing_split(data, split, list(embedded.SPLITS), data.dataset)
    columns, class_names = embedded.embedded_columns(data.dataset.removeprefix(EMBEDDED), name)
    return MemoryTable(data.dataset, columns, {} if class_names is None else {"label": class_names})


def _image_table(files: list[Path]) -> Table:
    """Return the files in the column ``image``, and the number of each file's folder in ``label``."""
    class_names = sorted({file.parent.name for file in files})
    number = {name: label for label, name in enumerate(class_names)}
    columns = {"image": list[Any](files), "label": [number[file.parent.name] for file in files]}
    return MemoryTable(file_names(files), columns, {"label": class_names})


@dataclass(frozen=True)
class SplitTable:
    """Requested columns of one split, with the values of the data.

    Attributes:
        columns: name -> values; the label column is missing for a test split without labels.
        class_names: names that the data itself gives to the values of the label column, if any.
    """

    columns: dict[str, list[Any]]
    class_names: list[str] | None


def read_table(data: Dataset, split: str) -> SplitTable:
    """Return the required columns and the label columns of a split, or of a slice of it such as ``train[:90%]``.

    Raises:
        UserError: files, split or columns are missing, damaged or empty, or the hub cannot be reached.
    """
    with locate_split(data, split) as (source, name):
        return _read_table(source, name)


def _read_table(data: Dataset, split: str) -> SplitTable:
    name, part = parse_split(split)
    if part is not None:
        complete = _read_table(data, name)
        rows = part.rows(max(map(len, complete.columns.values()), default=0)).tolist()
        if not rows:
            remedy = "Use a larger part, as in train[:90%], train[90%:] or train[~:90%]."
            raise UserError(data.split_key(split), split, "has no rows", remedy)
        columns = {column: [values[row] for row in rows] for column, values in complete.columns.items()}
        return SplitTable(columns, complete.class_names)
    with open_split(data, split) as table:
        _check_columns(data, split, table.column_names)
        if not table.num_rows:
            raise empty_split(data, split, table.origin)
        requested = {*data.required_columns(split), *data.label_columns}
        columns = table.columns(column for column in table.column_names if column in requested)
        return SplitTable(columns, table.class_names(data.label_columns[0]) if data.label_columns else None)


def read_rows(data: Dataset, split: str, download: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the rows of a split one by one, with little memory; a slice such as ``train[:90%]`` is not supported.

    Args:
        download: as for ``open_split``; without effect on local files.
    Raises:
        UserError: as ``read_table``; raised at the first row, or when a damaged row is reached.
    """
    with locate_split(data, split) as (source, name), open_split(source, name, True, download) as table:
        for number, row in enumerate(_iterate(source, name, table)):
            if number == 0:
                _check_columns(source, name, list(row))
            yield row


def _iterate(data: Dataset, split: str, table: Table) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``table``, and raise a ``UserError`` if there is none or one cannot be read."""
    rows, is_empty = iter(table), True
    while True:
        try:
            row = next(rows)
        except StopIteration:
            break
        except (OSError, ValueError) as error:
            raise unreadable_split(data, split, table.origin, error) from error
        is_empty = False
        yield row
    if is_empty:
        raise empty_split(data, split, table.origin)


def inspect_columns(data: Dataset, split: str) -> dict[str, bool]:
    """Return the columns of a split, each with whether the first row has a text in it.

    Raises:
        UserError: as ``read_table``.
    """
    with locate_split(data, split) as (source, name):
        name, _ = parse_split(name)
        with open_split(source, name, stream=True) as table:
            first = next(_iterate(source, name, table))
    return {column: isinstance(value, str) for column, value in first.items()}


def _check_columns(data: Dataset, split: str, available: list[str]) -> None:
    for column, field in data.required_columns(split).items():
        if column not in available:
            problem = f"split '{split}' of {data.dataset} has no column '{column}'"
            value = format_list(data.columns) if field == "columns" else column
            raise UserError(f"{data.key}.{field}", value, problem, f"It has: {', '.join(available)}.")


def data_fingerprint(data: Dataset) -> str:
    """Return a fingerprint of the data; equal for equal files, independent of the location of their folder.

    Local files: hash of the names and bytes of the files of the splits in use. Hub: commit and configuration.
    Embedded data: hash of the content; the text may differ between versions of Python.

    Raises:
        UserError: a folder, a configuration or the files of a split are missing, or the hub cannot be reached.
    """
    own = [split for split in data.splits if data.locate(split)[0] is data]
    others = sorted(data.splits - set(own))
    parts = [_fingerprint(data, own)] if own else []
    for split in others:
        with locate_split(data, split) as (source, name):
            parts.append(f"{split}={_fingerprint(source, [name])}")
    return "+".join(parts)


def _fingerprint(data: Dataset, splits: Iterable[str]) -> str:
    if is_embedded(data):
        is_digits = data.dataset == f"{EMBEDDED}digits"
        return f"{data.dataset}:{embedded.digits_fingerprint() if is_digits else embedded.text_fingerprint()}"
    folder = local_data(data)
    if folder is None:
        return f"hub:{hub.dataset_commit(data).sha}/{data.config or ''}"
    total = hashlib.sha256()
    for split in sorted({parse_split(split)[0] for split in splits}):
        for file in split_files(folder, split, data):
            status = file.stat()
            digest = _file_hash(str(file), status.st_size, status.st_mtime_ns)
            path = file.name if file == folder else file.relative_to(folder).as_posix()
            total.update(f"{split}\0{path}\0{digest}\n".encode())
    return f"sha256:{total.hexdigest()}"


@lru_cache(maxsize=4096)
def _file_hash(path: str, size: int, mtime_ns: int) -> str:
    """Return the sha256 of a file; ``size`` and ``mtime_ns`` are arguments so that a changed file misses the cache."""
    return file_sha256(Path(path))


def hub_commit(data: Dataset) -> str | None:
    """Return the commit of a dataset on the hub; None for local and embedded data."""
    return None if is_embedded(data) or local_data(data) else hub.dataset_commit(data).sha
