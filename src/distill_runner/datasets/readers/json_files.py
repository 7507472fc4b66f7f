"""JSON files: lines of objects, a list of objects, columns, or articles in SQuAD's format. No value is converted."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from distill_runner.datasets.readers.table import FileProblem, FileRecord, FilesTable
from distill_runner.datasets.readers.text_files import TextFile

Row = dict[str, Any]
ROWS_REMEDY = "Write an object for each row: pandas' to_json(file, orient='records', lines=True)."
SQUAD_REMEDY = "It needs data[].paragraphs[].{context, qas[].{id, question, answers[].{text, answer_start}}}."


class Decimal(float):
    """A fraction of a JSON file, which is printed as it is written there: 3.10."""

    def __new__(cls, text: str) -> "Decimal":
        number = super().__new__(cls, text)
        number._text = text
        return number

    _text: str

    def __str__(self) -> str:
        return self._text

    def __reduce__(self) -> tuple[Any, ...]:
        return Decimal, (self._text,)


def _object(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=Decimal)


class JsonTable(FilesTable):
    """JSON files with the same columns: the keys of all rows, where a row may lack some.

    Args:
        files: the files by name.
        has_lines: whether the names of the files say that each line is an object.
    """

    def __init__(self, origin: str, files: Mapping[str, TextFile], has_lines: bool) -> None:
        super().__init__(origin, files)
        self._files, self._has_lines = list(files.values()), has_lines

    def rows_of(self, number: int) -> Iterator[Row]:
        record, text_file = self.records[number], self._files[number]
        record.rows, record.remarks = 0, list(text_file.remarks)
        names = dict.fromkeys(self.column_names)
        for row in self.checked(number, self._rows(text_file, record)):
            record.rows += 1
            for name in row:
                names[name] = None
            yield row
        self.column_names = list(names)

    def _rows(self, text_file: TextFile, record: FileRecord) -> Iterator[Row]:
        lines = text_file.lines()
        start = list(islice((line for line in lines if line.strip()), 2))
        if not start:
            return
        has_lines = start[0].lstrip().startswith("{") and _decoded(start[0]) is not None
        if not has_lines or (len(start) == 1 and not self._has_lines):
            text = "".join(text_file.lines())
            record.lines = text.count("\n") + (not text.endswith("\n"))
            yield from _rows_of_text(text, record)
            return
        record.lines = 0
        for line in text_file.lines():
            record.lines += 1
            if line.strip():
                yield _row(line, record.lines)


def _row(line: str, number: int) -> Row:
    try:
        row = _DECODER.decode(line.strip())
    except (ValueError, RecursionError) as error:
        raise FileProblem(f"line {number} {_reason(error)}", "Repair or remove this line.") from error
    if not isinstance(row, dict):
        raise FileProblem(f"line {number} is not an object but a {type(row).__name__}", ROWS_REMEDY)
    return row


def _rows_of_text(text: str, record: FileRecord) -> Iterator[Row]:
    """Yield the rows of a file that is not one object a line."""
    try:
        values = list(_values(text))
    except (ValueError, RecursionError) as error:
        raise FileProblem(_reason(error), "Repair the file, or write it again.") from error
    if len(values) == 1 and isinstance(values[0], dict):
        values = _rows_of_object(values[0], record)
    elif len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    for number, row in enumerate(values):
        if not isinstance(row, dict):
            raise FileProblem(f"item {number} is not an object but a {type(row).__name__}", ROWS_REMEDY)
        yield row


def _decoded(line: str) -> Any:
    """Return the JSON value of a line; None if it is not complete."""
    try:
        return _DECODER.decode(line.strip())
    except (ValueError, RecursionError):
        return None


def _values(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text, one after the other."""
    position = 0
    while (position := _after_blanks(text, position)) < len(text):
        value, position = _DECODER.raw_decode(text, position)
        yield value


def _after_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "has values that are nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"is no JSON at character {error.pos + 1}: {error.msg}"
    return str(error)


def _rows_of_object(value: Row, record: FileRecord) -> list[Any]:
    """Return the rows of a file that is one object: SQuAD's articles, a list of rows, columns, or a single row.

    Raises:
        FileProblem: the object holds several lists of rows.
    """
    if _is_squad(value):
        record.remarks.append("articles in SQuAD's format")
        return list(_squad_rows(value))
    tables = [name for name, rows in value.items() if _is_table(rows)]
    if len(tables) > 1:
        problem = f"holds several lists of rows: {', '.join(tables[:5])}"
        raise FileProblem(problem, "Save each of them as a file of its own, such as train.json.")
    if tables:
        record.remarks.append(f"the list {tables[0]!r}")
        return list(value[tables[0]])
    lists = [column for column in value.values() if isinstance(column, list)]
    if lists and len(lists) == len(value):
        if len({len(column) for column in lists}) > 1:
            raise FileProblem("holds columns of different lengths", ROWS_REMEDY)
        record.remarks.append("columns")
        return [dict(zip(value, row, strict=True)) for row in zip(*lists, strict=True)]
    mappings = [column for column in value.values() if isinstance(column, dict)]
    if mappings and len(mappings) == len(value):  # pandas' to_json
        if any(column.keys() != mappings[0].keys() for column in mappings):
            raise FileProblem("holds columns with different rows", ROWS_REMEDY)
        record.remarks.append("columns")
        return [{name: value[name][key] for name in value} for key in mappings[0]]
    return [value]


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _is_squad(value: Row) -> bool:
    articles = value.get("data")
    return isinstance(articles, list) and any(
        isinstance(article, dict) and "paragraphs" in article for article in articles
    )


def _squad_rows(value: Row) -> Iterator[Row]:
    """Yield the questions of articles in SQuAD's format, each with its context.

    Raises:
        FileProblem: an article deviates from the format.
    """
    try:
        for article in value["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    yield {
                        "id": question["id"],
                        "context": paragraph["context"],
                        "question": question["question"],
                        "answers": question.get("answers", []),
                    }
    except (KeyError, TypeError) as error:
        problem = f"is not in SQuAD's format ({type(error).__name__}: {error})"
        raise FileProblem(problem, SQUAD_REMEDY) from error
