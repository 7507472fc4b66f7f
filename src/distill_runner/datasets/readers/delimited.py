"""CSV and TSV files. Every value is text; a row has a value for each column, or the file is refused by its line."""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from distill_runner.common.library_switches import allow_long_csv_fields
from distill_runner.datasets.readers.table import FileProblem, FileRecord, Reader, Row, require_distinct
from distill_runner.datasets.readers.text_files import TextFile

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
SAMPLE_ROWS = 100
"""Rows from which the separator is chosen."""
MAX_VALUES, MAX_CATEGORICAL = 1000, 50
"""Largest number of different values of a categorical column, and of such columns, in the search for lost rows."""
MAX_LONG_ROWS = 1000
"""Rows of several lines that are searched for lost rows."""
MARK_REMEDY = 'Inside a quoted value, a quotation mark is written "".'


class DelimitedReader(Reader):
    """A CSV or TSV file.

    In a TSV file, quotation marks are plain characters, as in GLUE's files, unless the file can only have been written
    with marks around its values. A column without a name, such as the index that pandas writes, gets one.

    Args:
        is_tsv: whether the name of the file says that tabs separate the columns.
    Raises:
        FileProblem: a column is named twice, or the separator or the quotation marks can mean two things.
    """

    untyped = True
    names: Sequence[str]

    def __init__(self, text_file: TextFile, is_tsv: bool) -> None:
        allow_long_csv_fields()
        self._file, self._is_tsv, self._skipped, self._quoting = text_file, is_tsv, 0, csv.QUOTE_MINIMAL
        self._separator = "\t" if is_tsv else self._choose_separator()
        if is_tsv:
            self._quoting = self._tsv_quoting()
        try:
            names: list[str] = next(filter(None, self._reader()), [])
        except csv.Error as error:
            raise self._malformed(error, 1, 1) from error
        require_distinct(names)
        self.names = [name or f"Unnamed: {position}" for position, name in enumerate(names)]  # as pandas calls them
        self._first_row = names

    def rows(self, record: FileRecord, names: Sequence[str] | None) -> Iterator[Row]:
        reader, width, end, blank, num_long = self._reader(), len(self.names), 0, 0, 0
        long_rows: dict[int, list[str]] = {}  # by the line in which they begin
        has_names = False
        try:
            for row in reader:
                start, end = end + 1, reader.line_num
                if not has_names:
                    has_names = bool(row)
                    continue
                if width == 1 and not row:
                    row = [""]
                elif len(row) != width and not (row and row[0].strip()) and len(row) < 2:
                    blank += 1
                    continue
                elif len(row) != width:
                    raise self._ragged(end + self._skipped, row)
                if width > 1 and row[1:] == self._first_row[1:] and row[0].lstrip("\ufeff") == self._first_row[0]:
                    problem = f"line {end + self._skipped} repeats the names of the first line"
                    raise FileProblem(problem, "Remove it: are these two files, one after the other?")
                if end > start:
                    num_long += 1
                    if num_long <= MAX_LONG_ROWS:
                        long_rows[start] = row
                yield dict(zip(self.names, row, strict=True))
        except csv.Error as error:
            raise self._malformed(error, end + 1, reader.line_num) from error
        record.lines = reader.line_num + self._skipped
        record.warnings += self._lost_rows(long_rows, record.name)
        record.remarks += self._file.remarks
        if not self._is_tsv and self._separator != ",":
            record.remarks.append(f"separated by {SEPARATORS[self._separator]}")
        if self._is_tsv and self._quoting == csv.QUOTE_MINIMAL:
            record.remarks.append("quoted as in CSV")
        if num_long:
            record.remarks.append(f"{num_long:,} row{'s' * (num_long > 1)} of several lines")
        if blank:
            record.remarks.append(f"{blank:,} blank line{'s' * (blank > 1)} left out")

    def _reader(self, separator: str | None = None, quoting: int | None = None) -> Any:
        lines = islice(self._file.lines(), self._skipped, None)
        quoting = self._quoting if quoting is None else quoting
        return csv.reader(lines, delimiter=separator or self._separator, quoting=quoting, strict=True)  # type: ignore[arg-type]

    def _choose_separator(self) -> str:
        """Return the separator: the only one in the first line, or the only one that fits all rows of a sample."""
        first = next(self._file.lines(), "")
        if len(line := first.strip().strip('"')) == 5 and line.startswith("sep=") and line[4] in SEPARATORS:
            self._skipped = 1  # Excel's own way to say it
            return line[4]
        present = [separator for separator in SEPARATORS if separator in first]
        if len(present) < 2:
            return present[0] if present else ","
        fitting = [separator for separator in present if self._width(self._reader(separator), SAMPLE_ROWS) > 1]
        if len(fitting) > 1:
            names = " or ".join(SEPARATORS[separator] for separator in fitting)
            raise FileProblem(f"may be separated by {names}", "Put quotation marks around values that contain them.")
        return (fitting or present)[0]

    def _width(self, reader: Any, num_rows: int | None = None) -> int:
        """Return the number of values that all of the first rows have; 0 if they differ or cannot be read."""
        try:
            widths = {len(row) for row in islice(reader, num_rows) if row}
        except csv.Error:
            return 0
        return widths.pop() if len(widths) == 1 else 0

    def _tsv_quoting(self) -> int:
        """Return whether quotation marks are plain characters, or enclose values as in CSV.

        A writer of CSV puts marks around values that contain a mark, a tab or a new line, and doubles the marks inside.
        A file that does so everywhere, and nowhere else, was written so.

        Raises:
            FileProblem: both are possible.
        """
        marks = _count_marks(self._file.lines())
        if marks["names"]:
            return csv.QUOTE_MINIMAL
        if marks["bare"]:
            return csv.QUOTE_NONE
        if marks["plain"]:
            is_possible = {quoting: self._width(self._reader(quoting=quoting)) > 0 for quoting in _QUOTINGS}
        else:
            is_possible = dict(zip(_QUOTINGS, (marks["necessary"] > 0, not marks["necessary"]), strict=True))
            is_possible[csv.QUOTE_NONE] |= marks["needless"] > 0
        if all(is_possible.values()):
            problem = "has quotation marks that may enclose values, or be a part of them"
            remedy = f"If they enclose them, rename {self._file.file.name} to .csv; if not, save the file as .jsonl."
            raise FileProblem(problem, remedy)
        return csv.QUOTE_MINIMAL if is_possible[csv.QUOTE_MINIMAL] else csv.QUOTE_NONE

    def _ragged(self, line: int, row: Sequence[str]) -> FileProblem:
        values = "1 value" if len(row) == 1 else f"{len(row)} values"
        remedy = "Complete this row, or remove it."
        if len(row) > len(self._first_row):
            remedy = f"Put quotation marks around values with {SEPARATORS[self._separator]}, or name every column."
        return FileProblem(f"line {line} has {values}, but the first line names {len(self._first_row)}", remedy)

    def _malformed(self, error: csv.Error, first: int, line: int) -> FileProblem:
        """Return the problem of an error of Python's csv module, of a row that begins in line ``first``."""
        first, line, message = first + self._skipped, line + self._skipped, str(error)
        if "unexpected end" in message:
            return FileProblem(f"the quotation mark that opens a value in line {first} is never closed", MARK_REMEDY)
        if "expected after" in message:
            where = f" of a value that begins in line {first}" if first < line else ""
            return FileProblem(f"line {line} goes on after the closing quotation mark{where}", MARK_REMEDY)
        return FileProblem(f"line {line} cannot be read: {message}", "Repair or remove this line.")

    def _lost_rows(self, long_rows: dict[int, list[str]], name: str) -> list[str]:
        """Search values of several lines for rows that a wrong quotation mark has swallowed.

        A line of such a value looks like a row if it has a value for each column, and one of them is repeated, in rows
        of one line or in the same value, in a column of few values, such as that of the labels.

        Returns:
            A warning for values that may hold rows.
        Raises:
            FileProblem: all lines of a value but its last look like rows.
        """
        width = len(self._first_row)
        if not long_rows or width == 1:  # any line looks like a row of one column
            return []
        reader, previous, count = self._reader(), 0, 0
        counters = {position: Counter[str]() for position in range(min(width, MAX_CATEGORICAL))}
        for row in reader:
            if reader.line_num - previous == 1 and previous and len(row) == width:
                count += 1
                for position, counter in list(counters.items()):
                    counter[row[position]] += 1
                    if len(counter) > MAX_VALUES:
                        del counters[position]
            previous = reader.line_num
        suspects = list[int]()
        for line, row in long_rows.items():
            lines = self._lines_of_value(row)
            fitting = [values for values in lines if len(values) == width]
            own = {position: Counter(values[position] for values in fitting) for position in counters}
            few = [i for i in own if 2 * len(counters[i].keys() | own[i].keys()) <= count + len(fitting)]
            has_category = [any(one[i] and counters[i][one[i]] + own[i][one[i]] > 1 for i in few) for one in fitting]
            if lines and len(fitting) == len(lines) and all(has_category):
                problem = f"the quotation mark in line {line + self._skipped} swallows the rows up to line"
                remedy = 'Inside a value, a mark is written "". If its lines only look like rows, save it as .jsonl.'
                raise FileProblem(f"{problem} {line + self._skipped + len(lines)}", remedy)
            suspects += [line + self._skipped] * any(has_category)
        problem = f"{name}: a value from line {suspects[0]} has lines that look like rows" if suspects else ""
        return [f"{problem}: is a quotation mark wrong?"] if suspects else []

    def _lines_of_value(self, row: Sequence[str]) -> list[list[str]]:
        """Return the lines of a row's first value of several lines, but its last line, each divided into values."""
        position = next(i for i, value in enumerate(row) if "\n" in value or "\r" in value)
        lines = row[position].split("\n" if "\n" in row[position] else "\r")[:-1]
        divided = [next(csv.reader([line.replace("\r", " ")], delimiter=self._separator), []) for line in lines]
        return [[*row[:position], *divided[0]], *divided[1:]]


_QUOTINGS = (csv.QUOTE_MINIMAL, csv.QUOTE_NONE)


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
