"""JSON files: lines of objects, a list of objects, columns, or articles in SQuAD's format. No value is converted."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from distill_runner.datasets.readers.table import FileProblem, FileRecord, Reader, Row
from distill_runner.datasets.readers.text_files import TextFile

ROWS_REMEDY = "Write an object for each row: pandas' to_json(file, orient='records', lines=True)."
SQUAD_REMEDY = "It needs data[].paragraphs[].{context, qas[].{id, question, answers[].{text, answer_start}}}."


class Decimal(float):
    """A fraction of a JSON file, which is printed as it is written there: 3.10."""

    _text: str

    def __new__(cls, text: str) -> "Decimal":
        number = super().__new__(cls, text)
        number._text = text
        return number

    def __str__(self) -> str:
        return self._text


def _object(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=Decimal)


class JsonReader(Reader):
    """A JSON file; its columns are the keys of all rows, where a row may lack some.

    Args:
        has_lines: whether the name of the file says that each line is an object.
    """

    def __init__(self, text_file: TextFile, has_lines: bool) -> None:
        self._file, self._has_lines = text_file, has_lines

    def rows(self, record: FileRecord, names: Sequence[str] | None) -> Iterator[Row]:
        record.remarks += self._file.remarks
        start = list(islice((line for line in self._file.lines() if line.strip()), 2))
        record.lines = 0
        if start and self._is_lines(start):
            for line in self._file.lines():
                record.lines += 1
                if line.strip():
                    value = _decode(line, f"line {record.lines} ", "Repair or remove this line.")
                    yield _checked_row(value, f"line {record.lines}")
        elif start:
            text = "".join(self._file.lines())
            record.lines = text.count("\n") + (not text.endswith("\n"))
            value = _decode(text, "", "Repair the file, or write it again.")
            for number, row in enumerate(_rows_of_object(value, record) if isinstance(value, dict) else value):
                yield _checked_row(row, f"item {number}")

    def _is_lines(self, start: list[str]) -> bool:
        """Return whether each line is an object: the first is one, and it is not all of a ``.json`` file."""
        try:
            return isinstance(_DECODER.decode(start[0].strip()), dict) and (self._has_lines or len(start) > 1)
        except (ValueError, RecursionError):
            return False


def _decode(text: str, place: str, remedy: str) -> Any:
    try:
        value = _DECODER.decode(text.strip())
    except RecursionError as error:
        raise FileProblem(f"{place}has values that are nested too deeply", remedy) from error
    except json.JSONDecodeError as error:
        raise FileProblem(f"{place}is no JSON at character {error.pos + 1}: {error.msg}", remedy) from error
    except ValueError as error:
        raise FileProblem(f"{place}{error}", remedy) from error
    return value if isinstance(value, dict | list) or place else [value]


def _checked_row(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise FileProblem(f"{place} is not an object but a {type(row).__name__}", ROWS_REMEDY)
    return row


def _rows_of_object(value: Row, record: FileRecord) -> list[Any]:
    """Return the rows of a file that is one object: SQuAD's articles, a list of rows, columns, or a single row.

    Raises:
        FileProblem: the object holds several lists of rows.
    """
    articles = value.get("data")
    if isinstance(articles, list) and any(isinstance(item, dict) and "paragraphs" in item for item in articles):
        record.remarks.append("articles in SQuAD's format")
        return _squad_rows(articles)
    columns = list(value.values())
    tables = [
        name for name, rows in value.items() if rows and isinstance(rows, list) and all(type(r) is dict for r in rows)
    ]
    if len(tables) > 1:
        problem = f"holds several lists of rows: {', '.join(tables[:5])}"
        raise FileProblem(problem, "Save each of them as a file of its own, such as train.json.")
    if tables:
        record.remarks.append(f"the list {tables[0]!r}")
        return list(value[tables[0]])
    if columns and all(isinstance(column, list) for column in columns):
        columns = [dict(enumerate(column)) for column in columns]
    if columns and all(isinstance(column, dict) for column in columns):  # as pandas' to_json writes them
        if any(column.keys() != columns[0].keys() for column in columns):
            raise FileProblem("holds columns of different lengths", ROWS_REMEDY)
        record.remarks.append("columns")
        return [dict(zip(value, (column[key] for column in columns), strict=True)) for key in columns[0]]
    return [value]


def _squad_rows(articles: list[Any]) -> list[Row]:
    """Return the questions of articles in SQuAD's format, each with its context."""
    try:
        return [
            {
                "id": question["id"],
                "context": paragraph["context"],
                "question": question["question"],
                "answers": question.get("answers", []),
            }
            for article in articles
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
        ]
    except (KeyError, TypeError) as error:
        problem = f"is not in SQuAD's format ({type(error).__name__}: {error})"
        raise FileProblem(problem, SQUAD_REMEDY) from error
