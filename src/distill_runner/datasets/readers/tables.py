"""The content of a dataset: its splits as tables of columns. Labels are not interpreted here.

Every format becomes a ``Table`` in ``open_split``, and is read from there alone. What was taken from the files ends
there in a ``TableRecord``.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np

from distill_runner.common.errors import UserError, format_list
from distill_runner.common.files import placeholder
from distill_runner.common.library_switches import quiet_datasets
from distill_runner.datasets import embedded
from distill_runner.datasets.readers import hub
from distill_runner.datasets.readers.arrow_files import ArrowTable
from distill_runner.datasets.readers.conll import ConllTable, is_conll
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
from distill_runner.datasets.readers.delimited import DelimitedTable
from distill_runner.datasets.readers.files import (
    BINARY_FORMATS,
    CONLL,
    IMAGE_FORMATS,
    JSON,
    JSON_LINES,
    PARQUET,
    PLAIN_TEXT,
    TSV,
    empty_split,
    file_format,
    file_names,
    image_remarks,
    local_data,
    missing_split,
    reading_errors,
    split_files,
    unreadable_split,
)
from distill_runner.datasets.readers.json_files import JsonTable
from distill_runner.datasets.readers.table import (
    EMPTY,
    FileProblem,
    FileRecord,
    LibraryTable,
    MemoryTable,
    Table,
    record_table,
    recorded_tables,
)
from distill_runner.datasets.readers.text_files import PlainTextTable, TextFile

MAX_NAME = 40
"""Characters of a column's name in messages. A file without a line of names has its first texts there."""


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
        table = _embedded_table(data, split)
        yield table
        record_table(table)
        return
    folder = local_data(data)
    if folder is not None:
        files = split_files(folder, split, data)
        origin = file_names(files)
        with reading_errors(data, split, origin):
            table = open_files(data, files, origin)
            yield table
        record_table(table)
        return
    origin = f"{data.dataset} on the hub"
    # The cache of ``datasets`` identifies a file by path and time, which may be equal for different content
    # (archives often set one time for all their files). A temporary cache cannot be stale.
    with quiet_datasets(), TemporaryDirectory() as cache, reading_errors(data, split, origin):
        if download:
            options: dict[str, Any] = {"streaming": True} if stream else {"cache_dir": cache}
            content = hub.load_from_hub(data, split, Path(cache, "links"), **options)
            if isinstance(content, hub.SplitFiles):
                table = open_files(data, content.files, origin, content.class_names)
            else:
                table = LibraryTable(origin, content)
        else:
            table = LibraryTable(origin, hub.stream_from_hub(data, split))
        yield table
    record_table(table)


def open_files(
    data: Dataset, files: list[Path], origin: str, class_names: Mapping[str, list[str]] | None = None
) -> Table:
    """Return the table of data files of one format.

    Args:
        class_names: names of the values of columns that a card of the hub gives.
    Raises:
        FileProblem: a file cannot be read, or could be read in several ways.
    """
    if files[0].suffix.lower() in IMAGE_FORMATS:
        return _image_table(files, origin)
    for file in files:
        if placeholder_text := placeholder(file):
            problem, _, remedy = placeholder_text.partition(": ")
            raise FileProblem(problem, f"{remedy[0].upper()}{remedy[1:]}.").of_file(file.name if len(files) > 1 else "")
    kind, paths = file_format(files[0]), dict(zip(_distinct_names(files), files, strict=True))
    if kind in BINARY_FORMATS:
        return ArrowTable(origin, paths, kind == PARQUET, class_names)
    opened = {}
    for name, file in paths.items():
        if file.stat().st_size:
            try:
                opened[name] = TextFile(file, data.encoding, f"{data.key}.encoding")
            except FileProblem as error:
                raise error.of_file(name if len(paths) > 1 else "") from error
    table: Table
    if not opened:
        return MemoryTable(origin, {}, {})  # all files have 0 bytes
    if kind in (JSON, JSON_LINES):
        table = JsonTable(origin, opened, kind == JSON_LINES)
    elif kind == CONLL or (data.has_words and kind in (PLAIN_TEXT, TSV) and all(map(is_conll, opened.values()))):
        table = ConllTable(origin, opened)
    elif kind == PLAIN_TEXT:
        table = PlainTextTable(origin, opened, data.lines_are_texts)
    else:
        table = DelimitedTable(origin, opened, kind == TSV)
    table.stored_class_names |= class_names or {}
    return table


def _distinct_names(files: list[Path]) -> list[str]:
    """Return the names of files; with their folders, if two files have one name."""
    names = [file.name for file in files]
    if len(set(names)) == len(names):
        return names
    return [os.path.relpath(file, os.path.commonpath(files)) for file in files]


def _embedded_table(data: Dataset, split: str) -> Table:
    name = next((name for name in embedded.SPLITS if name == split), None)
    if name is None:
        raise missing_split(data, split, list(embedded.SPLITS), data.dataset)
    columns, class_names = embedded.embedded_columns(data.dataset.removeprefix(EMBEDDED), name)
    return MemoryTable(data.dataset, columns, {} if class_names is None else {list(columns)[-1]: class_names})


def _image_table(files: list[Path], origin: str) -> Table:
    """Return the files in the column ``image``, and the number of each file's folder in ``label``."""
    class_names = sorted({file.parent.name for file in files})
    number = {name: label for label, name in enumerate(class_names)}
    columns = {"image": list[Any](files), "label": [number[file.parent.name] for file in files]}
    record = FileRecord(f"{files[0].parent.parent.name}/", len(files), remarks=image_remarks(files))
    return MemoryTable(origin, columns, {"label": class_names}, [record])


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

    Args:
        further: more columns that the split must have, each with the configuration key that names it.
    Raises:
        UserError: files, split or columns are missing, damaged or empty, or the hub cannot be reached.
    """
    with locate_split(data, split) as (source, name):
        return _read_table(source, name, further)


def _read_table(data: Dataset, split: str, further: Mapping[str, str]) -> SplitTable:
    name, part = parse_split(split)
    if part is not None:
        complete = _read_table(data, name, further)
        labels = None
        if part.order == BY_CLASS:
            column = next((column for column in data.label_columns if column in complete.columns), None)
            if column is None and data.lacks_labels:
                part = replace(part, order=SHUFFLED)
            elif column is None:
                problem = "is a slice by class, but there is no label column"
                raise UserError(data.split_key(split), split, problem, "Use train[~:90%], in random order.")
            else:
                labels = list(map(str, complete.columns[column]))
        rows = part.rows(max(map(len, complete.columns.values()), default=0), labels).tolist()
        if not rows:
            remedy = "Use a larger part, as in train[:90%], train[90%:] or train[~:90%]."
            raise UserError(data.split_key(split), split, "has no rows", remedy)
        columns = {column: [values[row] for row in rows] for column, values in complete.columns.items()}
        return SplitTable(columns, complete.class_names, complete.untyped)
    with open_split(data, split) as table:
        required = {name: f"{data.key}.{field}" for name, field in data.required_columns(split).items()}
        required.update(further)
        requested = dict.fromkeys([*required, *data.label_columns, *data.optional_columns])
        columns = table.columns(requested)
        if table.column_names:
            _check_columns(data, split, table.column_names, required)
        if not any(columns.values()):
            raise empty_split(data, split, table.origin)
        class_names = table.class_names(data.label_columns[0]) if data.label_columns else None
        return SplitTable(_labeled(data, columns, class_names is not None, table), class_names, table.untyped)


def _labeled(data: Dataset, columns: dict[str, list[Any]], has_names: bool, table: Table) -> dict[str, list[Any]]:
    """Return the columns without the rows that have no label, unless no row has one, as in many a test split."""
    values = columns.get(data.label_columns[0], []) if data.label_columns else []
    rows = [row for row, value in enumerate(values) if not data.is_no_label(value, has_names)]
    if not rows or len(rows) == len(values):
        return columns
    table.num_unlabeled = len(values) - len(rows)
    return {name: [values[row] for row in rows] for name, values in columns.items()}


def read_rows(data: Dataset, split: str, download: bool = True) -> Iterator[dict[str, Any]]:
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
        with open_split(source, name, True, download) as table:
            is_empty = True
            for number, row in enumerate(_iterate(source, name, table)):
                if number == 0:
                    fields = source.required_columns(name).items()
                    _check_columns(
                        source, name, list(row), {column: f"{source.key}.{field}" for column, field in fields}
                    )
                if selection is None or (number < len(selection) and selection[number]):
                    is_empty = False
                    yield row
                if not download and selection is not None and number + 1 >= len(selection):
                    break  # files on this machine are read to their end, which counts their rows
    if is_empty:
        raise UserError(data.split_key(split), split, "has no rows", "Use a larger part, as in train[:90%].")


def _selected_rows(data: Dataset, name: str, part: SplitSlice, split: str, download: bool) -> np.ndarray:
    """Return whether each row of a split belongs to ``part``, (N,); rows after the last one of the array do not."""
    if part.order == BY_CLASS:
        problem, remedy = "is a slice by class, but text has no classes", "Use train[~:90%], in random order."
        raise UserError(data.split_key(split), split, problem, remedy)
    if (stop := part.last_row) is not None:
        size = stop
    elif not download:
        remedy = "Use numbers, as in train[:100000], or corpus.stream=false."
        raise UserError(data.split_key(split), split, "needs the number of rows, which a stream does not know", remedy)
    else:
        with recorded_tables(), open_split(data, name, True) as table:  # read once more below, and recorded there
            size = sum(1 for _ in _iterate(data, name, table))
    selection = np.zeros(size, dtype=bool)
    selection[part.rows(size)] = True
    return selection


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


def inspect_columns(data: Dataset, split: str) -> dict[str, str]:
    """Return the columns of a split, each with its type: that of the schema, or of all values.

    Raises:
        UserError: as ``read_table``.
    """
    with locate_split(data, split) as (source, name):
        name, _ = parse_split(name)
        with open_split(source, name) as table:
            types = table.column_types()
            if all(kind == EMPTY for kind in types.values()):
                raise empty_split(data, split, table.origin)
            return types


def column_names(data: Dataset, split: str) -> list[str]:
    """Return the names of the columns of a split; a slice stands for its split.

    Raises:
        UserError: as ``read_table``.
    """
    with locate_split(data, split) as (source, name), open_split(source, parse_split(name)[0]) as table:
        return table.column_names or list(table.column_types())  # a stream knows them after its first row


def read_columns(data: Dataset, split: str, names: Iterable[str]) -> dict[str, list[Any]]:
    """Return columns of a split with all rows, whatever the dataset requires; a slice stands for its split.

    Raises:
        UserError: as ``read_table``.
    """
    with locate_split(data, split) as (source, name), open_split(source, parse_split(name)[0]) as table:
        return table.columns(names)


def _check_columns(data: Dataset, split: str, available: list[str], required: Mapping[str, str]) -> None:
    for column, key in required.items():
        if column not in available:
            problem = f"split '{split}' of {data.dataset} has no column '{column}'"
            value = format_list(data.columns) if key == f"{data.key}.columns" else column
            raise UserError(key, value, problem, f"It has: {listed_names(available)}.")


def listed_names(names: Sequence[str], limit: int = 12) -> str:
    """Return names of columns for a message: the first ones, each cut after some characters."""
    short = [name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..." for name in names[:limit]]
    return ", ".join(short) + (f" and {len(names) - limit:,} more" if len(names) > limit else "")
