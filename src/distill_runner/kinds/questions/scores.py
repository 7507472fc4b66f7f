"""Exact match and F1 by the rules of SQuAD 1.1 and 2.0, and by MLQA's rules for each language.

The scores equal those of the official scripts (``evaluate-v1.1.py``, ``evaluate-v2.0.py``, ``mlqa_evaluation_v1.py``).
"""

import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np

ARTICLES = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "hi": None,
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "ar": r"ال",  # the script has one more alternative, which never matches: a space before the start of the text
    "zh": None,
}
"""Language -> regular expression of the articles that MLQA removes; None if there are none."""
LANGUAGES = tuple(ARTICLES)
_CHINESE = re.compile(r"([\u4e00-\u9fa5])")


def normalised(text: str, language: str | None = None) -> str:
    """Return ``text`` in lower case, without punctuation and articles, with single spaces.

    Args:
        language: language of the context for MLQA's rules: Unicode punctuation, articles of the language, and each
            Chinese character as a word. None uses SQuAD's rules: ASCII punctuation and English articles.
    """
    text = text.lower().translate(_punctuation(language is not None))
    articles = ARTICLES["en" if language is None else language]
    if articles is not None:
        text = re.sub(articles, " ", text)
    if language == "zh":
        text = _CHINESE.sub(r" \1 ", text)
    return " ".join(text.split())


def exact_match(answer: str, golds: Sequence[str], language: str | None = None) -> float:
    """Return 1 if the normalised answer equals one of the normalised ``golds``, else 0."""
    return float(normalised(answer, language) in {normalised(gold, language) for gold in golds})


def token_f1(answer: str, golds: Sequence[str], language: str | None = None, unanswerable: bool = False) -> float:
    """Return the F1 of the words of ``answer`` and of a gold answer, the maximum over ``golds``.

    Args:
        unanswerable: use SQuAD 2.0's rule for answers without words: 1 if both have none, else 0. SQuAD 1.1 gives 0.
    """
    words = Counter(normalised(answer, language).split())
    return max(_f1(words, Counter(normalised(gold, language).split()), unanswerable) for gold in golds)


def question_scores(
    answers: Sequence[str], golds: Sequence[Sequence[str]], language: str | None = None, unanswerable: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return exact match and F1 of each question, two arrays (Q,) of values from 0 to 1.

    With ``unanswerable``, the gold answer of a question without one is the empty text.
    """
    if unanswerable:
        golds = [[gold for gold in some if normalised(gold, language)] or [""] for some in golds]
    exact = [exact_match(answer, some, language) for answer, some in zip(answers, golds, strict=True)]
    f1 = [token_f1(answer, some, language, unanswerable) for answer, some in zip(answers, golds, strict=True)]
    return np.asarray(exact), np.asarray(f1)


def best_over_thresholds(
    scores: np.ndarray, answered: np.ndarray, has_answer: np.ndarray, margin: np.ndarray
) -> tuple[float, float]:
    """Return the highest mean score over all thresholds for "no answer", and the best threshold.

    This is ``find_best_thresh`` of SQuAD 2.0's script. The score is optimistic: the threshold is tuned on the same
    questions that are scored.

    Args:
        scores: (Q,), score of each question if it is answered by its best span.
        answered: (Q,), whether the best span has a text.
        has_answer: (Q,), whether the question has a gold answer.
        margin: (Q,), ``null_margin``; a question is answered if its margin is not above the threshold.
    """
    order = np.argsort(margin, kind="stable")
    gain = np.where(has_answer, scores, np.where(answered, -1.0, 0.0))[order]
    reached = np.concatenate([[0.0], np.cumsum(gain)]) + (~has_answer).sum()
    best = int(reached.argmax())
    return float(reached[best] / len(scores)), 0.0 if best == 0 else float(margin[order[best - 1]])


def _f1(answer: Counter[str], gold: Counter[str], unanswerable: bool) -> float:
    if unanswerable and not (answer and gold):
        return float(answer == gold)
    shared = (answer & gold).total()
    if not shared:
        return 0.0
    precision, recall = shared / answer.total(), shared / gold.total()
    return 2 * precision * recall / (precision + recall)


@cache
def _punctuation(unicode: bool) -> dict[int, None]:
    codes = {ord(character) for character in string.punctuation}
    if unicode:
        codes |= {code for code in range(sys.maxunicode) if unicodedata.category(chr(code)).startswith("P")}
    return dict.fromkeys(codes)
