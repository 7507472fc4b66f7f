"""A split as its readers opened it, whatever its format, and the record of what they took from its files.

Readers of Parquet and Arrow files and of datasets of the library ``datasets`` are here, too.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

from distill_runner.common.errors import UserError, root_cause

Row = dict[str, Any]
ROWS_AT_ONCE = 1000
DAMAGED = "The file is damaged, incomplete or of another format than its name says: download or write it again."

TEXT, DIGITS, NUMBER, FLAG = "text", "numbers as text", "number", "true or false"
LIST, MAPPING, BYTES, TIME, EMPTY, MIXED = "list", "mapping", "bytes", "time", "empty", "mixed"
"""Types of columns, from all their values."""
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")


def is_missing(value: Any) -> bool:
    """Return whether a cell holds no value: null, or NaN, as which pandas writes null."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def text_of(value: Any) -> str:
    """Return a cell as text.

    Raises:
        ValueError: it holds no value, or something else than a text or a number; the message says what.
    """
    if is_missing(value):
        raise ValueError("no text")
    if not isinstance(value, str | int | float):
        raise ValueError(f"a {type(value).__name__} instead of a text")
    return str(value)


_KINDS: tuple[tuple[Any, str], ...] = (
    (type(None), EMPTY),
    (bool, FLAG),
    ((int, float, Decimal), NUMBER),
    (bytes, BYTES),
    ((list, tuple), LIST),
    (dict, MAPPING),
    ((date, time), TIME),
)


def value_type(value: Any) -> str:
    """Return the type of a single value."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return DIGITS
    if isinstance(value, str):
        return TEXT if value.strip() else EMPTY
    return next((kind for types, kind in _KINDS if isinstance(value, types)), MIXED)


class FileProblem(Exception):
    """A file cannot be read, or could be read in several ways; ``problem`` and ``remedy`` are for the user."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem, self.remedy = problem, remedy
        super().__init__(problem)


@contextmanager
def problems_of(name: str) -> Iterator[None]:
    """Add the name of a file to its problems, unless it is empty or they name the file."""
    try:
        yield
    except FileProblem as error:
        if not name or name in error.problem:
            raise
        raise FileProblem(f"{name} {error.problem}", error.remedy) from error


@dataclass
class FileRecord:
    """What a reader took from one file.

    Attributes:
        name: name of the file in the folder of the dataset.
        rows: number of rows read.
        lines: number of lines of a file of text, with the line of the column names.
        remarks: what the reader decided, such as a separator, or left out, such as blank lines.
    """

    name: str
    rows: int = 0
    lines: int | None = None
    remarks: list[str] = field(default_factory=list)


@dataclass
class TableRecord:
    """What was taken from the files of one split.

    Attributes:
        origin: the files, or the dataset that the rows come from.
        files: records of the files; empty for data in memory and of other libraries.
        rows: number of rows.
        columns: names of all columns.
        num_unlabeled: number of rows without a label that were left out.
    """

    origin: str
    files: list[FileRecord]
    rows: int
    columns: list[str]
    num_unlabeled: int = 0


_records: ContextVar[list[TableRecord] | None] = ContextVar("records", default=None)


@contextmanager
def recorded_tables() -> Iterator[list[TableRecord]]:
    """Yield a list that receives the record of each table that is opened and read within the context."""
    records: list[TableRecord] = []
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


class Reader(ABC):
    """Rows of one file, or of other data.

    Attributes:
        names: names of the columns; None if they are known only after all rows have been read.
        class_names: names that the data itself gives to the values of columns; for lists, to their elements.
        untyped: whether all values are text because the format has no types (CSV).
    """

    names: Sequence[str] | None = None
    class_names: Mapping[str, Sequence[str]] = {}
    untyped: ClassVar[bool] = False

    @abstractmethod
    def rows(self, record: FileRecord, names: Sequence[str] | None) -> Iterator[Row]:
        """Yield the rows, and add lines and remarks to the record.

        Args:
            names: columns that are needed; other ones may be left out. None takes all.
        Raises:
            FileProblem: a row cannot be read, or could be read in several ways.
        """


class MemoryReader(Reader):
    """Columns in memory."""

    def __init__(self, columns: Mapping[str, list[Any]], class_names: Mapping[str, list[str]]) -> None:
        self.names, self.class_names, self._columns = list(columns), class_names, columns

    def rows(self, record: FileRecord, names: Sequence[str] | None) -> Iterator[Row]:
        for row in zip(*self._columns.values(), strict=True):
            yield dict(zip(self._columns, row, strict=True))


def require_distinct(names: Sequence[str]) -> None:
    """Raise a FileProblem if a column is named twice."""
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise FileProblem(f"names the column {twice[0]!r} twice", "Give each column its own name.")


class ArrowReader(Reader):
    """A Parquet file, or an Arrow file as ``save_to_disk`` of ``datasets`` writes it.

    Raises:
        FileProblem: the file is damaged.
    """

    names: Sequence[str]

    def __init__(self, file: Path, is_parquet: bool) -> None:
        self._file, self._is_parquet = file, is_parquet
        with self._opened(None) as (schema, _):
            self.names = schema.names
        require_distinct(self.names)
        if b"huggingface" in (schema.metadata or {}):
            import datasets

            self.class_names = class_names(datasets.Features.from_arrow_schema(schema))

    @contextmanager
    def _opened(self, names: Sequence[str] | None) -> Iterator[tuple[Any, Iterator[Any]]]:
        """Yield the schema and an iterator over the rows in batches."""
        import pyarrow.parquet

        with library_errors():
            if self._is_parquet:
                with pyarrow.parquet.ParquetFile(self._file) as file:
                    yield file.schema_arrow, file.iter_batches(ROWS_AT_ONCE, columns=names)
                return
            with pyarrow.memory_map(str(self._file)) as source:
                try:
                    content: Any = pyarrow.ipc.open_stream(source)
                    batches = iter(content)
                except pyarrow.ArrowInvalid:  # the form that allows random access
                    content = pyarrow.ipc.open_file(source)
                    batches = map(content.get_batch, range(content.num_record_batches))
                yield content.schema, (batch if names is None else batch.select(names) for batch in batches)

    def rows(self, record: FileRecord, names: Sequence[str] | None) -> Iterator[Row]:
        with self._opened(None if names is None else [name for name in names if name in self.names]) as (_, batches):
            for batch in batches:
                yield from _rows_of(batch)


def _rows_of(batch: Any) -> list[Row]:
    """Return the rows of a batch of Arrow; decimals become floats, like all fractions."""
    import pyarrow

    fields = [one.with_type(pyarrow.float64()) if pyarrow.types.is_decimal(one.type) else one for one in batch.schema]
    return list(batch.cast(pyarrow.schema(fields)).to_pylist())


class LibraryReader(Reader):
    """Dataset of the library ``datasets``: loaded, or a stream of rows."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.names = dataset, dataset.column_names
        self.class_names = class_names(dataset.features or {})

    def rows(self, record: FileRecord, names: Sequence[str] | None) -> Iterator[Row]:
        dataset = self._dataset
        if names is not None and self.names is not None:
            dataset = dataset.select_columns([name for name in names if name in self.names])
        with library_errors():
            for batch in dataset.with_format("arrow").iter(ROWS_AT_ONCE):
                yield from _rows_of(batch)


def class_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the values of columns; for lists, those of their elements."""
    inner = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {name: feature.names for name, feature in inner.items() if getattr(feature, "names", None)}


@contextmanager
def library_errors() -> Iterator[None]:
    """Turn the errors of pyarrow and ``datasets`` into problems of the file; those of the system and of memory stay."""
    try:
        yield
    except (MemoryError, FileProblem, UserError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise FileProblem(root_cause(error), DAMAGED) from error


class Table:
    """One split: the rows of its files, one file after the other.

    Attributes:
        origin: the files or the dataset that the rows come from, for messages.
        column_names: names of all columns, in the order of the data; some formats know them only after all rows.
        untyped: as for ``Reader``.
        class_names: as for ``Reader``.
        num_unlabeled: number of rows that whoever read the table left out because they have no label.
    Args:
        readers: the readers of the files by name.
        has_files: whether the readers are of files of the user; only those are named in the record.
    Raises:
        FileProblem: the files differ in their columns or classes.
    """

    num_unlabeled = 0

    def __init__(self, origin: str, readers: Mapping[str, Reader], has_files: bool = True) -> None:
        self.origin, self._readers, self._has_files, self._is_read = origin, readers, has_files, False
        self._files = [FileRecord(name) for name in readers]
        self.column_names: list[str] = []
        self.untyped = any(reader.untyped for reader in readers.values())
        self.class_names: dict[str, list[str]] = {}
        classes_from: dict[str, str] = {}
        for name, reader in readers.items():
            if reader.names is not None:
                self.column_names = self.column_names or list(reader.names)
                own, expected = {*reader.names}, {*self.column_names}
                if own != expected:
                    changes = [f"no column {column!r}" for column in sorted(expected - own)[:4]]
                    changes += [f"also {column!r}" for column in sorted(own - expected)[:4]]
                    remedy = "All files of a split need the same columns; give other files another name."
                    raise FileProblem(f"{name} has {', '.join(changes)}, unlike {self._files[0].name}", remedy)
            for column, classes in reader.class_names.items():
                first = self.class_names.setdefault(column, list(classes))
                if first != list(classes):
                    problem = f"the classes of {column!r} are {first} in {classes_from[column]}, but {classes}"
                    remedy = "Write all files of a split with the same classes in the same order."
                    raise FileProblem(f"{problem} in {name}", remedy)
                classes_from.setdefault(column, name)

    def rows(self, names: Sequence[str] | None = None) -> Iterator[Row]:
        """Yield the rows one by one, with at least the columns ``names``; None takes all.

        Raises:
            FileProblem: a row cannot be read, or could be read in several ways.
        """
        for record, reader in zip(self._files, self._readers.values(), strict=True):
            record.rows, record.lines, record.remarks = 0, None, []
            columns = None if reader.names is not None else dict.fromkeys(self.column_names)
            with problems_of(record.name if len(self._files) > 1 else ""):
                for row in reader.rows(record, names):
                    record.rows += 1
                    if columns is not None:
                        columns.update(dict.fromkeys(row))
                    yield row
            self.column_names = self.column_names if columns is None else list(columns)
        self._is_read = True

    def columns(self, names: Iterable[str]) -> dict[str, list[Any]]:
        """Return columns with all their values; those that the data lack are left out."""
        columns: dict[str, list[Any]] = {name: [] for name in names}
        for row in self.rows(list(columns)):
            for name, values in columns.items():
                values.append(row.get(name))
        return {name: values for name, values in columns.items() if name in self.column_names}

    def column_types(self) -> dict[str, str]:
        """Return the type of each column, from all its values."""
        types: dict[str, set[str]] = {name: set() for name in self.column_names}
        for row in self.rows():
            for name, value in row.items():
                types.setdefault(name, set()).add(value_type(value))

        def common(types: set[str]) -> str:
            types = types - {EMPTY}
            if len(types) < 2:
                return next(iter(types), EMPTY)
            return TEXT if types & {TEXT, DIGITS} else MIXED

        return {name: common(own) for name, own in types.items()}

    def add_record(self) -> None:
        """Add what was read to the list of ``recorded_tables``, if the table was read to its end."""
        records = _records.get()
        if records is not None and self._is_read:
            files = self._files if self._has_files else []
            rows = sum(record.rows for record in self._files)
            records.append(TableRecord(self.origin, files, rows, self.column_names, self.num_unlabeled))
