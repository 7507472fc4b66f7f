"""Read questions from rows in SQuAD's format, one at a time, and check each of them."""

import ast
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from distill_runner.common.errors import UserError
from distill_runner.datasets.reading.dataset import Dataset
from distill_runner.datasets.reading.folders import local_data, split_files
from distill_runner.datasets.reading.slices import parse
from distill_runner.datasets.reading.tables import rows

log = logging.getLogger(__name__)

Row = Mapping[str, Any]
MAX_CONTEXT = 10_000_000
"""Maximum number of characters of a context, which is tokenised as a whole: this many need some gigabytes."""
_NUMPY = re.compile(r"array\((\[.*?\])(, dtype=\w+)?\)", re.DOTALL)
_SQUAD_JSON = re.compile(r'(?<!\\)"paragraphs"\s*:')


@dataclass(frozen=True)
class Question:
    """A question about a context.

    Attributes:
        id: identifier in the data, else the row number from 0.
        answers, starts: each answer, and the character offset in the context where it begins (-1: the context does not
            contain it). Both are empty for an unanswerable question of SQuAD 2.0 and in a split without answers.
    """

    id: str
    question: str
    context: str
    answers: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionColumns:
    """The columns of a row of questions, and the requirements on their values.

    Attributes:
        question, context, answers: names of the columns. Answers are SQuAD's mapping of ``text`` and ``answer_start``,
            a list of such mappings (SQuAD's JSON), a text or a list of texts. In CSV files, they may also be written as
            JSON or Python text.
        split: name of the split, for messages.
        labelled: whether every question needs an answer, unless ``unanswerable``.
        unanswerable: whether questions without an answer are allowed.
        trains: whether the context must contain the first answer, because training uses its position.
    """

    question: str = "question"
    context: str = "context"
    answers: str = "answers"
    split: str = "train"
    labelled: bool = True
    unanswerable: bool = False
    trains: bool = True


def read_questions(rows: Iterable[Row], columns: QuestionColumns) -> Iterator[Question]:
    """Yield the questions of a split in order. Only the ids are kept in memory, to find duplicates.

    If an answer is not at its offset, its nearest occurrence is used; the number of such questions is logged at the
    end.

    Raises:
        UserError: a row lacks a question, a context or a required answer, or repeats the id of an earlier row; or the
            context of a training question does not contain its first answer. The message names the row.
    """
    seen: set[str] = set()
    counted: Counter[str] = Counter()
    for number, row in enumerate(rows):
        question = _question(row, number, columns, counted)
        if question.id in seen:
            problem = f"row {number} of split '{columns.split}' has the id of an earlier row, '{question.id}'"
            raise UserError("task.dataset", None, problem, "Remove duplicates, or give each question its own id.")
        seen.add(question.id)
        yield question
    for what, count in counted.items():
        log.warning("split '%s': %d of %d questions %s", columns.split, count, len(seen), what)


def squad_json(file: Path) -> Iterator[Row] | None:
    """Return the rows of a file in SQuAD's JSON format (articles, paragraphs, questions); None for other formats.

    Raises:
        UserError: the file is damaged, or deviates from the format.
    """
    with file.open(encoding="utf-8") as stream:
        if not _SQUAD_JSON.search(stream.read(2**16)):
            return None
        stream.seek(0)
        try:
            articles = json.load(stream)["data"]
            return iter(list(_rows_of(articles)))
        except (ValueError, KeyError, TypeError) as error:
            problem = f"{file} is damaged or not in SQuAD's format ({type(error).__name__}: {error})"
            remedy = "It needs data[].paragraphs[].{context, qas[].{id, question, answers[].{text, answer_start}}}."
            raise UserError("task.dataset", None, problem, remedy) from error


def question_rows(data: Dataset, split: str) -> Iterator[Row]:
    """Yield the rows of a split or of a slice of it, in any format that ``datasets`` reads or in SQuAD's JSON.

    For a slice, the whole split is read twice, the first time to count its rows.
    """
    whole, part = parse(split)
    if part is None:
        yield from _whole(data, split)
        return
    chosen = set(part.rows(sum(1 for _ in _whole(data, whole))).tolist())
    yield from (row for number, row in enumerate(_whole(data, whole)) if number in chosen)


def _whole(data: Dataset, split: str) -> Iterator[Row]:
    where, name = data.placed(split)
    folder = local_data(where)
    files = split_files(folder, name, where) if folder else []
    nested = [squad_json(file) for file in files if file.suffix == ".json"]
    if nested and all(articles is not None for articles in nested):
        return chain.from_iterable(filter(None, nested))
    return rows(data, split)


def _rows_of(articles: Any) -> Iterator[Row]:
    for article in articles:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                yield {
                    "id": asked["id"],
                    "context": paragraph["context"],
                    "question": asked["question"],
                    "answers": asked.get("answers", []),
                }


def _question(row: Row, number: int, columns: QuestionColumns, counted: Counter[str]) -> Question:
    where = f"row {number} of split '{columns.split}'"
    texts = {}
    for role, column in (("question", columns.question), ("context", columns.context)):
        value = row.get(column)
        if not isinstance(value, str) or not value.strip():
            what = "is empty" if value is None or isinstance(value, str) else f"is a {type(value).__name__}"
            raise UserError("task.columns", column, f"{where}: the {role} {what}", "Remove or repair such rows.")
        texts[column] = value
    question, context = texts[columns.question], texts[columns.context]
    if len(context) > MAX_CONTEXT:
        problem = f"{where}: the context has {len(context):,} characters, but at most {MAX_CONTEXT:,} are read"
        raise UserError("task.columns", columns.context, problem, "Divide it into several contexts.")
    answers, starts = _answers(row.get(columns.answers), row.get("answer_start"), columns, where)
    identity = row.get("id")
    name = str(number) if identity is None or identity == "" else str(identity)
    if columns.labelled and not answers and not columns.unanswerable:
        problem = f"{where} has no answer (question '{name}'), but every question of this task must have one"
        raise UserError("task.unanswerable", False, problem, "task.unanswerable=true (as in SQuAD 2.0), or remove it.")
    placed = tuple(_place(context, text, start) for text, start in zip(answers, starts, strict=True))
    if any(start is not None and start != at >= 0 for start, at in zip(starts, placed, strict=True)):
        counted["have an answer that is not at its offset: its nearest occurrence is used"] += 1
    if columns.trains and placed and placed[0] < 0:
        problem = f"{where}: the context of question '{name}' does not contain the answer '{answers[0][:60]}'"
        raise UserError("task.label", columns.answers, problem, "Answers are parts of the context: repair or remove.")
    return Question(name, question, context, answers, placed)


def _place(context: str, text: str, start: int | None) -> int:
    """Return the offset of ``text``: ``start`` if it is there, else its nearest occurrence, else -1."""
    if start is not None and start >= 0 and context.startswith(text, start):
        return start
    at = max(0, start or 0)
    before, behind = context.rfind(text, 0, at + len(text)), context.find(text, at)
    if min(before, behind) < 0:
        return max(before, behind)
    return before if at - before <= behind - at else behind


def _answers(
    value: Any, start: Any, columns: QuestionColumns, where: str
) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """Return texts and offsets of answers, None for a missing offset; empty texts ("no answer" in CSV) are dropped."""
    value = _parsed(value) if isinstance(value, str) else str(value) if isinstance(value, int | float) else value
    try:
        if isinstance(value, Mapping):
            texts, starts = value["text"], value.get("answer_start")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            texts, starts = [one["text"] for one in value], [one.get("answer_start") for one in value]
        else:
            texts, starts = value, start
        texts = [] if texts is None else [texts] if isinstance(texts, str) else list(texts)
        starts = starts if isinstance(starts, list | tuple) else [starts] * len(texts)
        pairs = [
            (text, None if at is None or at == "" else int(at)) for text, at in zip(texts, starts, strict=True) if text
        ]
        if not all(isinstance(text, str) for text, _ in pairs):
            raise TypeError("an answer is not a text")
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{where}: the answers cannot be read ({type(error).__name__}: {error})"
        remedy = "Write {'text': [...], 'answer_start': [...]}, or the text of one answer and a column answer_start."
        raise UserError("task.label", columns.answers, problem, remedy) from error
    return tuple(text for text, _ in pairs), tuple(at for _, at in pairs)


def _parsed(text: str) -> Any:
    """Return the mapping or list that ``text`` represents in JSON or as printed by Python and pandas, else ``text``."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    for read in (json.loads, lambda text: ast.literal_eval(_NUMPY.sub(r"\1", text))):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text
