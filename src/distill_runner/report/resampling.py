"""Paired tests of two methods over the examples that both predicted: do *these* models differ on other examples?

The p-value is that of a permutation test: if two methods do not differ, their predictions of an example may be swapped.
Few differing examples are enumerated, so that the test is exact: McNemar's, if each example is right or wrong. The
interval is a bootstrap percentile interval, with an exact one where few examples differ. Examples that depend on each
other, such as questions about one text, are swapped and drawn together, as one unit.

Computations use float64 and a fixed seed, so results depend on the arguments alone. A score is a function of sums over
units, or of ranks, which allows many draws at once. Other metrics are computed draw by draw.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from math import lcm

import numpy as np

from distill_runner.datasets.metrics import metric_function
from distill_runner.report.statistics import CONFIDENCE, CRITICAL

# --- Metrics of many samples at once


ScoreOfSums = Callable[[np.ndarray], np.ndarray]
"""Maps sums (..., S) of the statistics of a sample of units to its scores (...)."""


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Return the ratio, and 0 where ``denominator`` is not positive, as in ``datasets.metrics``."""
    return np.divide(numerator, denominator, out=np.zeros(np.shape(numerator)), where=denominator > 0)


def mean_of_sums(sums: np.ndarray) -> np.ndarray:
    """Return the mean of scores, of the sum of scores and their number."""
    return _ratio(sums[..., 0], sums[..., 1])


def f1_of_counts(counts: np.ndarray) -> np.ndarray:
    """Return F1 of the numbers of true positives, predicted positives and actual positives."""
    return _ratio(2 * counts[..., 0], counts[..., 1] + counts[..., 2])


def f1_by_class(counts: np.ndarray) -> np.ndarray:
    """Return F1 (..., T) of T classes, of their counts (..., 3 T) as for ``f1_of_counts``."""
    return f1_of_counts(counts.reshape(*counts.shape[:-1], -1, 3))


def mean_f1_of_counts(counts: np.ndarray) -> np.ndarray:
    """Return the mean of ``f1_by_class``."""
    return np.asarray(f1_by_class(counts).mean(axis=-1))


def _is_correct(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    is_multilabel = labels.ndim == 2
    correct = ((outputs > 0) == (labels > 0)).all(axis=1) if is_multilabel else outputs.argmax(axis=1) == labels
    return np.stack([correct, np.ones_like(correct)], axis=1).astype(np.float64)


def _class_counts(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return, for each example and class, whether it is correctly predicted, predicted, and the label: (N, 3C)."""
    classes = np.arange(outputs.shape[1])
    predicted = outputs > 0 if labels.ndim == 2 else outputs.argmax(axis=1)[:, None] == classes
    actual = labels > 0 if labels.ndim == 2 else labels[:, None] == classes
    return np.concatenate([predicted & actual, predicted, actual], axis=1).astype(np.float64)


def _by_class(sums: np.ndarray) -> np.ndarray:
    """Return the counts of each class (..., C, 3)."""
    return np.moveaxis(sums.reshape(*sums.shape[:-1], 3, -1), -2, -1)


def _f1(sums: np.ndarray) -> np.ndarray:
    return f1_of_counts(_by_class(sums)[..., 1, :])


def _f1_macro(sums: np.ndarray) -> np.ndarray:
    counts = _by_class(sums)
    return _ratio(f1_of_counts(counts).sum(axis=-1), (counts[..., 1:].sum(axis=-1) > 0).sum(axis=-1))


def _f1_weighted(sums: np.ndarray) -> np.ndarray:
    counts = _by_class(sums)
    return (counts[..., 2] * f1_of_counts(counts)).sum(axis=-1) / counts[..., 2].sum(axis=-1)


def _accuracy_f1(sums: np.ndarray) -> np.ndarray:
    counts = _by_class(sums).sum(axis=-2)
    return (_ratio(counts[..., 0], counts[..., 2]) + _f1(sums)) / 2


def _matthews(sums: np.ndarray) -> np.ndarray:
    """Gorodkin's correlation for K classes, which equals Matthews' correlation for two classes."""
    correct, predicted, actual = np.moveaxis(_by_class(sums), -1, 0)
    total = actual.sum(axis=-1)
    variances = (total**2 - (actual**2).sum(axis=-1)) * (total**2 - (predicted**2).sum(axis=-1))
    return _ratio(correct.sum(axis=-1) * total - (actual * predicted).sum(axis=-1), np.sqrt(variances))


def _moments(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    x, y = standardized(outputs.reshape(len(labels))), standardized(labels)
    return np.stack([np.ones_like(x), x, y, x * x, x * y, y * y], axis=1)


def _pearson(sums: np.ndarray) -> np.ndarray:
    x, y, xx, xy, yy = np.moveaxis(sums[..., 1:] / sums[..., :1], -1, 0)
    variances = np.maximum(xx - x**2, 0) * np.maximum(yy - y**2, 0)
    return _ratio(xy - x * y, np.sqrt(variances))


def standardized(values: np.ndarray) -> np.ndarray:
    """Return values of mean 0 and standard deviation 1; zeros if all are equal."""
    centered = values.astype(np.float64) - values.astype(np.float64).mean()
    return centered / (centered.std() or 1.0)


def _ranks(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return twice the ranks (N, R) of values (N,) in samples with ``weights`` (N, R); ties have their mean rank."""
    order, sums = np.argsort(values, kind="stable"), np.zeros((len(values) + 1, weights.shape[1]), dtype=np.int32)
    np.cumsum(weights[order], axis=0, out=sums[1:])
    first, last = (np.searchsorted(values, values, side, order) for side in ("left", "right"))
    return np.asarray(sums[first] + sums[last])


def _correlation(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the Pearson correlations (R,) of x and y, (N, R) or (N, 1); 0 for constants."""
    pairs = combinations_with_replacement((np.ones((1, 1)), x, y), 2)
    return _pearson(np.stack([np.einsum("nr,nr,nr->r", weights, *pair, dtype=np.float64) for pair in pairs], axis=1))


def _spearman(outputs: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return _correlation(_ranks(outputs[:, -1], weights), _ranks(labels, weights), weights)


def _pearson_spearman(outputs: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return (_correlation(outputs[:, :1], labels[:, None], weights) + _spearman(outputs, labels, weights)) / 2


def _outputs_and_ranks(outputs: np.ndarray) -> np.ndarray:
    ranks = _ranks(outputs.reshape(-1), np.ones((outputs.size, 1), dtype=np.int32))
    return np.hstack([standardized(outputs).reshape(-1, 1), ranks])


Metric = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Maps outputs (N, C), labels (N,) or (N, C) and how often R samples have an example (N, R) to scores (R,)."""
RANKED: dict[str, tuple[Metric, Callable[[np.ndarray], np.ndarray]]] = {
    "spearman": (_spearman, lambda outputs: _outputs_and_ranks(outputs)[:, 1:]),
    "pearson_spearman": (_pearson_spearman, _outputs_and_ranks),
}
"""Metrics of ranks, and what methods swap in place of outputs, on whose scale a correlation does not depend."""

SUMMED: dict[str, tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], ScoreOfSums]] = {
    "accuracy": (_is_correct, mean_of_sums),
    "subset_accuracy": (_is_correct, mean_of_sums),
    "f1": (_class_counts, _f1),
    "f1_micro": (_class_counts, lambda sums: f1_of_counts(_by_class(sums).sum(axis=-2))),
    "f1_macro": (_class_counts, _f1_macro),
    "f1_weighted": (_class_counts, _f1_weighted),
    "accuracy_f1": (_class_counts, _accuracy_f1),
    "matthews": (_class_counts, _matthews),
    "pearson": (_moments, _pearson),
}
"""Statistics of outputs and labels, and the score of their sums, equal to ``METRICS``."""


# --- Paired tests

SEED = 0
DRAWS, RANKED_DRAWS, LOOPED_DRAWS = 10_000, 2_000, 1_000
"""Number of draws, of draws that rank all values, and of draws that are computed one by one."""
CHUNK = 2**22
"""Maximum size of one block of draws: 32 MiB of 64-bit numbers."""
SMALL_SAMPLE = 50
"""Units below which percentiles are expanded."""
FEW_EXAMPLES, FEW_UNITS = 6, 10
"""Differing units below which a percentile interval is too short: of a mean over examples, and of another score.

With fewer than six, no paired test can have p < 0.05.
"""


@dataclass(frozen=True)
class ExampleTest:
    """Difference of two methods' scores (first minus second) for these models on other examples.

    Attributes:
        units: number of units that are swapped and drawn: the examples, or the clusters that contain them.
        differing: number of units on which the methods differ.
        p: two-sided p-value of the permutation test; never 0.
        is_exact: whether all permutations count, not a sample of them.
        low, high: bounds of the 95% interval; None if too few units differ for one.
        variance: of the difference over samples of units; None if there is no interval.
    """

    examples: int
    units: int
    differing: int
    difference: float
    p: float
    is_exact: bool
    low: float | None = None
    high: float | None = None
    variance: float | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low, self.high)


class PairedScores(ABC):
    """Scores of two methods on samples of the same units; a method's score is the mean over its runs.

    Attributes:
        sizes: number of runs of each method.
        examples, units: numbers of examples and of units.
        is_different: (units,), whether the methods differ on a unit.
        draws: number of draws that the cost of the metric allows.
        signs: numbers of units on which the first and the second method are better; None unless only they matter.
        is_mean_of_examples: whether the score is a mean over independent examples, each between 0 and 1.
        exact_interval: bounds and variance where too few examples differ for percentiles; else None.
    """

    sizes: tuple[int, int]
    examples: int
    units: int
    is_different: np.ndarray
    draws: int
    signs: tuple[int, int] | None = None
    is_mean_of_examples: bool = False
    exact_interval: tuple[float, float, float] | None = None

    @abstractmethod
    def scores(self, counts: np.ndarray) -> np.ndarray:
        """Scores (R, runs) of R samples, those of the first method's runs first.

        Args:
            counts: (R, units), how often each sample draws each unit.
        """

    @abstractmethod
    def swapped_difference(self, masks: np.ndarray) -> np.ndarray:
        """Differences (R,) after the predictions of some units are swapped between the methods.

        Methods with different numbers of runs are paired as often as each pair needs to occur equally often.

        Args:
            masks: (R, differing units), 1 where a unit is swapped.
        """

    @cached_property
    def observed(self) -> np.ndarray:
        """Scores (runs,) on all units."""
        return self.scores(np.ones((1, self.units), dtype=np.int64))[0]

    @cached_property
    def resampled(self) -> np.ndarray:
        """Scores (draws, runs) of bootstrap samples; both methods have the same examples in each."""
        generator = np.random.default_rng(SEED)
        blocks = []
        for count in _blocks(self.draws, self.units):
            indices = generator.integers(self.units, size=(count, self.units))
            indices += self.units * np.arange(count)[:, None]
            counts = np.bincount(indices.ravel(), minlength=count * self.units).reshape(count, self.units)
            blocks.append(self.scores(counts))
        return np.concatenate(blocks)

    def difference(self, scores: np.ndarray) -> np.ndarray:
        """Mean of the first method's runs minus that of the second's, of scores (..., runs)."""
        return scores[..., : self.sizes[0]].mean(axis=-1) - scores[..., self.sizes[0] :].mean(axis=-1)

    def test(self) -> ExampleTest:
        """Test whether the methods' scores differ, and estimate by how much."""
        differing, observed = int(self.is_different.sum()), float(self.difference(self.observed))
        p, is_exact = self._permutation_p(observed, differing)
        numbers = self.exact_interval or self._percentile_interval(differing) or ()
        return ExampleTest(self.examples, self.units, differing, observed, p, is_exact, *numbers)

    def p_same(self, margin: float) -> float:
        """Return the p-value of a difference of ``margin`` or more: the larger of two tests as ``p_not_worse``."""
        return self._p_beyond(margin, -abs(float(self.difference(self.observed))))

    def p_not_worse(self, margin: float) -> float:
        """Return the p-value of these models of the first method being worse by ``margin`` or more (one-sided).

        The test is normal, with the variance of the difference over samples of units. Of a mean over examples, the
        variance is at least the least one that a difference of ``margin`` has: at such a difference, at least a share
        of ``margin`` of the examples differ. That is the idea of score tests of paired proportions (Tango 1998), and
        keeps the error rate where few examples differ.

        Args:
            margin: positive, in the unit of the score.
        Returns:
            1 if too few units differ to estimate a variance, or all samples have the same difference: the variance 0
            says that it cannot be estimated, not that the difference is certain.
        """
        return self._p_beyond(margin, float(self.difference(self.observed)))

    def _p_beyond(self, margin: float, difference: float) -> float:
        from scipy.special import ndtr

        least = margin * (1 - margin) / self.units if self.is_mean_of_examples else 0.0
        if not least and self.is_different.sum() < FEW_UNITS:
            return 1.0
        variance = max(float(self.difference(self.resampled).var(ddof=1)), least)
        if not variance:
            return 1.0
        return float(ndtr(-(difference + margin) / variance**0.5))

    def score_interval(self, runs: slice) -> tuple[float, float]:
        """Return the bounds of the 95% interval over units of the mean score of some runs: bootstrap percentiles."""
        return _percentiles(self.resampled[:, runs].mean(axis=1), self.units)

    def _permutation_p(self, observed: float, differing: int) -> tuple[float, bool]:
        """Return the share of permutations whose difference is at least as large, and whether all were counted.

        Permutations that are drawn count together with the observed one, so that the p-value is at least
        1 / (draws + 1) (Phipson & Smyth 2010).
        """
        if self.signs is not None:
            from scipy.special import bdtr

            return min(1.0, 2 * float(bdtr(min(self.signs), sum(self.signs), 0.5))), True
        is_exact = 2**differing <= self.draws
        draws = 2**differing if is_exact else self.draws
        generator, extreme, start = np.random.default_rng(SEED), 0, 0
        for count in _blocks(draws, max(differing, 1)):
            if is_exact:
                masks = (np.arange(start, start + count)[:, None] >> np.arange(differing)) & 1
            else:
                masks = generator.integers(2, size=(count, differing), dtype=np.int8)
            # Equal permutations may give sums that differ in the last digits; they must not count as smaller.
            limit = abs(observed) * (1 - 1e-9) - 1e-12
            extreme += int((np.abs(self.swapped_difference(masks.astype(np.float64))) >= limit).sum())
            start += count
        return (extreme / draws, True) if is_exact else ((1 + extreme) / (1 + draws), False)

    def _percentile_interval(self, differing: int) -> tuple[float, float, float] | None:
        if differing < FEW_UNITS and not (self.is_mean_of_examples and differing >= FEW_EXAMPLES):
            return None
        differences = self.difference(self.resampled)
        low, high = _percentiles(differences, self.units)
        return None if high - low < 1e-12 else (low, high, float(differences.var(ddof=1)))


class SummedScores(PairedScores):
    """Scores that are functions of sums over units."""

    def __init__(
        self,
        first: Sequence[np.ndarray],
        second: Sequence[np.ndarray],
        score: ScoreOfSums,
        clusters: np.ndarray | None = None,
    ) -> None:
        """Take the statistics of the examples.

        Args:
            first, second: statistics (N, S) of each run, such as true positives, predicted and true entities.
            score: maps their sums to the score.
            clusters: (N,), equal for examples that depend on each other; None if none do.
        """
        self.sizes, self.examples, self.score, self.draws = (len(first), len(second)), len(first[0]), score, DRAWS
        statistics = np.stack([np.asarray(run, dtype=np.float64) for run in (*first, *second)])
        if clusters is not None:
            _, cluster = np.unique(clusters, return_inverse=True)
            order = np.argsort(cluster, kind="stable")
            starts = np.flatnonzero(np.diff(cluster[order], prepend=-1))
            statistics = np.add.reduceat(statistics[:, order], starts, axis=1)
        self.statistics, self.units = statistics, statistics.shape[1]
        pairs = lcm(*self.sizes)
        numbers = np.arange(pairs)
        one, other = statistics[numbers % self.sizes[0]], statistics[self.sizes[0] + numbers % self.sizes[1]]
        self.is_different = (one != other).any(axis=(0, 2))
        self.totals = one.sum(axis=1), other.sum(axis=1)
        self.changes = (other - one)[:, self.is_different]

    def scores(self, counts: np.ndarray) -> np.ndarray:
        weights = counts.astype(np.float64)
        return self.score(np.stack([weights @ run for run in self.statistics], axis=1))

    def swapped_difference(self, masks: np.ndarray) -> np.ndarray:
        pairs = []
        for total, other, changes in zip(*self.totals, self.changes, strict=True):
            change = masks @ changes
            pairs.append(self.score(total + change) - self.score(other - change))
        return np.mean(pairs, axis=0)

    @cached_property
    def unit_differences(self) -> np.ndarray:
        """Difference (units,) of the means over runs, of a score that is a mean."""
        return np.asarray(self.difference(np.moveaxis(self.statistics[..., 0], 0, -1)))

    @cached_property
    def signs(self) -> tuple[int, int] | None:  # type: ignore[override]
        if self.score is not mean_of_sums:
            return None
        nonzero = self.unit_differences[np.abs(self.unit_differences) > 1e-12]
        if not len(nonzero) or np.ptp(np.abs(nonzero)) > 1e-12:
            return None
        return int((nonzero > 0).sum()), int((nonzero < 0).sum())

    @cached_property
    def is_mean_of_examples(self) -> bool:  # type: ignore[override]
        values, sizes = self.statistics[..., 0], self.statistics[..., 1]
        return self.score is mean_of_sums and bool((sizes == 1).all() and values.min() >= 0 and values.max() <= 1)

    @cached_property
    def exact_interval(self) -> tuple[float, float, float] | None:  # type: ignore[override]
        """Bounds and variance for few differing examples or for equal differences, whose percentiles are too close.

        Both shares, of examples on which one method is better and of those on which the other is, have exact intervals
        of 97.5% (Clopper & Pearson 1934), and a difference is at most 1. So the interval covers at least 95%.
        """
        values = self.unit_differences
        is_few = np.count_nonzero(np.abs(values) > 1e-12) < FEW_EXAMPLES or np.ptp(values) < 1e-12
        if not self.is_mean_of_examples or not is_few:
            return None
        from scipy.special import betaincinv

        tail, number = (1 - CONFIDENCE) / 4, len(values)
        counts = [int((sign * values > 1e-12).sum()) for sign in (1, -1)]
        upper = [1.0 if count == number else betaincinv(count + 1, number - count, 1 - tail) for count in counts]
        lower = [0.0 if count == 0 else betaincinv(count, number - count + 1, tail) for count in counts]
        if np.abs(values[values != 0]).min(initial=1.0) < 1:  # then a share says only how large the difference may be
            lower = [0.0, 0.0]
        low, high = float(lower[0] - upper[1]), float(upper[0] - lower[1])
        return low, high, ((high - low) / (2 * CRITICAL)) ** 2


class DrawnScores(PairedScores):
    """Scores by a metric that is no function of sums; they are computed from the outputs of each draw."""

    def __init__(
        self, first: Sequence[np.ndarray], second: Sequence[np.ndarray], metric: Metric, labels: np.ndarray, draws: int
    ) -> None:
        """Take the outputs.

        Args:
            first, second: outputs (N, C) of each run, which methods swap.
            metric: see ``Metric``.
        """
        self.sizes, self.examples, self.units = (len(first), len(second)), len(labels), len(labels)
        self.outputs, self.metric, self.labels, self.draws = np.stack([*first, *second]), metric, labels, draws
        count = lcm(*self.sizes)
        self.pairs = [(number % self.sizes[0], self.sizes[0] + number % self.sizes[1]) for number in range(count)]
        differences = [(self.outputs[one] != self.outputs[other]).any(axis=-1) for one, other in self.pairs]
        self.is_different = np.any(differences, axis=0)

    def scores(self, counts: np.ndarray) -> np.ndarray:
        weights = np.ascontiguousarray(counts.T, dtype=np.int32)
        return np.stack([self.metric(run, self.labels, weights) for run in self.outputs], axis=1)

    def swapped_difference(self, masks: np.ndarray) -> np.ndarray:
        """See ``PairedScores``. Both samples are of the outputs of both methods, of which each has one by example."""
        weights = np.zeros((2, self.units, len(masks)), dtype=np.int32)
        weights[0], weights[1, self.is_different] = 1, masks.T
        weights[0] -= weights[1]
        labels, differences = np.concatenate([self.labels, self.labels]), []
        for pair in self.pairs:
            outputs = np.concatenate([self.outputs[number] for number in pair])
            scores = [self.metric(outputs, labels, part.reshape(len(labels), -1)) for part in (weights, weights[::-1])]
            differences.append(scores[0] - scores[1])
        return np.mean(differences, axis=0)


def paired_scores(
    metric: str, first: Sequence[np.ndarray], second: Sequence[np.ndarray], labels: np.ndarray
) -> PairedScores:
    """Pair the outputs of two methods on the same examples.

    Args:
        metric: a key of ``METRICS``, or a metric of ``evaluate``, which is computed anew for each draw.
        first, second: outputs (N, C) of each run.
        labels: (N,), or (N, C) of 0 and 1 for multi-label tasks.
    """
    if metric in RANKED:
        scores, exchanged = RANKED[metric]
        one, other = ([exchanged(outputs) for outputs in runs] for runs in (first, second))
        return DrawnScores(one, other, scores, labels, RANKED_DRAWS)
    if metric not in SUMMED:
        of_one = metric_function(metric)

        def in_turn(outputs: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
            samples = [np.repeat(np.arange(len(labels)), counts) for counts in weights.T]
            return np.array([of_one(outputs[rows], labels[rows]) for rows in samples])

        return DrawnScores(first, second, in_turn, labels, LOOPED_DRAWS)
    statistics, score = SUMMED[metric]
    one, other = ([statistics(outputs, labels) for outputs in runs] for runs in (first, second))
    return SummedScores(one, other, score)


def clustered_scores(first: Sequence[np.ndarray], second: Sequence[np.ndarray], clusters: np.ndarray) -> SummedScores:
    """Pair scores (N,) of each run on the same examples; the score is their mean. See ``SummedScores``."""
    one, other = ([np.stack([scores, np.ones_like(scores)], axis=1) for scores in runs] for runs in (first, second))
    return SummedScores(one, other, mean_of_sums, clusters)


def _percentiles(values: np.ndarray, units: int) -> tuple[float, float]:
    """Return the bounds of an interval over samples of units; of few units, they are expanded as by Student's t.

    Percentiles of small samples are as narrow as normal intervals with n in place of n - 1 (Hesterberg 2015, 3.3).
    """
    from scipy.special import ndtr, stdtrit

    tail = (1 - CONFIDENCE) / 2
    if 1 < units < SMALL_SAMPLE:
        tail = float(ndtr(stdtrit(units - 1, tail) * (units / (units - 1)) ** 0.5))
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def _blocks(draws: int, units: int) -> list[int]:
    """Numbers of draws of blocks of at most ``CHUNK`` numbers."""
    size = max(1, CHUNK // units)
    return [min(size, draws - start) for start in range(0, draws, size)]
