"""Questions: how they are read from rows in SQuAD's format and checked, and the options of their windows."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from distill_runner.common.assumptions import Assumption
from distill_runner.common.errors import UserError
from distill_runner.common.schema import Schema
from distill_runner.datasets.readers.dataset import BY_CLASS, Dataset, parse_split
from distill_runner.datasets.readers.table import is_missing
from distill_runner.datasets.readers.tables import read_rows
from distill_runner.tasks.printed import printed_value

log = logging.getLogger(__name__)

Row = Mapping[str, Any]
MAX_CONTEXT = 10_000_000
"""Maximum number of characters of a context, which is tokenized in one piece: this many need some gigabytes."""


class Windowing(Schema):
    """How a context that is longer than a window is divided into windows.

    Args:
        stride: meaning of ``tokens``. With ``overlap``, neighboring windows share ``tokens`` tokens (fast tokenizers,
            run_qa of ``transformers``). With ``step``, each window begins ``tokens`` tokens after the previous one (the
            old run_squad, from the time of the papers). A token can then start an answer only in the window where the
            token has most context.
        tokens: number of tokens shared by two windows or between their starts, see ``stride``; 128 in Pro-KD.
        max_question: maximum number of tokens of a question, longer questions are truncated; 64 in run_squad. A
            question never takes more than half of a window.
    """

    stride: Annotated[
        Literal["overlap", "step"],
        Assumption("today's run_qa lets windows overlap; in the papers' time, run_squad used a step", "Pro-KD"),
    ] = "overlap"
    tokens: int = Field(128, ge=1)
    max_question: int | None = Field(None, ge=1)

    def step(self, capacity: int) -> int:
        """Return the tokens between the starts of two windows, each with ``capacity`` tokens of context.

        It is at least a quarter of ``capacity``.
        """
        step = self.tokens if self.stride == "step" else capacity - self.tokens
        return min(max(step, capacity // 4, 1), capacity)


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
        labeled: whether every question needs an answer, unless ``unanswerable``.
        unanswerable: whether questions without an answer are allowed.
        trains: whether the context must contain the first answer, because training uses its position.
    """

    question: str = "question"
    context: str = "context"
    answers: str = "answers"
    split: str = "train"
    labeled: bool = True
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
    ids: set[str] = set()
    remarks: Counter[str] = Counter()
    for number, row in enumerate(rows):
        question = _question(row, number, columns, remarks)
        if question.id in ids:
            problem = f"row {number} of split '{columns.split}' has the id of an earlier row, '{question.id}'"
            raise UserError("task.dataset", None, problem, "Remove duplicates, or give each question its own id.")
        ids.add(question.id)
        yield question
    for remark, count in remarks.items():
        log.warning("split '%s': %d of %d questions %s", columns.split, count, len(ids), remark)


def question_rows(data: Dataset, split: str) -> Iterator[Row]:
    """Yield the rows of a split or of a slice of it, in any format of data files; in SQuAD's JSON, the questions.

    For a slice, the full split is read twice, the first time to count its rows.
    """
    name, part = parse_split(split)
    if part is None:
        yield from read_rows(data, split)
        return
    if part.order == BY_CLASS:
        problem = "is a slice by class, but questions have no classes"
        raise UserError(data.split_key(split), split, problem, "Use train[~:90%], in random order.")
    selected = set(part.rows(sum(1 for _ in read_rows(data, name))).tolist())
    yield from (row for number, row in enumerate(read_rows(data, name)) if number in selected)


def _question(row: Row, number: int, columns: QuestionColumns, remarks: Counter[str]) -> Question:
    where = f"row {number} of split '{columns.split}'"
    texts = {}
    for role, column in (("question", columns.question), ("context", columns.context)):
        value = row.get(column)
        if not isinstance(value, str) or not value.strip():
            fault = "is empty" if value is None or isinstance(value, str) else f"is a {type(value).__name__}"
            raise UserError("task.columns", column, f"{where}: the {role} {fault}", "Remove or repair such rows.")
        texts[column] = value
    question, context = texts[columns.question], texts[columns.context]
    if len(context) > MAX_CONTEXT:
        problem = f"{where}: the context has {len(context):,} characters, but at most {MAX_CONTEXT:,} are read"
        raise UserError("task.columns", columns.context, problem, "Divide it into several contexts.")
    answers, starts = _answers(row.get(columns.answers), row.get("answer_start"), columns, where)
    if answers and row.get("is_impossible") in (True, "True", "true"):
        problem = f"{where} has the answer '{answers[0][:60]}', but is_impossible says that there is none"
        raise UserError("task.label", columns.answers, problem, "Remove the answer, or the column is_impossible.")
    identity = row.get("id")
    name = str(number) if identity is None or identity == "" else str(identity)
    if columns.labeled and not answers and not columns.unanswerable:
        problem = f"{where} has no answer (question '{name}'), but every question of this task must have one"
        raise UserError("task.unanswerable", False, problem, "task.unanswerable=true (as in SQuAD 2.0), or remove it.")
    offsets = tuple(_offset(context, text, start) for text, start in zip(answers, starts, strict=True))
    if any(start is not None and start != offset >= 0 for start, offset in zip(starts, offsets, strict=True)):
        remarks["have an answer that is not at its offset: its nearest occurrence is used"] += 1
    if columns.trains and offsets and offsets[0] < 0:
        problem = f"{where}: the context of question '{name}' does not contain the answer '{answers[0][:60]}'"
        raise UserError("task.label", columns.answers, problem, "Answers are parts of the context: repair or remove.")
    return Question(name, question, context, answers, offsets)


def _offset(context: str, text: str, start: int | None) -> int:
    """Return the offset of ``text``: ``start`` if it is there, else its nearest occurrence, else -1."""
    if start is not None and start >= 0 and context.startswith(text, start):
        return start
    center = max(0, start or 0)
    previous, following = context.rfind(text, 0, center + len(text)), context.find(text, center)
    if min(previous, following) < 0:
        return max(previous, following)
    return previous if center - previous <= following - center else following


def _answers(
    value: Any, start: Any, columns: QuestionColumns, where: str
) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """Return texts and offsets of answers, None for a missing offset; empty texts ("no answer" in CSV) are dropped."""
    if is_missing(value):
        value = None
    elif isinstance(value, str):
        parsed = printed_value(value)
        value = value if parsed is None else parsed
    elif isinstance(value, int | float):
        value = str(value)
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
            (text, None if offset is None or offset == "" else int(offset))
            for text, offset in zip(texts, starts, strict=True)
            if text
        ]
        if not all(isinstance(text, str) for text, _ in pairs):
            raise TypeError("an answer is not a text")
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{where}: the answers cannot be read ({type(error).__name__}: {error})"
        remedy = "Write {'text': [...], 'answer_start': [...]}, or the text of one answer and a column answer_start."
        raise UserError("task.label", columns.answers, problem, remedy) from error
    return tuple(text for text, _ in pairs), tuple(offset for _, offset in pairs)
