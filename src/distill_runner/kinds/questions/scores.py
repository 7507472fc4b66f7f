"""Exact match and F1 by the rules of SQuAD 1.1 and 2.0, and of MLQA by language.

Repeats the arithmetic of the official scripts (``evaluate-v1.1.py``, ``evaluate-v2.0.py``, ``mlqa_evaluation_v1.py``).
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
    "ar": r"ال",  # the script's other alternative, a start of the text behind a space, never matches
    "zh": None,
}
"""Language -> articles that MLQA leaves out."""
LANGUAGES = tuple(ARTICLES)
_CHINESE = re.compile(r"([\u4e00-\u9fa5])")


def normalised(text: str, language: str | None = None) -> str:
    """Lower case, without punctuation and articles, single spaces.

    Args:
        language: of the context, for MLQA's rules (all of Unicode's punctuation, articles of the language, Chinese
            characters each a word); None for SQuAD's (ASCII punctuation, English articles).
    """
    text = text.lower().translate(_punctuation(language is not None))
    articles = ARTICLES["en" if language is None else language]
    if articles is not None:
        text = re.sub(articles, " ", text)
    if language == "zh":
        text = _CHINESE.sub(r" \1 ", text)
    return " ".join(text.split())


def exact_match(answer: str, golds: Sequence[str], language: str | None = None) -> float:
    """1 if the answer is one of the given ones after ``normalised``, else 0."""
    return float(normalised(answer, language) in {normalised(gold, language) for gold in golds})


def token_f1(answer: str, golds: Sequence[str], language: str | None = None, unanswerable: bool = False) -> float:
    """F1 of the words that the answer shares with a given one, the best of them.

    Args:
        unanswerable: SQuAD 2.0's rule: where one has no words, 1 if the other has none either (1.1 gives 0).
    """
    words = Counter(normalised(answer, language).split())
    return max(_f1(words, Counter(normalised(gold, language).split()), unanswerable) for gold in golds)


def question_scores(
    answers: Sequence[str], golds: Sequence[Sequence[str]], language: str | None = None, unanswerable: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Exact match and F1 of each question, (Q,) each, 0 to 1.

    With ``unanswerable`` a question without a gold answer has the empty one.
    """
    if unanswerable:
        golds = [[gold for gold in some if normalised(gold, language)] or [""] for some in golds]
    exact = [exact_match(answer, some, language) for answer, some in zip(answers, golds, strict=True)]
    f1 = [token_f1(answer, some, language, unanswerable) for answer, some in zip(answers, golds, strict=True)]
    return np.asarray(exact), np.asarray(f1)


def best_over_thresholds(
    scores: np.ndarray, answered: np.ndarray, has_answer: np.ndarray, margin: np.ndarray
) -> tuple[float, float]:
    """The highest mean score that a threshold on no answer could have given, and that threshold. Optimistic.

    ``find_best_thresh`` of SQuAD 2.0's script. The threshold is tuned on the questions that are scored.

    Args:
        scores: of each question, answered by its best span, (Q,).
        answered: whether that span has a text, (Q,).
        has_answer: of the questions, (Q,).
        margin: a question is answered if its margin of no answer is not above the threshold, (Q,).
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
