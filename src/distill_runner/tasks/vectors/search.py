"""Exact search by cosine, and the scores of a ranking: nDCG, reciprocal rank and recall, as trec_eval defines them.

Shapes: Q queries, D documents, vectors of C numbers, the first K documents of a ranking.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from distill_runner.datasets.metrics import require_finite

COSINES_AT_ONCE = 2**24
"""Cosines that are computed at once: 64 MiB."""
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


def nearest(queries_QC: np.ndarray, documents_DC: np.ndarray, count: int) -> np.ndarray:
    """Return the numbers of the nearest documents of each query, best first, (Q, K).

    Every document is compared. Of equal cosines, the document with the smaller number comes first.
    """
    units = []
    for array in (queries_QC, documents_DC):
        require_finite(array)
        vectors = np.asarray(array, dtype=np.float32)
        lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
        units.append(np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0))
    size = max(1, COSINES_AT_ONCE // len(documents_DC))
    parts = (units[0][first : first + size] @ units[1].T for first in range(0, len(queries_QC), size))
    return np.concatenate([np.argsort(-part, axis=1, kind="stable")[:, :count] for part in parts])


def query_scores(queries_QC: np.ndarray, documents_DC: np.ndarray, judgments: Judgments) -> Mapping[str, np.ndarray]:
    """Return ``ndcg_at_10``, ``mrr_at_10`` and ``recall_at_100`` of each query with a relevant document, in order.

    Gains of nDCG are the relevances themselves, as in trec_eval; the ideal ranking has all judged documents.
    """
    gains_of_query: dict[int, dict[int, int]] = {}
    for query, document, relevance in judgments.relevance.tolist():
        if relevance > 0:
            gains_of_query.setdefault(query, {})[document] = relevance
    rows, scores = sorted(gains_of_query), []
    for query, ranking in zip(rows, nearest(queries_QC[rows], documents_DC, DEPTH + 1).tolist(), strict=True):
        gain_of, excluded = gains_of_query[query], judgments.excluded[query]
        gain_of.pop(int(excluded), None)
        gains = [gain_of.get(document, 0) for document in ranking if document != excluded][:DEPTH]
        ideal = _discounted_gain(sorted(gain_of.values(), reverse=True)[:10])
        first = next((rank for rank, gain in enumerate(gains[:10], start=1) if gain), None)
        ndcg = _discounted_gain(gains[:10]) / ideal if ideal else 0.0
        scores.append((ndcg, 1 / first if first else 0.0, sum(map(bool, gains)) / max(len(gain_of), 1)))
    return dict(zip(("ndcg_at_10", "mrr_at_10", "recall_at_100"), np.array(scores).T, strict=True))


def _discounted_gain(gains: list[int]) -> float:
    """Return the gains of a ranking, each divided by the base-2 logarithm of its rank + 1, summed."""
    return float(sum(gain / np.log2(rank + 1) for rank, gain in enumerate(gains, start=1)))
