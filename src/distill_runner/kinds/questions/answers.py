"""Turn start and end logits into answers: the n best spans of each question, and the score of "no answer"."""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from distill_runner.kinds.questions.windows import Windows

N_BEST, MAX_ANSWER = 20, 30
TOKENS_AT_ONCE = 100_000
"""Approximate number of tokens of the windows that are searched together."""


def spans_type(n_best: int = N_BEST) -> np.dtype:
    """Return the structured dtype of the n best spans of one question, best first.

    ``begin`` and ``end`` are character offsets in the context, -1 in entries without a span. ``score`` is the sum of
    the start and end logits. ``null`` is that sum for [CLS], the minimum over the windows of the question. The
    probabilities of the spans sum to 1, including ``null_probability`` if a question may have no answer. Entries
    without a span have probability 0.
    """
    each = (n_best,)
    return np.dtype(
        [
            ("begin", np.int32, each),
            ("end", np.int32, each),
            ("score", np.float32, each),
            ("probability", np.float32, each),
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
    """Return the n best spans of every question, (Q,) of ``spans_type``.

    As in run_qa of ``transformers``, the ``n_best`` highest start and end logits of each window are paired. A span
    begins and ends in the context, and has at most ``max_answer`` tokens.

    Args:
        logits_T2: start and end logits of every token of the split.
        windows: the windows of the split.
        unanswerable: whether "no answer" is included in the probabilities.
        n_best: number of spans kept for each question.
        max_answer: maximum number of tokens of a span.
    """
    found = np.zeros(windows.num_questions, dtype=spans_type(n_best))
    found["begin"] = found["end"] = -1
    found["score"] = -np.inf
    for first, last in _portions(windows):
        _search(found[first:last], logits_T2, windows, first, last, n_best, max_answer)
    powers = np.exp(found["score"].astype(np.float64) - _highest(found, unanswerable)[:, None])
    null = np.exp(found["null"].astype(np.float64) - _highest(found, unanswerable)) * unanswerable
    total = np.maximum(powers.sum(axis=1) + null, np.finfo(np.float64).tiny)
    found["probability"], found["null_probability"] = powers / total[:, None], null / total
    return found


def answer_texts(spans: np.ndarray, windows: "Windows", null_threshold: float | None = None) -> list[str]:
    """Return the answer to each question; empty if no span was found or "no answer" is predicted.

    Args:
        spans: (Q,) of ``spans_type``.
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
    return ["" if above > null_threshold else text for text, above in zip(texts, null_margin(spans), strict=True)]


def null_margin(spans: np.ndarray) -> np.ndarray:
    """Return the score of "no answer" minus the score of the best span, (Q,)."""
    margin: np.ndarray = spans["null"] - spans["score"][:, 0]
    return margin


def _highest(found: np.ndarray, unanswerable: bool) -> np.ndarray:
    highest = np.maximum(found["score"][:, 0], found["null"] if unanswerable else -np.inf)
    return np.where(np.isfinite(highest), highest, 0).astype(np.float64)


def _portions(windows: "Windows") -> Iterator[tuple[int, int]]:
    """Yield ranges [first, last) of questions whose windows together have about ``TOKENS_AT_ONCE`` tokens."""
    ends = windows.offsets[windows.windows[1:]]
    portion = np.asarray(ends) // TOKENS_AT_ONCE
    cuts = [0, *(np.flatnonzero(np.diff(portion)) + 1).tolist(), windows.num_questions]
    yield from pairwise(cuts)


def _search(
    found: np.ndarray, logits_T2: np.ndarray, windows: "Windows", first: int, last: int, n_best: int, max_answer: int
) -> None:
    """Fill ``found`` with the best spans of the questions from ``first`` to ``last``, the latter excluded.

    Shapes: W windows of these questions with up to L tokens each; the k highest logits of each window.
    """
    bounds = np.asarray(windows.windows[first : last + 1])
    starts = np.asarray(windows.offsets[bounds[0] : bounds[-1] + 1])
    lengths, base = np.diff(starts), starts[0]
    tokens = slice(int(base), int(starts[-1]))
    logits = np.asarray(logits_T2[tokens], dtype=np.float32)
    begins, ends, may_start = (np.asarray(array[tokens]) for array in (windows.begins, windows.ends, windows.may_start))
    place_WL = (starts[:-1] - base)[:, None] + np.arange(lengths.max())
    real_WL = np.arange(lengths.max()) < lengths[:, None]
    top = [_top(logits[:, side], place_WL, real_WL, n_best) for side in range(2)]
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
    found["begin"][question, rank], found["end"][question, rank] = begins[start[order]], ends[end[order]]
    found["score"][question, rank] = score[order]
    cls = starts[:-1] - base
    found["null"] = np.minimum.reduceat(logits[cls].sum(axis=1), bounds[:-1] - bounds[0])


def _top(logits: np.ndarray, place_WL: np.ndarray, real_WL: np.ndarray, n_best: int) -> np.ndarray:
    """Return the token indices of the highest logits of each window, best first, (W, k), padded with -1."""
    values = np.where(real_WL, logits[np.minimum(place_WL, len(logits) - 1)], -np.inf)
    k = min(n_best, values.shape[1])
    best = np.argpartition(-values, k - 1, axis=1)[:, :k]
    best = np.take_along_axis(
        best, np.argsort(-np.take_along_axis(values, best, axis=1), axis=1, kind="stable"), axis=1
    )
    return np.where(np.take_along_axis(real_WL, best, axis=1), np.take_along_axis(place_WL, best, axis=1), -1)
