"""Answers to questions: from start and end logits to the n best spans, and the scores of the predicted texts.

Exact match and F1 follow the rules of SQuAD 1.1 and 2.0, and MLQA's rules for each language. The scores equal those of
the official scripts (``evaluate-v1.1.py``, ``evaluate-v2.0.py``, ``mlqa_evaluation_v1.py``).
"""

import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from distill_runner.tasks.questions.windows import Windows

N_BEST, MAX_ANSWER = 20, 30
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


def spans_dtype(n_best: int = N_BEST) -> np.dtype:
    """Return the structured dtype of the n best spans of one question, best first.

    ``begin`` and ``end`` are character offsets in the context, -1 in entries without a span. ``score`` is the sum of
    the start and end logits. ``null`` is that sum for [CLS], the minimum over the windows of the question. The
    probabilities of the spans sum to 1, including ``null_probability`` if a question may have no answer. Entries
    without a span have probability 0.
    """
    kinds = {"begin": np.int32, "end": np.int32, "score": np.float32, "probability": np.float32}
    of_question = [("null", np.float32), ("null_probability", np.float32)]
    return np.dtype([*((name, kind, (n_best,)) for name, kind in kinds.items()), *of_question])


def best_spans(
    logits_T2: np.ndarray,
    windows: "Windows",
    unanswerable: bool = False,
    n_best: int = N_BEST,
    max_answer: int = MAX_ANSWER,
) -> np.ndarray:
    """Return the n best spans of every question, (Q,) of ``spans_dtype``.

    As in run_qa of ``transformers``, the ``n_best`` highest start and end logits of each window are paired. A span
    begins and ends in the context, and has at most ``max_answer`` tokens.

    Args:
        logits_T2: start and end logits of every token of the split.
        windows: the windows of the split.
        unanswerable: whether "no answer" is included in the probabilities.
        n_best: number of spans kept for each question.
        max_answer: maximum number of tokens of a span.
    """
    spans = np.zeros(windows.num_examples, dtype=spans_dtype(n_best))
    spans["begin"] = spans["end"] = -1
    spans["score"], spans["null"] = -np.inf, np.inf
    files = windows.begins, windows.ends, windows.may_start, windows.offsets
    begins_T, ends_T, may_start_T, offsets = map(np.asarray, files)
    for question, (first, last) in enumerate(pairwise(np.asarray(windows.window_offsets).tolist())):
        candidates = []
        for tokens in map(slice, offsets[first:last], offsets[first + 1 : last + 1]):
            logits_2L = np.asarray(logits_T2[tokens], dtype=np.float32).T
            begins, top = begins_T[tokens], np.argsort(-logits_2L, axis=1, kind="stable")[:, :n_best]
            start, end = (side.ravel() for side in np.meshgrid(*top, indexing="ij"))
            is_valid = (end >= start) & (end < start + max_answer) & may_start_T[tokens][start] & (begins[end] >= 0)
            start, end = start[is_valid], end[is_valid]
            candidates.append((begins[start], ends_T[tokens][end], logits_2L[0, start] + logits_2L[1, end]))
            spans["null"][question] = min(spans["null"][question], logits_2L[:, 0].sum())
        columns = [np.concatenate(column) for column in zip(*candidates, strict=True)]
        best = np.argsort(-columns[2], kind="stable")[:n_best]
        for name, column in zip(("begin", "end", "score"), columns, strict=True):
            spans[name][question, : len(best)] = column[best]
    highest_Q = np.maximum(spans["score"][:, 0], spans["null"] if unanswerable else -np.inf)
    highest_Q = np.where(np.isfinite(highest_Q), highest_Q, 0).astype(np.float64)
    powers = np.exp(spans["score"].astype(np.float64) - highest_Q[:, None])
    null = np.exp(spans["null"].astype(np.float64) - highest_Q) * unanswerable
    total = np.maximum(powers.sum(axis=1) + null, np.finfo(np.float64).tiny)
    spans["probability"], spans["null_probability"] = powers / total[:, None], null / total
    return spans


def answer_texts(spans: np.ndarray, windows: "Windows", null_threshold: float | None = None) -> list[str]:
    """Return the answer to each question; empty if there is no span or "no answer" is predicted.

    Args:
        spans: (Q,) of ``spans_dtype``.
        windows: the windows of the split.
        null_threshold: "no answer" is predicted if its score exceeds the score of the best span by more than this
            (run_qa's ``null_score_diff_threshold``). None always predicts the best span.
    """
    texts = [
        windows.question(number).context[begin:end] if begin >= 0 else ""
        for number, (begin, end) in enumerate(zip(spans["begin"][:, 0], spans["end"][:, 0], strict=True))
    ]
    if null_threshold is None:
        return texts
    return ["" if margin > null_threshold else text for text, margin in zip(texts, null_margin(spans), strict=True)]


def null_margin(spans: np.ndarray) -> np.ndarray:
    """Return the score of "no answer" minus the score of the best span, (Q,)."""
    return spans["null"] - spans["score"][:, 0]


def normalize_answer(text: str, language: str | None = None) -> str:
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


def question_scores(
    answers: Sequence[str], golds: Sequence[Sequence[str]], language: str | None = None, unanswerable: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return exact match and F1 of the words of each question, two arrays (Q,) of values from 0 to 1.

    Both are the highest over the gold answers. With ``unanswerable``, the rules are those of SQuAD 2.0: the gold answer
    of a question without one is the empty text, and an answer without words scores 1 if the gold answer has none.
    """
    exact, f1 = np.zeros(len(answers)), np.zeros(len(answers))
    for number, (answer, texts) in enumerate(zip(answers, golds, strict=True)):
        words = normalize_answer(answer, language).split()
        options = [normalize_answer(text, language).split() for text in texts]
        if unanswerable:
            options = [option for option in options if option] or [[]]
        for option in options:
            shared = (Counter(words) & Counter(option)).total()
            is_equal = words == option
            if unanswerable and not (words and option):
                score = float(is_equal)
            else:
                precision, recall = shared / max(len(words), 1), shared / max(len(option), 1)
                score = 2 * precision * recall / (precision + recall) if shared else 0.0
            exact[number], f1[number] = max(exact[number], is_equal), max(f1[number], score)
    return exact, f1


def best_over_thresholds(scores: np.ndarray, answered: np.ndarray, has_answer: np.ndarray, margin: np.ndarray) -> float:
    """Return the highest mean score over all thresholds for "no answer".

    ``find_best_thresh`` of SQuAD 2.0's script finds the same. The score is optimistic: the threshold is tuned on the
    questions that are scored.

    Args:
        scores: (Q,), score of each question if it is answered by its best span.
        answered: (Q,), whether the best span has a text.
        has_answer: (Q,), whether the question has a gold answer.
        margin: (Q,), ``null_margin``; a question is answered if its margin is not above the threshold.
    """
    gain = np.where(has_answer, scores, np.where(answered, -1.0, 0.0))[np.argsort(margin, kind="stable")]
    reached = np.concatenate([[0.0], np.cumsum(gain)]) + (~has_answer).sum()
    return float(reached.max() / len(scores))


@cache
def _punctuation(unicode: bool) -> dict[int, None]:
    codes = {ord(character) for character in string.punctuation}
    if unicode:
        codes |= {code for code in range(sys.maxunicode) if unicodedata.category(chr(code)).startswith("P")}
    return dict.fromkeys(codes)
