"""CSV and TSV files. Every value is text; a row has a value for each column, or the file is refused by its line."""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from distill_runner.common.errors import quantity
from distill_runner.common.library_switches import allow_long_csv_fields
from distill_runner.datasets.readers.table import DIGITS, EMPTY, TEXT, FileProblem, FilesTable, is_number
from distill_runner.datasets.readers.text_files import TextFile

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
SAMPLE_ROWS = 100
"""Rows from which the separator is chosen."""
CHUNK = 1000
"""Rows that are transposed at once, to look at columns instead of rows."""
MAX_VALUES, MAX_CATEGORICAL = 1000, 50
"""Largest number of different values of a categorical column, and of such columns, in the search for lost rows."""
MAX_LONG_ROWS = 1000
"""Rows of several lines that are searched for lost rows."""


class DelimitedTable(FilesTable):
    """CSV or TSV files with the same columns.

    In a TSV file, quotation marks are plain characters, as in GLUE's files, unless the file can only have been written
    with marks around its values.

    Args:
        files: the files by name.
        is_tsv: whether the names of the files say that tabs separate the columns.
    Raises:
        FileProblem: a file has no line of column names, or its separator or its quotation marks can mean two things.
    """

    untyped = True

    def __init__(self, origin: str, files: Mapping[str, TextFile], is_tsv: bool) -> None:
        super().__init__(origin, files)
        allow_long_csv_fields()
        opened = [self.checked(number, _opened(file, is_tsv)) for number, file in enumerate(files.values())]
        self._files = [next(file) for file in opened]
        self.column_names = list(self._files[0].names)
        for file in self._files[1:]:
            require_same_columns(file.name, file.names, self._files[0].name, self.column_names)

    def rows_of(self, number: int) -> Iterator[dict[str, Any]]:
        file = self._files[number]
        for row in self.checked(number, file.rows()):
            yield dict(zip(file.names, row, strict=True))
        file.complete(self.records[number])

    def columns(self, names: Iterable[str]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {name: [] for name in names if name in self.column_names}
        for number, file in enumerate(self._files):
            positions = [(file.names.index(name), values) for name, values in columns.items()]
            for row in self.checked(number, file.rows()):
                for position, values in positions:
                    values.append(row[position])
            file.complete(self.records[number])
        self._is_read = True
        return columns

    def column_types(self) -> dict[str, str]:
        types = dict.fromkeys(self.column_names, EMPTY)
        for number, file in enumerate(self._files):
            undecided = {name: position for position, name in enumerate(file.names) if types[name] != TEXT}
            rows = self.checked(number, file.rows())
            while undecided and (chunk := list(islice(rows, CHUNK))):
                columns = list(zip(*chunk, strict=True))
                for name, position in list(undecided.items()):
                    values = {value for value in columns[position] if value.strip()}
                    if values and types[name] == EMPTY:
                        types[name] = DIGITS
                    if not all(map(is_number, values)):
                        types[name] = TEXT
                        del undecided[name]
        return types


def _opened(text_file: TextFile, is_tsv: bool) -> Iterator["_DelimitedFile"]:
    yield _DelimitedFile(text_file, is_tsv)


def require_same_columns(name: str, names: Sequence[str], first_name: str, first_names: Sequence[str]) -> None:
    """Check that two files of a split have the same columns.

    Raises:
        FileProblem: one of them has a column that the other lacks.
    """
    if sorted(names) == sorted(first_names):
        return
    missing, new = set(first_names) - set(names), set(names) - set(first_names)
    columns = [f"no column {column!r}" for column in sorted(missing)] + [f"also {column!r}" for column in sorted(new)]
    problem = f"{name} has {', '.join(columns[:4])}{', ...' if len(columns) > 4 else ''}, unlike {first_name}"
    raise FileProblem(problem, "All files of a split need the same columns; give other files another name.")


class _DelimitedFile:
    """A CSV or TSV file.

    Attributes:
        names: names of its columns. A column without a name, such as the index that pandas writes, gets one.
    """

    def __init__(self, text_file: TextFile, is_tsv: bool) -> None:
        self.text_file, self.name = text_file, text_file.file.name
        self._is_tsv, self._skipped, self._quoting = is_tsv, 0, csv.QUOTE_MINIMAL
        self._separator = "\t" if is_tsv else self._choose_separator()
        if is_tsv:
            self._quoting = self._tsv_quoting()
        self.names = self._read_names()
        self.num_rows = self.num_lines = self.num_blank = 0
        self._long_rows: list[tuple[int, list[str]]] = []
        self._warnings: list[str] | None = None

    def rows(self) -> Iterator[list[str]]:
        """Yield the rows after the names of the columns, each with a value for each column.

        Raises:
            FileProblem: a row has more or fewer values, or its quotation marks do not match.
        """
        width, reader, previous, count, blank = len(self.names), self._reader(), 0, 0, 0
        self._long_rows = []
        while not next(reader, ["end"]):  # blank lines before the names
            pass
        previous = reader.line_num
        try:
            for row in reader:
                if len(row) != width:
                    if width == 1 and not row:
                        row = [""]
                    elif not row or (len(row) == 1 and not row[0].strip()):
                        blank += 1
                        previous = reader.line_num
                        continue
                    else:
                        raise self._ragged(reader.line_num, row)
                if reader.line_num - previous > 1 and len(self._long_rows) < MAX_LONG_ROWS:
                    self._long_rows.append((previous + 1, row))
                previous = reader.line_num
                if width > 1 and row[1:] == self.names[1:] and row[0].lstrip("\ufeff") == self.names[0]:
                    problem = f"line {previous + self._skipped} repeats the names of the first line"
                    raise FileProblem(problem, "Remove it: are these two files, one after the other?")
                count += 1
                yield row
        except csv.Error as error:
            raise self._malformed(error, previous, reader.line_num) from error
        self.num_rows, self.num_lines, self.num_blank = count, reader.line_num + self._skipped, blank

    def complete(self, record: Any) -> None:
        """Write what was read into the record of the file, after its last row.

        Raises:
            FileProblem: a quotation mark has swallowed rows.
        """
        record.rows, record.lines = self.num_rows, self.num_lines
        if self._warnings is None:
            self._warnings = self._search_lost_rows() if self._long_rows else []
        record.warnings = self._warnings
        remarks = list(self.text_file.remarks)
        if not self._is_tsv and self._separator != ",":
            remarks.append(f"separated by {SEPARATORS[self._separator]}")
        if self._is_tsv and self._quoting == csv.QUOTE_MINIMAL:
            remarks.append("quoted as in CSV")
        if self._long_rows:
            count = len(self._long_rows)
            many = f"{count:,} or more rows" if count == MAX_LONG_ROWS else quantity(count, "row", ",")
            remarks.append(f"{many} of several lines")
        if self.num_blank:
            remarks.append(f"{self.num_blank:,} blank line{'s' * (self.num_blank > 1)} left out")
        record.remarks = remarks

    def _reader(self, quoting: int | None = None, separator: str | None = None) -> Any:
        lines = islice(self.text_file.lines(), self._skipped, None)
        quoting = self._quoting if quoting is None else quoting
        return csv.reader(lines, delimiter=separator or self._separator, quoting=quoting, strict=True)  # type: ignore[arg-type]

    def _choose_separator(self) -> str:
        """Return the separator: the only one in the first line, or the only one that fits all rows of a sample."""
        lines = self.text_file.lines()
        first = next(lines, "")
        if len(line := first.strip().strip('"')) == 5 and line.startswith("sep=") and line[4] in SEPARATORS:
            self._skipped = 1  # Excel's own way to say it
            return line[4]
        present = [separator for separator in SEPARATORS if separator in first]
        if len(present) < 2:
            return present[0] if present else ","
        fitting = [separator for separator in present if self._fits(separator)]
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            return present[0]
        names = " or ".join(SEPARATORS[separator] for separator in fitting)
        raise FileProblem(f"may be separated by {names}", "Put quotation marks around values that contain them.")

    def _fits(self, separator: str) -> bool:
        """Return whether all rows of a sample have as many values as the first line, and more than one."""
        try:
            rows = [row for row in islice(self._reader(separator=separator), SAMPLE_ROWS) if row]
        except csv.Error:
            return False
        return len(rows[0]) > 1 and {len(row) for row in rows} == {len(rows[0])}

    def _tsv_quoting(self) -> int:
        """Return whether quotation marks are plain characters, or enclose values as in CSV.

        A writer of CSV puts marks around values that contain a mark, a tab or a new line, and doubles the marks inside.
        A file that does so everywhere, and nowhere else, was written so.

        Raises:
            FileProblem: both are possible.
        """
        marks = _count_marks(self.text_file.lines())
        if marks["names"]:
            return csv.QUOTE_MINIMAL
        if marks["bare"]:
            return csv.QUOTE_NONE
        if not marks["plain"]:
            if not marks["necessary"]:
                return csv.QUOTE_NONE
            if not marks["needless"]:
                return csv.QUOTE_MINIMAL
        elif not self._is_even(csv.QUOTE_MINIMAL):
            return csv.QUOTE_NONE
        elif not self._is_even(csv.QUOTE_NONE):
            return csv.QUOTE_MINIMAL
        elif self._would_lose_rows():
            return csv.QUOTE_NONE
        problem = "has quotation marks that may enclose values, or be a part of them"
        remedy = f"If they enclose them, rename {self.name} to .csv; if they are text, save the file as .jsonl."
        raise FileProblem(problem, remedy)

    def _would_lose_rows(self) -> bool:
        """Return whether a value in quotation marks would have lines that are rows without empty values.

        Such a line has a label that rows outside of marks have too: that of another value in marks shows nothing.
        """
        self._quoting = csv.QUOTE_MINIMAL
        try:
            self.names = self._read_names()
            for _ in self.rows():
                pass
        except FileProblem:
            return True
        pieces = [piece for _, row in self._long_rows for piece in self._pieces(row)]
        categories = self._categories(())
        return len(self.names) > 1 and all(map(all, pieces)) and any(self._is_row(row, categories) for row in pieces)

    def _is_even(self, quoting: int) -> bool:
        """Return whether all rows have the same number of values."""
        try:
            return len({len(row) for row in self._reader(quoting) if row}) == 1
        except csv.Error:
            return False

    def _read_names(self) -> list[str]:
        try:
            names = next((row for row in self._reader() if row), None)
        except csv.Error as error:
            raise self._malformed(error, 0, 1) from error
        if names is None:
            return []
        if twice := sorted({name for name in names if name and names.count(name) > 1}):
            problem = f"names the column {twice[0]!r} twice in its first line"
            raise FileProblem(problem, "Give each column its own name.")
        return [name or f"Unnamed: {position}" for position, name in enumerate(names)]  # as pandas calls them

    def _ragged(self, line: int, row: Sequence[str]) -> FileProblem:
        problem = f"line {line + self._skipped} has {_values(len(row))}, but the first line names {len(self.names)}"
        if len(row) > len(self.names):
            name = SEPARATORS[self._separator]
            return FileProblem(problem, f"Put quotation marks around values with {name}, or name every column.")
        return FileProblem(problem, "Complete this row, or remove it.")

    def _malformed(self, error: csv.Error, previous: int, line: int) -> FileProblem:
        """Return the problem of an error of Python's csv module; the row begins after line ``previous``."""
        first, line = previous + 1 + self._skipped, line + self._skipped
        text = str(error)
        remedy = 'Inside a quoted value, a quotation mark is written "".'
        if "unexpected end" in text:
            return FileProblem(f"the quotation mark that opens a value in line {first} is never closed", remedy)
        if "expected after" in text:
            where = f"of a value that begins in line {first} " if first < line else ""
            return FileProblem(f"line {line} goes on after the closing quotation mark {where}".rstrip(), remedy)
        if "new-line character" in text:
            problem = f"line {line} has a carriage return outside quotation marks"
            return FileProblem(problem, "Remove it, or put quotation marks around the value.")
        return FileProblem(f"line {line} cannot be read: {text}", remedy)

    def _search_lost_rows(self) -> list[str]:
        """Search values of several lines for rows that a wrong quotation mark has swallowed.

        Returns:
            A warning for values that may hold rows.
        Raises:
            FileProblem: all lines of a value but its last are rows, each with a label that other rows have.
        """
        if len(self.names) == 1:
            return []  # any line looks like a row
        pieces = {line: self._pieces(row) for line, row in self._long_rows}
        categories = self._categories(chain.from_iterable(pieces.values()))
        suspects = []
        for line, rows in pieces.items():
            matches = [self._is_row(row, categories) for row in rows]
            if all(matches):
                end = line + len(rows)
                problem = f"the quotation mark in line {line + self._skipped} swallows the rows up to line {end}"
                remedy = 'Inside a value, a mark is written "". If its lines only look like rows, save it as .jsonl.'
                raise FileProblem(problem, remedy)
            if any(matches):
                suspects.append(line + self._skipped)
        if not suspects:
            return []
        problem = f"{self.name}: a value from line {suspects[0]} has lines that look like rows"
        return [f"{problem}: is a quotation mark wrong?"]

    def _pieces(self, row: Sequence[str]) -> list[list[str]]:
        """Return the lines of a row's first value of several lines, but its last line, each divided into values."""
        position = next(i for i, value in enumerate(row) if "\n" in value or "\r" in value)
        first, *others = row[position].split("\n" if "\n" in row[position] else "\r")[:-1]
        return [[*row[:position], *self._split(first)], *map(self._split, others)]

    def _rows_of_one_line(self) -> Iterator[list[str]]:
        reader, previous = self._reader(), 0
        for row in reader:
            if reader.line_num - previous == 1 and previous:
                yield row
            previous = reader.line_num

    def _split(self, line: str) -> list[str]:
        try:
            return next(csv.reader([line], delimiter=self._separator), [])
        except csv.Error:
            return []

    def _is_row(self, values: Sequence[str], categories: Mapping[int, set[str]]) -> bool:
        return len(values) == len(self.names) and any(values[i] in category for i, category in categories.items())

    def _categories(self, pieces: Iterable[Sequence[str]]) -> dict[int, set[str]]:
        """Return the repeated values of columns of few values, in the rows of one line and in ``pieces``."""
        values = {position: Counter[str]() for position in range(min(len(self.names), MAX_CATEGORICAL))}
        count = 0
        for row in chain(self._rows_of_one_line(), pieces):
            if len(row) == len(self.names):
                count += 1
                for position in list(values):
                    values[position][row[position]] += 1
                    if len(values[position]) > MAX_VALUES:
                        del values[position]
        few = {position: counts for position, counts in values.items() if 2 * len(counts) <= count}
        return {
            position: {value for value, number in counts.items() if value and number > 1}
            for position, counts in few.items()
        }


def _count_marks(lines: Iterable[str]) -> Counter[str]:
    """Return how quotation marks are used in the values of a TSV file.

    Returns:
        Number of values in marks that a writer of CSV needs (``necessary``) or does not (``needless``), of values with
        marks elsewhere (``plain``), and of those among them that no such writer makes (``bare``); and ``names``, 1 if
        the names of all columns are in marks.
    """
    marks = Counter[str]()
    for number, line in enumerate(lines):
        if '"' not in line:
            continue
        values = line.rstrip("\r\n").split("\t")
        enclosed = [len(value) > 1 and value[0] == value[-1] == '"' for value in values]
        marks["names"] += number == 0 and all(enclosed)
        for value, is_enclosed in zip(values, enclosed, strict=True):
            inner = value[1:-1]
            if is_enclosed and '"' not in inner.replace('""', ""):
                # A value that is empty is in marks if its row has no other.
                marks["necessary" if '""' in inner or not inner else "needless"] += 1
            else:
                marks["plain"] += '"' in value
                marks["bare"] += value[:1] != '"' and '"' in value.replace('""', "").removesuffix('"')
    return marks


def _values(count: int) -> str:
    return "1 value" if count == 1 else f"{count} values"
