"""Means over seeds, paired tests over examples of whether two methods differ, and corrections for many tests.

All computations use float64 and depend only on their arguments, because resampling has a fixed seed. scipy and
scikit-learn are imported where they are used, so that a table without comparisons starts at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from distill_runner.datasets.metrics import METRICS

RESAMPLES, SEED, CONFIDENCE = 10_000, 0, 0.95
CHUNK = 2**22
"""Maximum size of one block of resampling counts: 32 MiB of 64-bit integers."""


@dataclass(frozen=True)
class Spread:
    """Mean and spread of a sample of n values.

    Attributes:
        count: n, the number of values.
        sd: standard deviation (n - 1 in the denominator); None if n = 1.
        interval: half the width of the 95% interval of the mean; None if n = 1.
    """

    count: int
    mean: float
    sd: float | None = None
    interval: float | None = None

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "Spread":
        """Describe ``values``; ``interval`` is t(0.975, n - 1) * sd / sqrt(n): Student's t, because seeds are few."""
        count, mean = len(values), float(np.mean(values))
        if count < 2:
            return cls(count, mean)
        from scipy.special import stdtrit

        sd = float(np.std(values, ddof=1))
        return cls(count, mean, sd, float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * sd / sqrt(count))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for all tests made together, and return them in the same order (Holm 1979, step-down).

    The smallest of m p-values is multiplied by m, the next by m - 1, and so on. No result is below the result before
    it, or above 1. If all results of at most alpha are called significant, the probability of any false positive is
    at most alpha.
    """
    order = np.argsort(p_values, kind="stable")
    stepped = np.asarray(p_values, dtype=np.float64)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(stepped), 1.0)
    return corrected.tolist()


@dataclass(frozen=True)
class Bootstrap:
    """Difference of two scores (first minus second), with its 95% percentile interval and two-sided p-value.

    Attributes:
        examples: number of examples.
        units: number of units drawn in each resample: the examples, or the clusters that contain them.
        low, high: bounds of the interval.
    """

    examples: int
    units: int
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
    """Bootstrap the difference of two methods' scores; each resample draws the same examples for both.

    The test asks whether the difference would hold on other examples for *these* models. A paired t-test asks about
    other seeds. A resample is extreme if its difference departs from the observed difference at least as
    far as the observed difference departs from 0. The p-value is the share of extreme resamples (Efron & Tibshirani
    1993, ch. 16; Berg-Kirkpatrick et al. 2012, sec. 2). One is added to numerator and denominator, so that the p-value
    is never 0 (Davison & Hinkley 1997, sec. 4.2).

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
    """Bootstrap the difference as ``paired_bootstrap`` does, but draw whole clusters of examples.

    This suits a score that is a mean over examples which depend on each other.

    Args:
        first, second: scores (N,) of the examples, for each seed.
        clusters: (N,), equal for examples of one cluster, such as questions about one context.
    """
    _, cluster, size = np.unique(clusters, return_inverse=True, return_counts=True)
    by_cluster = np.bincount(cluster, weights=np.mean(first, axis=0) - np.mean(second, axis=0))
    return _bootstrap(lambda counts: counts @ by_cluster / (counts @ size), len(size), len(clusters), resamples)


def _bootstrap(difference: Callable[[np.ndarray], np.ndarray], size: int, examples: int, resamples: int) -> Bootstrap:
    """Bootstrap distribution of ``difference``, which maps resampling counts (R, size) to R differences."""
    generator, differences = np.random.default_rng(SEED), np.empty(resamples)
    rows = max(1, CHUNK // size)
    for start in range(0, resamples, rows):
        count = min(rows, resamples - start)
        indices = generator.integers(size, size=(count, size)) + size * np.arange(count)[:, None]
        counts = np.bincount(indices.ravel(), minlength=count * size).reshape(count, size)
        differences[start : start + count] = difference(counts)
    observed = float(difference(np.ones((1, size), dtype=np.int64))[0])
    # Equal counts may give sums that differ in the last digits; such a departure must not count as smaller.
    is_extreme = np.abs(differences - observed) >= abs(observed) * (1 - 1e-9)
    low, high = np.quantile(differences, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Bootstrap(examples, size, observed, float(low), float(high), float((1 + is_extreme.sum()) / (1 + resamples)))


def _score(metric: str, outputs: Sequence[np.ndarray], labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Scores (R,) of R resamples, averaged over the seeds; ``counts`` (R, N) is how often each example is drawn."""
    weighted = WEIGHTED.get(metric)
    if weighted is not None:
        return np.mean([weighted(output, labels, counts) for output in outputs], axis=0)
    rows = [np.repeat(np.arange(len(labels)), count) for count in counts]
    return np.array([np.mean([METRICS[metric](output[row], labels[row]) for output in outputs]) for row in rows])


def _confusion(outputs: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Confusion matrices (R, C, C): how many examples of class i (by label) were predicted as class j."""
    classes = outputs.shape[1]
    cell = np.eye(classes**2)[labels.astype(np.int64) * classes + outputs.argmax(axis=1)]
    return (counts.astype(np.float64) @ cell).reshape(len(counts), classes, classes)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Return the ratio, and 0 where ``denominator`` is not positive, as in ``datasets.metrics``."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


def _accuracy(outputs: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return counts @ (outputs.argmax(axis=1) == labels).astype(np.float64) / counts.sum(axis=1)


def _f1(outputs: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    table = _confusion(outputs, labels, counts)
    return _ratio(2 * table[:, 1, 1], table[:, 1].sum(axis=1) + table[:, :, 1].sum(axis=1))


def _f1_weighted(outputs: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    table = _confusion(outputs, labels, counts)
    true, predicted = table.sum(axis=2), table.sum(axis=1)
    of_class = _ratio(2 * np.diagonal(table, axis1=1, axis2=2), true + predicted)
    return (true * of_class).sum(axis=1) / true.sum(axis=1)


def _matthews(outputs: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Gorodkin's correlation for K classes, which equals Matthews' correlation for two classes."""
    table = _confusion(outputs, labels, counts)
    total, correct = table.sum(axis=(1, 2)), np.trace(table, axis1=1, axis2=2)
    true, predicted = table.sum(axis=2), table.sum(axis=1)
    variances = (total**2 - (true**2).sum(axis=1)) * (total**2 - (predicted**2).sum(axis=1))
    return _ratio(correct * total - (true * predicted).sum(axis=1), np.sqrt(variances))


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
"""Metrics computed for many resamples at once, equal to ``METRICS``. Other metrics are computed per resample."""
