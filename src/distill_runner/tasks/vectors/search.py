"""Exact search by cosine, and the scores of a ranking: nDCG, reciprocal rank and recall, as trec_eval defines them.

Shapes: Q queries, D documents, vectors of C numbers, the first K documents of a ranking.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from distill_runner.datasets.metrics import NonFiniteOutputs

BLOCK = (256, 16384)
"""Queries and documents that are compared at once: 16 MiB of cosines."""
DEPTH = 100
"""Documents of a ranking that are kept; one more is searched, since a document may be left out."""


@dataclass(frozen=True)
class Judgments:
    """Relevant documents of each query.

    Attributes:
        relevance: (M, 3), number of the query, number of the document, and relevance.
        excluded: (Q,), number of the document that is left out of a query's ranking, as BEIR does with a document that
            has the id of the query; -1 if there is none.
    """

    relevance: np.ndarray
    excluded: np.ndarray

    def by_query(self) -> Iterator[tuple[int, dict[int, int]]]:
        """Yield each query that has a relevant document, with the relevance of its judged documents."""
        by_number: dict[int, dict[int, int]] = {}
        for query, document, relevance in self.relevance.tolist():
            by_number.setdefault(query, {})[document] = relevance
        for query, documents in sorted(by_number.items()):
            if any(relevance > 0 for relevance in documents.values()):
                yield query, documents


def unit_vectors(vectors_NC: np.ndarray) -> np.ndarray:
    """Return the vectors divided by their lengths, in float32; a vector of length 0 stays 0.

    Raises:
        NonFiniteOutputs: a number is infinite or not a number.
    """
    vectors = np.asarray(vectors_NC, dtype=np.float32)
    if not np.isfinite(vectors).all():
        raise NonFiniteOutputs("some vectors are not finite: the model has diverged")
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)


def nearest(
    queries_QC: np.ndarray, documents_DC: np.ndarray, count: int, block: tuple[int, int] = BLOCK
) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers and cosines of the nearest documents of each query, best first: two arrays (Q, K).

    Every document is compared. Of equal cosines, the document with the smaller number comes first.
    """
    queries, documents = unit_vectors(queries_QC), unit_vectors(documents_DC)
    depth = min(count, len(documents))
    numbers, values = (np.zeros((len(queries), depth), dtype) for dtype in (np.int64, np.float32))
    for first in range(0, len(queries), block[0]):
        part = slice(first, first + block[0])
        best_numbers: np.ndarray = np.zeros((len(queries[part]), 0), dtype=np.int64)
        best: np.ndarray = np.zeros((len(queries[part]), 0), dtype=np.float32)
        for start in range(0, len(documents), block[1]):
            cosines = queries[part] @ documents[start : start + block[1]].T
            candidates = np.broadcast_to(np.arange(start, start + cosines.shape[1]), cosines.shape)
            best, best_numbers = np.hstack([best, cosines]), np.hstack([best_numbers, candidates])
            order = np.argsort(-best, axis=1, kind="stable")[:, :depth]
            best, best_numbers = (np.take_along_axis(array, order, axis=1) for array in (best, best_numbers))
        numbers[part], values[part] = best_numbers, best
    return numbers, values


def query_scores(queries_QC: np.ndarray, documents_DC: np.ndarray, judgments: Judgments) -> Mapping[str, np.ndarray]:
    """Return ``ndcg_at_10``, ``mrr_at_10`` and ``recall_at_100`` of each query with a relevant document, in order.

    Gains of nDCG are the relevances themselves, as in trec_eval; the ideal ranking has all judged documents.
    """
    queries = list(judgments.by_query())
    rows = np.array([query for query, _ in queries], dtype=np.int64)
    numbers, _ = nearest(queries_QC[rows], documents_DC, DEPTH + 1)
    scores: dict[str, list[float]] = {"ndcg_at_10": [], "mrr_at_10": [], "recall_at_100": []}
    for ranking, (query, relevance) in zip(numbers, queries, strict=True):
        excluded = judgments.excluded[query]
        gains = [max(relevance.get(number, 0), 0) for number in ranking.tolist() if number != excluded][:DEPTH]
        relevant = {number: gain for number, gain in relevance.items() if gain > 0 and number != excluded}
        ideal = discounted_gain(sorted(relevant.values(), reverse=True)[:10])
        first = next((rank for rank, gain in enumerate(gains[:10], start=1) if gain), None)
        scores["ndcg_at_10"].append(discounted_gain(gains[:10]) / ideal if ideal else 0.0)
        scores["mrr_at_10"].append(1 / first if first else 0.0)
        scores["recall_at_100"].append(sum(gain > 0 for gain in gains) / max(len(relevant), 1))
    return {name: np.array(values) for name, values in scores.items()}


def discounted_gain(gains: list[int]) -> float:
    """Return the gains of a ranking, each divided by the base-2 logarithm of its rank + 1, summed."""
    return float(sum(gain / np.log2(rank + 1) for rank, gain in enumerate(gains, start=1)))
