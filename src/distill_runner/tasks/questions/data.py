"""Questions: how they are read from rows in SQuAD's format and checked, and the options of their windows."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import Field

from distill_runner.common.errors import UserError, override
from distill_runner.common.schema import Assumption, Schema
from distill_runner.datasets.readers.table import is_missing
from distill_runner.tasks.columns import is_blank, printed_value

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
class QuestionExamples:
    """Questions that can be read repeatedly; ``language`` selects MLQA's rules of scoring, None those of SQuAD."""

    read: Callable[[], Iterator[Question]]
    labeled: bool
    language: str | None = None

    def __iter__(self) -> Iterator[Question]:
        return self.read()

    def __len__(self) -> int:
        """Read all questions, and return their number."""
        return sum(1 for _ in self)

    def first(self, count: int) -> "QuestionExamples":
        """Return the first questions."""
        return replace(self, read=lambda: islice(self.read(), count))


def read_questions(
    rows: Iterable[Row],
    columns: Sequence[str] = ("question", "context", "answers"),
    split: str = "train",
    needs_answers: bool = True,
    trains: bool = True,
) -> Iterator[Question]:
    """Yield the questions of a split in order. Only the ids are kept in memory, to find duplicates.

    If an answer is not at its offset, its nearest occurrence is used, and without one the first; the numbers of such
    questions are logged at the end.

    Args:
        columns: names of the columns of questions, contexts and answers. Answers are SQuAD's mapping of ``text`` and
            ``answer_start``, a list of such mappings (SQuAD's JSON), a text or a list of texts. In CSV files, they may
            also be written as JSON or Python text.
        split: name of the split, for messages.
        needs_answers: whether every question needs an answer.
        trains: whether the context must contain the first answer, because training uses its position.
    Raises:
        UserError: a row lacks a question, a context or a required answer, or repeats the id of an earlier row; or the
            context of a training question does not contain its first answer. The message names the row.
    """
    of_answers = columns[2]
    ids, num_moved, num_first = set[str](), 0, 0
    for number, row in enumerate(rows):
        where = f"row {number} of split '{split}'"
        texts: list[Any] = [row.get(column) for column in columns[:2]]
        question, context = texts
        for column, text in zip(columns, texts, strict=False):
            if not isinstance(text, str) or not text.strip():
                raise UserError("task.columns", column, f"{where} has no text", "Remove or repair such rows.")
            if len(text) > MAX_CONTEXT:
                problem = f"{where} has {len(text):,} characters, but at most {MAX_CONTEXT:,} are read"
                raise UserError("task.columns", column, problem, "Divide it into several contexts.")
        name = str(number if is_blank(row.get("id")) else row["id"])
        if name in ids:
            problem = f"{where} has the id of an earlier row, '{name}'"
            raise UserError("task.dataset", None, problem, "Remove duplicates, or give each question its own id.")
        ids.add(name)
        answers = _answers(row.get(of_answers), row.get("answer_start"), of_answers, where)
        if answers and str(row.get("is_impossible")).casefold() in ("true", "1", "1.0", "yes"):
            problem = f"{where} has the answer '{answers[0][0][:60]}', but is_impossible says that there is none"
            raise UserError("task.label", of_answers, problem, "Remove the answer, or the column is_impossible.")
        if needs_answers and not answers:
            problem = f"{where} has no answer (question '{name}'), but every question of this task must have one"
            remedy: str = override("task.unanswerable", True) + " (as in SQuAD 2.0), or remove it."
            raise UserError("task.unanswerable", False, problem, remedy)
        offsets = tuple(_offset(context, text, start) for text, start in answers)
        places = [(*answer, offset) for answer, offset in zip(answers, offsets, strict=True)]
        num_moved += any(start is not None and start != offset >= 0 for _, start, offset in places)
        num_first += trains and any(start is None and context.count(text) > 1 for text, start in answers[:1])
        if trains and offsets and offsets[0] < 0:
            problem = f"{where}: the context of question '{name}' does not contain the answer '{answers[0][0][:60]}'"
            raise UserError("task.label", of_answers, problem, "Answers are parts of the context: repair or remove.")
        yield Question(name, question, context, tuple(text for text, _ in answers), offsets)
    problem = "questions have an answer that is not at its offset: its nearest occurrence is used"
    other = "questions have no answer_start, and an answer that occurs several times: its first occurrence is used"
    for count, text in ((num_moved, problem), (num_first, other)):
        if count:
            log.warning("split '%s': %d of %d %s", split, count, len(ids), text)


def _offset(context: str, text: str, start: int | None) -> int:
    """Return the offset of ``text``: ``start`` if it is there, else its nearest occurrence, else -1."""
    if start is not None and start >= 0 and context.startswith(text, start):
        return start
    center = max(0, start or 0)
    previous, following = context.rfind(text, 0, center + len(text)), context.find(text, center)
    if min(previous, following) < 0:
        return max(previous, following)
    return previous if center - previous <= following - center else following


def _answers(value: Any, start: Any, column: str, where: str) -> list[tuple[str, int | None]]:
    """Return texts and offsets of answers, None for a missing offset; empty texts ("no answer" in CSV) are dropped."""
    parsed = [printed_value(cell) if isinstance(cell, str) else None for cell in (value, start)]
    value, start = (cell if own is None else own for cell, own in zip((value, start), parsed, strict=True))
    try:
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            value = {"text": [one["text"] for one in value], "answer_start": [one.get("answer_start") for one in value]}
        if isinstance(value, Mapping):
            value, start = value["text"], value.get("answer_start")
        texts = [] if is_missing(value) else [str(value)] if isinstance(value, str | int | float) else list(value)
        starts = start if isinstance(start, list | tuple) else [start] * len(texts)
        pairs = [
            (text, None if is_blank(offset) else int(float(offset)))
            for text, offset in zip(texts, starts, strict=True)
            if text
        ]
        if not all(isinstance(text, str) for text, _ in pairs):
            raise TypeError("an answer is not a text")
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{where}: the answers cannot be read ({type(error).__name__}: {error})"
        remedy = "Write {'text': [...], 'answer_start': [...]}, or the text of one answer and a column answer_start."
        raise UserError("task.label", column, problem, remedy) from error
    return pairs
