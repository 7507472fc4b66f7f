"""Answers to questions: from start and end logits to the n best spans, and the scores of the predicted texts.

Exact match and F1 follow the rules of SQuAD 1.1 and 2.0, and MLQA's rules for each language. The scores equal those of
the official scripts (``evaluate-v1.1.py``, ``evaluate-v2.0.py``, ``mlqa_evaluation_v1.py``).
"""

import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from distill_runner.tasks.questions.windows import Windows

N_BEST, MAX_ANSWER = 20, 30
TOKENS_AT_ONCE = 100_000
"""Approximate number of tokens of the windows that are searched together."""
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
    shape = (n_best,)
    return np.dtype(
        [
            ("begin", np.int32, shape),
            ("end", np.int32, shape),
            ("score", np.float32, shape),
            ("probability", np.float32, shape),
            ("null", np.float32),
            ("null_probability", np.float32),
        ]
    )


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
    spans = np.zeros(windows.num_questions, dtype=spans_dtype(n_best))
    spans["begin"] = spans["end"] = -1
    spans["score"] = -np.inf
    for first, last in _portions(windows):
        _search(spans[first:last], logits_T2, windows, first, last, n_best, max_answer)
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
    margin: np.ndarray = spans["null"] - spans["score"][:, 0]
    return margin


def _portions(windows: "Windows") -> Iterator[tuple[int, int]]:
    """Yield ranges [first, last) of questions whose windows together have about ``TOKENS_AT_ONCE`` tokens."""
    ends = windows.offsets[windows.window_offsets[1:]]
    portion = np.asarray(ends) // TOKENS_AT_ONCE
    cuts = [0, *(np.flatnonzero(np.diff(portion)) + 1).tolist(), windows.num_questions]
    yield from pairwise(cuts)


def _search(
    spans: np.ndarray, logits_T2: np.ndarray, windows: "Windows", first: int, last: int, n_best: int, max_answer: int
) -> None:
    """Fill ``spans`` with the best spans of the questions from ``first`` to ``last``, the latter excluded.

    Shapes: W windows of these questions with up to L tokens each; the k highest logits of each window.
    """
    bounds = np.asarray(windows.window_offsets[first : last + 1])
    starts = np.asarray(windows.offsets[bounds[0] : bounds[-1] + 1])
    lengths, base = np.diff(starts), starts[0]
    tokens = slice(int(base), int(starts[-1]))
    logits = np.asarray(logits_T2[tokens], dtype=np.float32)
    begins, ends, may_start = (np.asarray(array[tokens]) for array in (windows.begins, windows.ends, windows.may_start))
    token_WL = (starts[:-1] - base)[:, None] + np.arange(lengths.max())
    in_window_WL = np.arange(lengths.max()) < lengths[:, None]
    top = [_top(logits[:, side], token_WL, in_window_WL, n_best) for side in range(2)]
    start_Wkk, end_Wkk = np.broadcast_arrays(top[0][:, :, None], top[1][:, None, :])
    valid = (start_Wkk >= 0) & (end_Wkk >= start_Wkk) & (end_Wkk < start_Wkk + max_answer)
    window, start, end = np.nonzero(valid)[0], start_Wkk[valid], end_Wkk[valid]
    fits = may_start[start] & (begins[end] >= 0)
    window, start, end = window[fits], start[fits], end[fits]
    score = logits[start, 0] + logits[end, 1]
    question = np.repeat(np.arange(last - first), np.diff(bounds))[window]
    order = np.lexsort((-score, question))
    question = question[order]
    rank = np.arange(len(order)) - np.searchsorted(question, question)
    order, question, rank = (array[rank < n_best] for array in (order, question, rank))
    spans["begin"][question, rank], spans["end"][question, rank] = begins[start[order]], ends[end[order]]
    spans["score"][question, rank] = score[order]
    cls = starts[:-1] - base
    spans["null"] = np.minimum.reduceat(logits[cls].sum(axis=1), bounds[:-1] - bounds[0])


def _top(logits: np.ndarray, token_WL: np.ndarray, in_window_WL: np.ndarray, n_best: int) -> np.ndarray:
    """Return the token indices of the highest logits of each window, best first, (W, k), padded with -1."""
    values = np.where(in_window_WL, logits[np.minimum(token_WL, len(logits) - 1)], -np.inf)
    k = min(n_best, values.shape[1])
    best = np.argpartition(-values, k - 1, axis=1)[:, :k]
    best = np.take_along_axis(
        best, np.argsort(-np.take_along_axis(values, best, axis=1), axis=1, kind="stable"), axis=1
    )
    return np.where(np.take_along_axis(in_window_WL, best, axis=1), np.take_along_axis(token_WL, best, axis=1), -1)


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


def exact_match(answer: str, golds: Sequence[str], language: str | None = None) -> float:
    """Return 1 if the normalized answer equals one of the normalized ``golds``, else 0."""
    return float(normalize_answer(answer, language) in {normalize_answer(gold, language) for gold in golds})


def token_f1(answer: str, golds: Sequence[str], language: str | None = None, unanswerable: bool = False) -> float:
    """Return the F1 of the words of ``answer`` and of a gold answer, the maximum over ``golds``.

    Args:
        unanswerable: use SQuAD 2.0's rule for answers without words: 1 if both have none, else 0. SQuAD 1.1 gives 0.
    """
    words = Counter(normalize_answer(answer, language).split())
    return max(_f1(words, Counter(normalize_answer(gold, language).split()), unanswerable) for gold in golds)


def question_scores(
    answers: Sequence[str], golds: Sequence[Sequence[str]], language: str | None = None, unanswerable: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return exact match and F1 of each question, two arrays (Q,) of values from 0 to 1.

    With ``unanswerable``, the gold answer of a question without one is the empty text.
    """
    if unanswerable:
        golds = [[gold for gold in some if normalize_answer(gold, language)] or [""] for some in golds]
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
