"""The content of a dataset: its splits as tables of columns. Labels are not interpreted here.

Every format becomes a ``Table`` in ``open_split``, and is read from there alone. What was taken from the files ends
there in a ``TableRecord``.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np

from distill_runner.common.errors import UserError, format_typed, listed_names, override
from distill_runner.common.files import file_sha256, typed_path
from distill_runner.common.library_switches import quiet_datasets
from distill_runner.datasets import embedded
from distill_runner.datasets.readers import hub
from distill_runner.datasets.readers.dataset import (
    BY_CLASS,
    EMBEDDED,
    SHUFFLED,
    Dataset,
    SplitSlice,
    is_embedded,
    locate_split,
    parse_split,
)
from distill_runner.datasets.readers.files import file_names, local_data, missing_split, reading_errors, split_files
from distill_runner.datasets.readers.formats import open_files
from distill_runner.datasets.readers.table import EMPTY, LibraryReader, MemoryReader, Row, Table, recorded_tables

LARGER_PART = "Use a larger part, as in train[:90%], train[90%:] or train[~:90%]."


@contextmanager
def open_split(data: Dataset, split: str, download: bool = True) -> Iterator[Table]:
    """Open a split in whichever format and place it is; it can be read until the context ends.

    Args:
        download: save the files of the hub first; False reads them over the network while iterating.
    Raises:
        UserError: files or split are missing, damaged or empty, or the hub cannot be reached.
    """
    if is_embedded(data):
        if split not in embedded.SPLITS:
            raise missing_split(data, split, list(embedded.SPLITS), data.dataset)
        columns, classes = embedded.embedded_columns(data.dataset.removeprefix(EMBEDDED), split)
        class_names = {} if classes is None else {list(columns)[-1]: classes}
        table = Table(data.dataset, {split: MemoryReader(columns, class_names)}, has_files=False)
        yield table
    elif (folder := local_data(data)) is not None:
        files = split_files(folder, split, data)
        with reading_errors(data, split, origin := file_names(files)):
            is_typed = folder.is_dir() and typed_path(data.dataset).is_dir()  # others are as on the hub
            table = open_files(data, files, origin, hub.check_card(data, split, folder, files) if is_typed else None)
            yield table
    else:
        # The cache of ``datasets`` identifies a file by path and time, which may be equal for different content
        # (archives often set one time for all their files). A temporary cache cannot be stale.
        origin = f"{data.dataset} on the hub"
        with quiet_datasets(), TemporaryDirectory() as cache, reading_errors(data, split, origin):
            content = hub.load_from_hub(data, split, Path(cache)) if download else hub.stream_from_hub(data, split)
            if isinstance(content, tuple):
                files, class_names = content
                table = open_files(data, files, origin, class_names)
            else:
                table = Table(origin, {split: LibraryReader(content)}, has_files=False)
            yield table
    table.add_record()


@dataclass(frozen=True)
class SplitTable:
    """Requested columns of one split, with the values of the data.

    Attributes:
        columns: name -> values; the label column is missing for a test split without labels.
        class_names: names that the data itself gives to the values of the label column, if any.
        untyped: whether all values are text because the format has no types (CSV).
    """

    columns: dict[str, list[Any]]
    class_names: list[str] | None
    untyped: bool = False


def read_table(data: Dataset, split: str, further: Mapping[str, str] = MappingProxyType({})) -> SplitTable:
    """Return the required columns and the label columns of a split, or of a slice of it such as ``train[:90%]``.

    Rows that have no label are left out, unless no row has one, as in many a test split.

    Args:
        further: more columns that the split must have, each with the configuration key that names it.
    Raises:
        UserError: files, split or columns are missing, damaged or empty, or the hub cannot be reached.
    """
    with locate_split(data, split) as (source, name):
        split_name, part = parse_split(name)
        fields = source.required_columns(split_name).items()
        required = {column: f"{source.key}.{field}" for column, field in fields} | {**further}
        with open_split(source, split_name) as table:
            columns = table.columns(dict.fromkeys([*required, *source.label_columns, *source.optional_columns]))
            if table.column_names:
                _check_columns(source, split_name, table.column_names, required)
            if not any(columns.values()):
                raise _empty_split(source, split_name, table.origin)
            label = source.label_columns[0] if source.label_columns else ""
            class_names, labels = table.class_names.get(label), columns.get(label, [])
            distinct = {repr(value): value for value in labels}  # few; a value may be a list
            marks = {text for text, value in distinct.items() if source.is_no_label(value, class_names is not None)}
            rows = [row for row, value in enumerate(labels) if repr(value) not in marks] if marks else []
            if rows:
                table.num_unlabeled = len(labels) - len(rows)
                columns = {one: [values[row] for row in rows] for one, values in columns.items()}
        if part is not None:
            rows = _rows_of_slice(part, source, name, columns)
            columns = {one: [values[row] for row in rows] for one, values in columns.items()}
        return SplitTable(columns, class_names, table.untyped)


def _rows_of_slice(part: SplitSlice, data: Dataset, name: str, columns: Mapping[str, list[Any]]) -> list[int]:
    """Return the numbers of the rows of a slice, which may take its share from each class.

    Raises:
        UserError: there are none, or the classes are not known.
    """
    labels = None
    if part.order == BY_CLASS:
        column = next((column for column in data.label_columns if column in columns), None)
        if column is not None:
            labels = list(map(str, columns[column]))
        elif data.lacks_labels:
            part = replace(part, order=SHUFFLED)
        else:
            problem = "is a slice by class, but there is no label column"
            raise UserError(data.split_key(name), name, problem, "Use train[~:90%], in random order.")
    rows: list[int] = part.rows(max(map(len, columns.values()), default=0), labels).tolist()
    if not rows:
        raise UserError(data.split_key(name), name, "has no rows", LARGER_PART)
    return rows


def read_rows(data: Dataset, split: str, download: bool = True) -> Iterator[Row]:
    """Yield the rows of a split, or of a slice of it such as ``train[:90%]``, one by one, with little memory.

    For shares and for random orders, the rows are counted first.

    Args:
        download: as for ``open_split``; without effect on local files.
    Raises:
        UserError: as ``read_table``; raised at the first row, or when a damaged row is reached. A slice by class, or
            one whose rows must be counted where rows are not downloaded, is refused.
    """
    with locate_split(data, split) as (source, name):
        name, part = parse_split(name)
        selection = None if part is None else _selected_rows(source, name, part, split, download)
        with open_split(source, name, download) as table:
            num_read = num_selected = 0
            for num_read, row in enumerate(table.rows(), start=1):
                if num_read == 1:
                    required = source.required_columns(name).items()
                    _check_columns(source, name, list(row), {name: f"{source.key}.{field}" for name, field in required})
                if selection is None or (num_read <= len(selection) and selection[num_read - 1]):
                    num_selected += 1
                    yield row
                if not download and selection is not None and num_read >= len(selection):
                    break  # files on this machine are read to their end, which counts their rows
            if not num_read:
                raise _empty_split(source, name, table.origin)
    if not num_selected:
        raise UserError(data.split_key(split), split, "has no rows", LARGER_PART)


def _selected_rows(data: Dataset, name: str, part: SplitSlice, split: str, download: bool) -> np.ndarray:
    """Return whether each row of a split belongs to ``part``, (N,); rows after the last one of the array do not."""
    if part.order == BY_CLASS:
        problem, remedy = "is a slice by class, but text has no classes", "Use train[~:90%], in random order."
        raise UserError(data.split_key(split), split, problem, remedy)
    if (size := part.last_row) is None:
        if not download:
            problem = "needs the number of rows, which a stream does not know"
            remedy = "Use numbers, as in train[:100000], or " + override("corpus.stream", False) + "."
            raise UserError(data.split_key(split), split, problem, remedy)
        with recorded_tables(), open_split(data, name) as table:  # read once more later, and recorded there
            size = sum(1 for _ in table.rows())
    selection = np.zeros(size, dtype=bool)
    selection[part.rows(size)] = True
    return selection


@contextmanager
def _whole_split(data: Dataset, split: str) -> Iterator[Table]:
    """Open a split; a slice stands for its split."""
    with locate_split(data, split) as (source, name), open_split(source, parse_split(name)[0]) as table:
        yield table


def inspect_columns(data: Dataset, split: str) -> dict[str, str]:
    """Return the columns of a split, each with the type of all its values; a slice stands for its split.

    Raises:
        UserError: as ``read_table``.
    """
    with _whole_split(data, split) as table:
        types = table.column_types()
        if all(kind == EMPTY for kind in types.values()):
            raise _empty_split(data, split, table.origin)
        return types


def column_names(data: Dataset, split: str) -> list[str]:
    """Return the names of the columns of a split; a slice stands for its split. Raises the errors of ``read_table``."""
    with _whole_split(data, split) as table:
        return table.column_names or list(table.column_types())  # JSON's are those of all rows


def read_columns(data: Dataset, split: str, names: Iterable[str]) -> dict[str, list[Any]]:
    """Return columns of a split with all rows, whatever the dataset requires; a slice stands for its split."""
    with _whole_split(data, split) as table:
        return table.columns(names)


def _check_columns(data: Dataset, split: str, available: list[str], required: Mapping[str, str]) -> None:
    for column, key in required.items():
        if column not in available:
            problem = f"split '{split}' of {data.dataset} has no column '{column}'"
            value = format_typed(data.columns) if key == f"{data.key}.columns" else column
            raise UserError(key, value, problem, f"It has: {listed_names(available)}.")


def _empty_split(data: Dataset, split: str, origin: str) -> UserError:
    key, value = data.split_key(split), split
    if Path(data.dataset).is_file():
        key, value = f"{data.key}.dataset", data.dataset
    return UserError(key, value, f"the split is empty ({origin})", "Download or write it again.")


# Fingerprints, and rows that two splits share

READER_VERSION = 2
"""Version of what is read from files of text; raised when the same bytes come to mean other rows or values."""


def data_fingerprint(data: Dataset) -> str:
    """Return a fingerprint of the data; equal for equal files, independent of the location of their folder.

    Local files: hash of the names and bytes of the files of the splits in use. Hub: the commit. Embedded data: hash of
    the files that they are made from.

    Raises:
        UserError: a folder, a configuration or the files of a split are missing, or the hub cannot be reached.
    """
    parts = set()
    for split in data.splits:
        with locate_split(data, split) as (source, name):
            folder, name = local_data(source), parse_split(name)[0]
            content = [f"{READER_VERSION}{source.lines_are_texts}{source.encoding or ''}"]
            if is_embedded(source):
                content = [f"{source.dataset}:{embedded.embedded_fingerprint(source.dataset.removeprefix(EMBEDDED))}"]
            elif folder is None:
                content = [f"{content[0]}:hub:{hub.dataset_commit(source).sha}/{source.config or ''}"]
            else:
                for file in split_files(folder, name, source):
                    path, status = file.name if file == folder else file.relative_to(folder).as_posix(), file.stat()
                    content.append(f"{name}\0{path}\0{_file_hash(file, status.st_size, status.st_mtime_ns)}")
            parts.add(("" if source is data else f"{split}=") + "\n".join(content))
    return f"sha256:{hashlib.sha256('+'.join(sorted(parts)).encode()).hexdigest()}"


@lru_cache(maxsize=4096)
def _file_hash(file: Path, _size: int, _mtime_ns: int) -> str:
    """Return the sha256 of a file; one that was changed has another size or time, and misses the cache."""
    return file_sha256(file)


def share_rows(data: Dataset, first: str, second: str) -> list[Path]:
    """Return the files of which two splits read the same rows, as ``*`` and ``validation`` in one folder do."""
    files: list[list[Path]] = []
    for split in (first, second):
        with locate_split(data, split) as (source, name):
            folder = local_data(source) if data.has_split_files else None
            files.append(split_files(folder, parse_split(name)[0], source) if folder else [])
    parts = [parse_split(split)[1] for split in (first, second)]
    if files[0] == files[1] and parts[0] and parts[1] and not parts[0].overlaps(parts[1]):
        return []
    return sorted({*files[0]} & {*files[1]})


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
