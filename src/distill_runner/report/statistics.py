"""Means over seeds, and whether two methods differ: paired over seeds, and paired over examples.

Everything is in float64 and depends on nothing but its arguments: resampling has a fixed seed. scipy and scikit-learn
are imported where they are used, so that a table without comparisons starts at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from distill_runner.datasets.metrics import METRICS

RESAMPLES, SEED, CONFIDENCE = 10_000, 0, 0.95
CHUNK = 2**22
"""Numbers in one block of resampled counts: 32 MiB."""


@dataclass(frozen=True)
class Spread:
    """A sample: its mean, standard deviation (n - 1), and half of the interval of the mean; None where n = 1."""

    count: int
    mean: float
    sd: float | None = None
    interval: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Half of the 95 % interval is t(0.975, n - 1) * sd / sqrt(n), Student's t: the seeds are few."""
        count, mean = len(values), float(np.mean(values))
        if count < 2:
            return cls(count, mean)
        from scipy.special import stdtrit

        sd = float(np.std(values, ddof=1))
        return cls(count, mean, sd, float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * sd / sqrt(count))


def paired_t(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The two-sided p-value of Student's paired t-test; None below two pairs, and where all differences are equal."""
    spread = Spread.of(np.subtract(first, second).tolist()) if len(first) > 1 else None
    if spread is None or spread.sd is None or spread.sd < 1e-12:
        return None
    from scipy.special import stdtr

    t = abs(spread.mean) * sqrt(spread.count) / spread.sd
    return float(2 * stdtr(spread.count - 1, -t))


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p-value corrected for all that were tried together, in their order (Holm 1979, step down).

    The smallest of m is multiplied by m, the next by m - 1, and so on; none comes below the one before it, or above 1.
    To call significant those that are at most alpha errs in any of them with a probability of at most alpha.
    """
    order = np.argsort(p_values, kind="stable")
    stepped = np.asarray(p_values, dtype=np.float64)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(stepped), 1.0)
    return corrected.tolist()


@dataclass(frozen=True)
class Bootstrap:
    """A difference of two scores (first minus second), its 95 % percentile interval and two-sided p-value.

    Attributes:
        drawn: how many things were drawn at a time: the examples, or the clusters that they are in.
    """

    examples: int
    drawn: int
    difference: float
    low: float
    high: float
    p: float


def paired_bootstrap(
    metric: str,
    first: Sequence[np.ndarray],
    second: Sequence[np.ndarray],
    labels: np.ndarray,
    resamples: int = RESAMPLES,
) -> Bootstrap:
    """Resample the examples, the same ones for both, and see how the difference of the scores varies.

    It asks whether the difference would hold on other examples for *these* models; other seeds are the t-test's affair.
    The p-value is the share of resamples whose difference departs from the observed one by as much as that departs
    from 0 (Efron & Tibshirani 1993, ch. 16; Berg-Kirkpatrick et al. 2012, sec. 2), with one added above and below so
    that it is never 0 (Davison & Hinkley 1997, sec. 4.2).

    Args:
        metric: a key of ``METRICS``.
        first, second: outputs (N, C) of each seed; a method's score is the mean over its seeds.
        labels: (N,).
    """

    def difference(counts: np.ndarray) -> np.ndarray:
        return _score(metric, first, labels, counts) - _score(metric, second, labels, counts)

    return _bootstrap(difference, len(labels), len(labels), resamples)


def clustered_bootstrap(
    first: Sequence[np.ndarray], second: Sequence[np.ndarray], clusters: np.ndarray, resamples: int = RESAMPLES
) -> Bootstrap:
    """The same for a score that is a mean over examples which depend on each other: whole clusters are drawn.

    Args:
        first, second: the score (N,) of each example, of each seed.
        clusters: (N,), equal for examples of one cluster, such as questions about one context.
    """
    _, cluster, size = np.unique(clusters, return_inverse=True, return_counts=True)
    by_cluster = np.bincount(cluster, weights=np.mean(first, axis=0) - np.mean(second, axis=0))
    return _bootstrap(lambda counts: counts @ by_cluster / (counts @ size), len(size), len(clusters), resamples)


def _bootstrap(difference: Callable[[np.ndarray], np.ndarray], size: int, examples: int, resamples: int) -> Bootstrap:
    """Of a function that takes how often each of ``size`` things is drawn, (R, size), and gives R differences."""
    draw, differences = np.random.default_rng(SEED), np.empty(resamples)
    rows = max(1, CHUNK // size)
    for start in range(0, resamples, rows):
        count = min(rows, resamples - start)
        drawn = draw.integers(size, size=(count, size)) + size * np.arange(count)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=count * size).reshape(count, size)
        differences[start : start + count] = difference(counts)
    observed = float(difference(np.ones((1, size), dtype=np.int64))[0])
    # The same counts may give sums that differ in the last digits: those are no smaller departures.
    as_far = np.abs(differences - observed) >= abs(observed) * (1 - 1e-9)
    low, high = np.quantile(differences, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Bootstrap(examples, size, observed, float(low), float(high), float((1 + as_far.sum()) / (1 + resamples)))


def _score(metric: str, outputs: Sequence[np.ndarray], labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Scores (R,) of R resamples, averaged over the seeds; ``counts`` (R, N) says how often each example is drawn."""
    of_one = WEIGHTED.get(metric)
    if of_one is not None:
        return np.mean([of_one(output, labels, counts) for output in outputs], axis=0)
    rows = [np.repeat(np.arange(len(labels)), count) for count in counts]
    return np.array([np.mean([METRICS[metric](output[row], labels[row]) for output in outputs]) for row in rows])


def _confusion(outputs: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(R, C, C): how many examples of class i (of labels) were predicted as j."""
    classes = outputs.shape[1]
    cell = np.eye(classes**2)[labels.astype(np.int64) * classes + outputs.argmax(axis=1)]
    return (counts.astype(np.float64) @ cell).reshape(len(counts), classes, classes)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """0 where nothing is below, as ``metrics`` has it."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _accuracy(outputs: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return counts @ (outputs.argmax(axis=1) == labels).astype(np.float64) / counts.sum(axis=1)


def _f1(outputs: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    table = _confusion(outputs, labels, counts)
    return _ratio(2 * table[:, 1, 1], table[:, 1].sum(axis=1) + table[:, :, 1].sum(axis=1))


def _f1_weighted(outputs: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    table = _confusion(outputs, labels, counts)
    true, said = table.sum(axis=2), table.sum(axis=1)
    of_class = _ratio(2 * np.diagonal(table, axis1=1, axis2=2), true + said)
    return (true * of_class).sum(axis=1) / true.sum(axis=1)


def _matthews(outputs: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Gorodkin's correlation of K classes, which is Matthews' for two."""
    table = _confusion(outputs, labels, counts)
    total, right = table.sum(axis=(1, 2)), np.trace(table, axis1=1, axis2=2)
    true, said = table.sum(axis=2), table.sum(axis=1)
    variances = (total**2 - (true**2).sum(axis=1)) * (total**2 - (said**2).sum(axis=1))
    return _ratio(right * total - (true * said).sum(axis=1), np.sqrt(variances))


def _pearson(outputs: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    share = counts / counts.sum(axis=1, keepdims=True)
    x, y = (values - values.mean() for values in (outputs[:, 0].astype(np.float64), labels.astype(np.float64)))
    moments = share @ np.stack([x, y, x * x, y * y, x * y], axis=1)
    mean_x, mean_y, xx, yy, xy = moments.T
    variances = np.maximum(xx - mean_x**2, 0) * np.maximum(yy - mean_y**2, 0)
    return _ratio(xy - mean_x * mean_y, np.sqrt(variances))


WEIGHTED: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "f1_weighted": _f1_weighted,
    "matthews": _matthews,
    "pearson": _pearson,
}
"""Metrics of many resamples at once, equal to ``METRICS``; another one is computed resample by resample."""
