"""A split as its reader opened it, and the record of what the reader took from its files."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

Row = TypeVar("Row")

TEXT, DIGITS, NUMBER, FLAG, LIST, MAPPING, BYTES, TIME, EMPTY, MIXED = (
    "text",
    "numbers as text",
    "number",
    "true or false",
    "list",
    "mapping",
    "bytes",
    "time",
    "empty",
    "mixed",
)
"""Types of columns: of their schema where there is one, else of all their values."""
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")


def is_number(text: str) -> bool:
    """Return whether a text is a decimal number."""
    return _NUMBER.fullmatch(text) is not None


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


class FileProblem(Exception):
    """A file cannot be read, or could be read in several ways; ``problem`` and ``remedy`` are for the user."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem, self.remedy = problem, remedy
        super().__init__(problem)

    def of_file(self, name: str) -> "FileProblem":
        """Return the problem with the name of its file, unless it is empty or the problem names the file."""
        return FileProblem(f"{name} {self.problem}", self.remedy) if name and name not in self.problem else self


@dataclass
class FileRecord:
    """What a reader took from one file.

    Attributes:
        name: name of the file in the folder of the dataset.
        rows: number of rows read.
        lines: number of lines of a file of text, with the line of the column names.
        remarks: what the reader decided, such as a separator, or left out, such as blank lines.
        warnings: what the reader cannot be sure of.
    """

    name: str
    rows: int = 0
    lines: int | None = None
    remarks: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass
class TableRecord:
    """What a reader took from the files of one split.

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


def record_table(table: "Table") -> None:
    """Add the record of a table to the list of ``recorded_tables``, if it was read."""
    records = _records.get()
    if records is not None and (record := table.record()) is not None:
        record.num_unlabeled = table.num_unlabeled
        records.append(record)


class Table(ABC):
    """One split as its reader opened it: named columns and rows, the same for every format.

    Attributes:
        origin: the files or the dataset that the rows come from, for messages.
        column_names: names of all columns, in the order of the data; a stream may not know them before its first row.
        untyped: whether all values are text because the format has no types (CSV).
        stored_class_names: names that the data itself gives to the values of columns; for lists, to their elements.
        num_unlabeled: number of rows that whoever read the table left out because they have no label.
    """

    untyped: bool = False
    num_unlabeled: int = 0

    def __init__(self, origin: str, column_names: Iterable[str] = ()) -> None:
        self.origin, self.column_names = origin, list(column_names)
        self.stored_class_names: dict[str, list[str]] = {}

    @abstractmethod
    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows one by one, each with all columns."""

    @abstractmethod
    def columns(self, names: Iterable[str]) -> dict[str, list[Any]]:
        """Return columns with all their values; those that the data lack are left out."""

    def class_names(self, column: str) -> list[str] | None:
        """Return the names that the data itself gives to the values of a column, if any."""
        return self.stored_class_names.get(column)

    def column_types(self) -> dict[str, str]:
        """Return the type of each column, from the schema or from all values."""
        types = {name: ColumnType() for name in self.column_names}
        for row in self:
            for name, value in row.items():
                types.setdefault(name, ColumnType()).add(value)
        return {name: column.type for name, column in types.items()}

    def record(self) -> TableRecord | None:
        """Return what was read; None if the table was not read to its end."""
        return None


class WordLines(list[Any]):
    """Values of the words of a sentence, and the number of the line that each one is in, for messages."""

    def __init__(self, values: Iterable[Any], lines: Iterable[int]) -> None:
        super().__init__(values)
        self.lines = list(lines)


class ColumnType:
    """Type of a column, from one value after the other."""

    def __init__(self) -> None:
        self.types: set[str] = set()
        self.is_numeric = True

    def add(self, value: Any) -> None:
        name = value_type(value)
        if name == TEXT and self.is_numeric and value.strip():
            self.is_numeric = is_number(value)
        self.types.add(name)

    @property
    def type(self) -> str:
        types = self.types - {EMPTY}
        if types == {TEXT} and self.is_numeric:
            return DIGITS
        return EMPTY if not types else next(iter(types)) if len(types) == 1 else TEXT if TEXT in types else MIXED


def value_type(value: Any) -> str:
    """Return the type of a single value."""
    match value:
        case None | "":
            return EMPTY
        case str():
            return TEXT
        case bool():
            return FLAG
        case int() | float():
            return NUMBER
        case bytes():
            return BYTES
        case list() | tuple():
            return LIST
        case dict():
            return MAPPING
    return TIME if hasattr(value, "isoformat") else MIXED


class MemoryTable(Table):
    """Columns in memory: an embedded dataset or the files of a folder of images.

    Args:
        files: record of the files, if the columns were made from files.
    """

    def __init__(
        self,
        origin: str,
        values: Mapping[str, list[Any]],
        class_names: Mapping[str, list[str]],
        files: Iterable[FileRecord] = (),
    ) -> None:
        super().__init__(origin, values)
        self._values, self._files = values, list(files)
        self.stored_class_names |= class_names

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in zip(*self._values.values(), strict=True):
            yield dict(zip(self.column_names, row, strict=True))

    def columns(self, names: Iterable[str]) -> dict[str, list[Any]]:
        return {name: self._values[name] for name in names if name in self._values}

    def record(self) -> TableRecord:
        rows = len(next(iter(self._values.values()), []))
        return TableRecord(self.origin, self._files, rows, self.column_names)


class LibraryTable(Table):
    """Dataset of the library ``datasets``: completely loaded, or a stream of rows."""

    def __init__(self, origin: str, dataset: Any) -> None:
        super().__init__(origin, dataset.column_names or [])
        self._dataset, self._rows = dataset, len(dataset) if hasattr(dataset, "__len__") else None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        count = 0
        for row in self._dataset:
            yield row
            count += 1
        self._rows = count

    def columns(self, names: Iterable[str]) -> dict[str, list[Any]]:
        existing = [name for name in names if name in self.column_names]
        columns: dict[str, list[Any]] = self._dataset.select_columns(existing).to_dict()
        return columns

    def column_types(self) -> dict[str, str]:
        kinds = {name: getattr(feature, "dtype", "") for name, feature in (self._dataset.features or {}).items()}
        return {name: TEXT if kind in ("string", "large_string") else MIXED for name, kind in kinds.items()}

    def class_names(self, column: str) -> list[str] | None:
        feature = self._dataset.features.get(column)
        # The names are those of the elements of a list, or of a single value.
        return getattr(getattr(feature, "feature", feature), "names", None)

    def record(self) -> TableRecord | None:
        return None if self._rows is None else TableRecord(self.origin, [], self._rows, self.column_names)


class FilesTable(Table):
    """Base class of tables that this package reads from files, one file after the other.

    A subclass defines ``rows_of``, and sets ``column_names`` if the files name their columns at their beginning.

    Attributes:
        records: record of each file; a file that was read to its end has its number of rows.
    """

    def __init__(self, origin: str, names: Iterable[str]) -> None:
        super().__init__(origin)
        self.records = [FileRecord(name) for name in names]
        self._is_read = False

    @abstractmethod
    def rows_of(self, number: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of file ``number``, and complete its record."""

    def checked(self, number: int, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows of file ``number``; its problems name it if there are several files."""
        try:
            yield from rows
        except FileProblem as error:
            raise error.of_file(self.records[number].name if len(self.records) > 1 else "") from error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(len(self.records)):
            yield from self.rows_of(number)
        self._is_read = True

    def columns(self, names: Iterable[str]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {name: [] for name in names}
        for row in self:
            for name, values in columns.items():
                values.append(row.get(name))
        return {name: columns[name] for name in columns if name in self.column_names}

    def record(self) -> TableRecord | None:
        if not self._is_read:
            return None
        return TableRecord(self.origin, self.records, sum(record.rows for record in self.records), self.column_names)
