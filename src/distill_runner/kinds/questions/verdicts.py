"""Correctness and probability of answers to questions."""

import textwrap

import numpy as np

from distill_runner.kinds.questions.answers import answer_texts
from distill_runner.kinds.questions.reading import Question
from distill_runner.kinds.questions.scores import normalised
from distill_runner.kinds.questions.windows import Windows
from distill_runner.kinds.verdicts import Verdicts

NO_ANSWER = "no answer"
CONTEXT_SHOWN = 300
"""Maximum number of characters of a context that ``as_text`` shows."""


def verdicts(spans: np.ndarray, windows: Windows, exact: np.ndarray, null_threshold: float | None) -> Verdicts:
    """Return the predictions for Q questions. An answer is right if it matches a gold answer exactly.

    The probability of the truth is the sum over all kept spans that match a gold answer. Without a gold answer, it is
    the probability of "no answer".

    Args:
        spans: (Q,) of ``answers.spans_type``.
        windows: the windows of the split.
        exact: (Q,), 1 where the answer is right.
        null_threshold: as for ``answers.answer_texts``.
    """
    texts = answer_texts(spans, windows, null_threshold)

    def said(number: int) -> str:
        probability = spans["probability"][number, 0] if texts[number] else spans["null_probability"][number]
        return f"{texts[number] or NO_ANSWER} ({probability:.4f})"

    def truth(number: int) -> str:
        return " / ".join(dict.fromkeys(windows.question(number).answers)) or NO_ANSWER

    of_truth = [_of_truth(found, windows.question(number), windows.language) for number, found in enumerate(spans)]
    return Verdicts(exact.astype(bool), np.array(of_truth), said, truth)


def _of_truth(found: np.ndarray, question: Question, language: str | None) -> float:
    golds = {normalised(answer, language) for answer in question.answers}
    if not golds:
        return float(found["null_probability"])
    places = zip(found["begin"], found["end"], found["probability"], strict=True)
    return float(sum(p for begin, end, p in places if p and normalised(question.context[begin:end], language) in golds))


def as_text(question: Question) -> str:
    """Return a question with the beginning of its context."""
    return f"{question.question} ({textwrap.shorten(question.context, CONTEXT_SHOWN, placeholder=' ...')})"
