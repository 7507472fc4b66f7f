"""CSV and TSV files. Every value is text; a row has a value for each column, or the file is refused by its line."""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any

from distill_runner.common.errors import quantity
from distill_runner.common.library_switches import allow_long_csv_fields
from distill_runner.datasets.readers.table import FileProblem, FileRecord, Reader, Row, require_distinct
from distill_runner.datasets.readers.text_files import TextFile

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
SAMPLE_ROWS = 100
"""Rows from which the separator is chosen."""
MAX_LONG_ROWS = 1000
"""Rows of several lines that are searched for lost rows."""
MAX_VALUES = 1000
"""Different values up to which a column may be one of few values."""
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
        reader, width, blank, num_long = self._reader(), len(self.names), 0, 0
        long_rows: dict[int, list[str]] = {}  # by the line in which they begin
        next(filter(None, reader), None)  # the names
        end = reader.line_num
        try:
            for row in reader:
                start, end = end + 1, reader.line_num
                if width == 1 and not row:
                    row = [""]
                elif len(row) != width and not (row and row[0].strip()) and len(row) < 2:
                    blank += 1
                    continue
                elif len(row) != width:
                    remedy, mark = "Complete this row, or remove it.", SEPARATORS[self._separator]
                    if len(row) > width:
                        remedy = f"Put quotation marks around values with {mark}, or name every column."
                    problem = f"line {end + self._skipped} has {quantity(len(row), 'value')}"
                    raise FileProblem(f"{problem}, but the first line names {width}", remedy)
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
        if width > 1:  # any line looks like a row of one column
            self._require_no_lost_rows(long_rows)
        has_own_separator, is_quoted = not self._is_tsv and self._separator != ",", self._quoting == csv.QUOTE_MINIMAL
        record.remarks += self._file.remarks
        record.remarks += [f"separated by {SEPARATORS[self._separator]}"] if has_own_separator else []
        record.remarks += ["quoted as in CSV"] if self._is_tsv and is_quoted else []
        record.remarks += [f"{quantity(num_long, 'row', ',')} of several lines"] if num_long else []
        record.remarks += [f"{quantity(blank, 'blank line', ',')} left out"] if blank else []

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
            widths = {len(row) for row in islice(reader, num_rows) if len(row) > 1 or any(map(str.strip, row))}
        except csv.Error:
            return 0
        return widths.pop() if len(widths) == 1 else 0

    def _tsv_quoting(self) -> int:
        """Return whether quotation marks are plain characters, or enclose values as in CSV.

        They enclose values if the names of all columns are in marks. They are plain if a value has a mark inside and
        none in front, which no writer of CSV makes. Otherwise, the one way is taken in which all rows fit. If both
        do, they enclose where each value in marks has doubled ones inside, as writers of CSV make them.

        Raises:
            FileProblem: all rows fit in both ways, with other values.
        """
        names = next(self._file.lines(), "").rstrip("\r\n").split("\t")
        if all(len(name) > 1 and name[0] == name[-1] == '"' for name in names):
            return csv.QUOTE_MINIMAL
        marked = (line.rstrip("\r\n").split("\t") for line in self._file.lines() if '"' in line)
        # A value of several lines ends with a mark, and has doubled ones.
        inner = (value.replace('""', "").removesuffix('"') for values in marked for value in values if value[:1] != '"')
        if any('"' in value for value in inner):
            return csv.QUOTE_NONE
        ways = csv.QUOTE_NONE, csv.QUOTE_MINIMAL
        fitting = [quoting for quoting in ways if self._width(self._reader(quoting=quoting))]
        if len(fitting) < 2:
            return fitting[0] if fitting else csv.QUOTE_NONE
        pairs = zip_longest(*(self._reader(quoting=quoting) for quoting in ways), fillvalue=[])
        changed = [other for rows in pairs for plain, other in zip_longest(*rows, fillvalue="") if plain != other]
        if not all('"' in value for value in changed):
            problem = "has quotation marks that may enclose values, or be a part of them"
            remedy = f"If they enclose them, rename {self._file.file.name} to .csv; if not, save the file as .jsonl."
            raise FileProblem(problem, remedy)
        return csv.QUOTE_MINIMAL if changed else csv.QUOTE_NONE

    def _malformed(self, error: csv.Error, first: int, line: int) -> FileProblem:
        """Return the problem of an error of Python's csv module, of a row that begins in line ``first``."""
        first, line, message = first + self._skipped, line + self._skipped, str(error)
        if "unexpected end" in message:
            return FileProblem(f"the quotation mark that opens a value in line {first} is never closed", MARK_REMEDY)
        if "expected after" in message:
            where = f" of a value that begins in line {first}" if first < line else ""
            return FileProblem(f"line {line} goes on after the closing quotation mark{where}", MARK_REMEDY)
        return FileProblem(f"line {line} cannot be read: {message}", "Repair or remove this line.")

    def _require_no_lost_rows(self, long_rows: dict[int, list[str]]) -> None:
        """Search values of several lines for rows that a wrong quotation mark has swallowed.

        A line looks like a row if it has, by the separators alone, a value for each column, and one of them is repeated
        in a column of few values, such as that of the labels. The first line goes on from the values in front of the
        mark, and the last one, with those behind it.

        Raises:
            FileProblem: all lines of a value look like rows, one of them with a value of a row of one line, or they are
                the whole file.
        """
        width, num_rows = len(self._first_row), 0
        counters = [Counter[str]() for _ in range(width)]
        for row in islice(filter(None, self._reader()), 1, None) if long_rows else ():  # without the names
            num_rows += 1
            if not re.search(r"[\r\n]", "".join(row)):
                for counter, value in zip(counters, row, strict=False):
                    if len(counter) <= MAX_VALUES:
                        counter[value] += 1
        for line, row in long_rows.items():
            position = next(i for i, value in enumerate(row) if re.search(r"[\r\n]", value))
            lines = [one.split(self._separator) for one in re.split(r"\r\n?|\n", row[position])]
            lines[0] = [*row[:position], *lines[0]]
            lines[-1] += row[position + 1 :]
            if row[position][-1] in "\r\n" or any(len(values) != width for values in lines):
                continue
            own = [Counter(column) for column in zip(*lines, strict=True)]
            sizes = [len(counters[i]) + len(own[i].keys() - counters[i].keys()) for i in range(width)]
            few = [i for i, size in enumerate(sizes) if size <= MAX_VALUES and 2 * size <= num_rows + len(lines)]
            repeated = all(any(one[i] and counters[i][one[i]] + own[i][one[i]] > 1 for i in few) for one in lines)
            if repeated and (num_rows == 1 or any(counters[i].keys() & own[i].keys() - {""} for i in few)):
                problem = f"the quotation mark in line {line + self._skipped} swallows the rows up to line"
                remedy = 'Inside a value, a mark is written "". If its lines only look like rows, save it as .jsonl.'
                raise FileProblem(f"{problem} {line + self._skipped + len(lines) - 1}", remedy)
