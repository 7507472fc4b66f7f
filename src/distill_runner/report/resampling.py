"""Paired tests of two methods over the examples that both predicted: do *these* models differ on other examples?

The p-value is that of a permutation test: if two methods do not differ, their predictions of an example may be swapped.
Few differing examples are enumerated, so that the test is exact: McNemar's, if each example is right or wrong. The
interval is a bootstrap percentile interval, with an exact one where few examples differ. Examples that depend on each
other, such as questions about one text, are swapped and drawn together, as one unit.

Computations use float64 and a fixed seed, so results depend on the arguments alone. A sample is how often it has each
example. A score is a function of sums over these counts, or of ranks, which follow from sums of the counts in the order
of all examples; these are sorted once. Other metrics are computed draw by draw.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import erfc, lcm

import numpy as np
from scipy.special import bdtr, betaincinv, ndtr, stdtrit

from distill_runner.datasets import metrics
from distill_runner.report.statistics import CONFIDENCE, CRITICAL

# --- Metrics of many samples at once


def f1_by_class(counts: np.ndarray) -> np.ndarray:
    """Return F1 (..., T) of T classes, of their counts (..., 3 T) as for ``f1_of_counts``."""
    return metrics.f1_of_counts(counts.reshape(*counts.shape[:-1], -1, 3))


def mean_f1_of_counts(counts: np.ndarray) -> np.ndarray:
    """Return the mean of ``f1_by_class``."""
    return np.asarray(f1_by_class(counts).mean(axis=-1))


OfSamples = Callable[[np.ndarray], np.ndarray]
"""Maps how often each of R samples has each example, int32 (R, N), to the scores of K runs (R, K)."""


def _sums(counts: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the sums (R, M + 1) of the first 0 to M counts (R, N) in the order (M,) of examples."""
    sums = np.zeros((len(counts), len(order) + 1), dtype=np.int32)
    np.cumsum(counts.take(order, axis=1), axis=1, out=sums[:, 1:])
    return sums


def _centered_ranks(values: np.ndarray) -> OfSamples:
    """Return a function of counts: twice the ranks (R, N) of values (N,), minus their mean; ties have their mean."""
    order, (_, place, sizes) = np.argsort(values), np.unique(values, return_inverse=True, return_counts=True)
    bounds = np.append(0, np.cumsum(sizes))

    def of_samples(counts: np.ndarray) -> np.ndarray:
        sums = _sums(counts, order)
        sums = sums.take(bounds, axis=1) if len(bounds) < sums.shape[1] else sums
        return np.asarray((sums[:, :-1] + sums[:, 1:] - sums[:, -1:]).take(place, axis=1))

    return of_samples


def _spearman(runs: Sequence[np.ndarray], labels: np.ndarray) -> OfSamples:
    of_labels, *of_runs = (_centered_ranks(values.reshape(len(labels))) for values in (labels, *runs))

    def of_samples(counts: np.ndarray) -> np.ndarray:
        y, scores = of_labels(counts).astype(np.float64), np.zeros((len(runs), len(counts)))
        weighted = counts * y
        for score, of_run in zip(scores, of_runs, strict=True):
            x = of_run(counts).astype(np.float64)
            scale = np.einsum("rn,rn->r", weighted, y) * np.einsum("rn,rn,rn->r", counts, x, x)
            score[:] = metrics.ratio(np.einsum("rn,rn->r", weighted, x), np.sqrt(scale))
        return scores.T

    return of_samples


def _pearson_spearman(runs: Sequence[np.ndarray], labels: np.ndarray) -> OfSamples:
    statistics, score = metrics.SUMMED["pearson"]
    moments, spearman = [statistics(run, labels) for run in runs], _spearman(runs, labels)

    def of_samples(counts: np.ndarray) -> np.ndarray:
        weights = counts.astype(np.float64)
        return (np.stack([score(weights @ of_run) for of_run in moments], axis=1) + spearman(counts)) / 2

    return of_samples


def _places(values: np.ndarray, own: np.ndarray, others: np.ndarray) -> OfSamples:
    """Return a function of counts: twice how many of ``others`` are below each of ``own`` (R, M), equal ones half."""
    order = np.flatnonzero(others)[np.argsort(values[others])]
    first, last = (np.searchsorted(values[order], values[own], side) for side in ("left", "right"))

    def of_samples(counts: np.ndarray) -> np.ndarray:
        sums = _sums(counts, order)
        return np.asarray(sums.take(first, axis=1) + sums.take(last, axis=1))

    return of_samples


RANKED = {"spearman": _spearman, "pearson_spearman": _pearson_spearman}
"""Metrics whose samples are ranked anew; what methods swap are the ranks among all examples, as for ``SUMMED``."""


# --- Paired tests

SEED = 0
DRAWS, FEWEST_DRAWS, LOOPED_DRAWS = 10_000, 2_000, 1_000
"""Number of draws, of draws of many units, and of draws that are computed one by one."""
DRAWN_UNITS = 2**24
"""Units of all draws together, above which there are fewer draws."""
CHUNK = 2**18
"""Maximum size of one block of draws, which stays in the processor's cache: 2 MiB of 64-bit numbers."""
SMALL_SAMPLE = 50
"""Units below which percentiles are expanded."""
FEW_EXAMPLES, FEW_UNITS = 6, 10
"""Differing units below which a percentile interval is too short: of a mean over examples, and of another score."""
# With fewer than six, no paired test can have p < 0.05.


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
        signs: numbers of units on which the first and the second method are better; None unless only they matter.
        is_mean_of_examples: whether the score is a mean over independent examples, each between 0 and 1.
        exact_interval: bounds and variance where too few examples differ for percentiles; else None.
    """

    sizes: tuple[int, int]
    examples: int
    units: int
    is_different: np.ndarray
    signs: tuple[int, int] | None = None
    is_mean_of_examples: bool = False
    exact_interval: tuple[float, float, float] | None = None

    @cached_property
    def draws(self) -> int:
        """Number of draws."""
        return min(DRAWS, max(FEWEST_DRAWS, DRAWN_UNITS // self.units))

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
        least = margin * (1 - margin) / self.units if self.is_mean_of_examples else 0.0
        if not least and self.is_different.sum() < FEW_UNITS:
            return 1.0
        variance = max(float(self.difference(self.resampled).var(ddof=1)), least)
        if not variance:
            return 1.0
        return erfc((difference + margin) / (2 * variance) ** 0.5) / 2  # the normal distribution's tail

    def score_interval(self, runs: slice) -> tuple[float, float]:
        """Return the bounds of the 95% interval over units of the mean score of some runs: bootstrap percentiles."""
        return _percentiles(self.resampled[:, runs].mean(axis=1), self.units)

    def _permutation_p(self, observed: float, differing: int) -> tuple[float, bool]:
        """Return the share of permutations whose difference is at least as large, and whether all were counted.

        Permutations that are drawn count together with the observed one, so that the p-value is at least
        1 / (draws + 1) (Phipson & Smyth 2010).
        """
        if self.signs is not None:
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
    """Scores that are functions of sums over units, or on samples those of ``of_samples``."""

    of_samples: OfSamples | None = None

    def __init__(
        self,
        first: Sequence[np.ndarray],
        second: Sequence[np.ndarray],
        score: metrics.ScoreOfSums,
        clusters: np.ndarray | None = None,
    ) -> None:
        """Take the statistics of the examples.

        Args:
            first, second: statistics (N, S) of each run, such as true positives, predicted and true entities.
            score: maps their sums to the score.
            clusters: (N,), equal for examples that depend on each other; None if none do.
        """
        self.sizes, self.examples, self.score = (len(first), len(second)), len(first[0]), score
        statistics = np.stack([np.asarray(run, dtype=np.float64) for run in (*first, *second)])
        if clusters is not None:
            _, cluster = np.unique(clusters, return_inverse=True)
            order = np.argsort(cluster, kind="stable")
            starts = np.flatnonzero(np.diff(cluster[order], prepend=-1))
            statistics = np.add.reduceat(statistics[:, order], starts, axis=1)
        self.statistics, self.units = statistics, statistics.shape[1]
        numbers = np.arange(lcm(*self.sizes))
        one, other = statistics[numbers % self.sizes[0]], statistics[self.sizes[0] + numbers % self.sizes[1]]
        self.is_different = (one != other).any(axis=(0, 2))
        self.totals = one.sum(axis=1), other.sum(axis=1)
        self.changes = (other - one)[:, self.is_different]

    def scores(self, counts: np.ndarray) -> np.ndarray:
        if self.of_samples is not None:
            return self.of_samples(counts.astype(np.int32))
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
        if self.score is not metrics.mean_of_sums:
            return None
        nonzero = self.unit_differences[np.abs(self.unit_differences) > 1e-12]
        if not len(nonzero) or np.ptp(np.abs(nonzero)) > 1e-12:
            return None
        return int((nonzero > 0).sum()), int((nonzero < 0).sum())

    @cached_property
    def is_mean_of_examples(self) -> bool:  # type: ignore[override]
        values, sizes = self.statistics[..., 0], self.statistics[..., 1]
        are_shares = (sizes == 1).all() and values.min() >= 0 and values.max() <= 1
        return self.score is metrics.mean_of_sums and bool(are_shares)

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
        tail, number = (1 - CONFIDENCE) / 4, len(values)
        counts = [int((sign * values > 1e-12).sum()) for sign in (1, -1)]
        upper = [1.0 if count == number else betaincinv(count + 1, number - count, 1 - tail) for count in counts]
        lower = [0.0 if count == 0 else betaincinv(count, number - count + 1, tail) for count in counts]
        if np.abs(values[values != 0]).min(initial=1.0) < 1:  # then a share says only how large the difference may be
            lower = [0.0, 0.0]
        low, high = float(lower[0] - upper[1]), float(upper[0] - lower[1])
        return low, high, ((high - low) / (2 * CRITICAL)) ** 2


class OutputScores(PairedScores):
    """Scores of outputs (N, C) of each run, which methods swap."""

    def __init__(
        self, first: Sequence[np.ndarray], second: Sequence[np.ndarray], metric: metrics.Metric, labels: np.ndarray
    ) -> None:
        self.sizes, self.examples, self.units = (len(first), len(second)), len(labels), len(labels)
        self.outputs, self.metric, self.labels = np.stack([*first, *second]), metric, labels
        count = lcm(*self.sizes)
        self.pairs = [[number % self.sizes[0], self.sizes[0] + number % self.sizes[1]] for number in range(count)]
        differences = [(np.ptp(self.outputs[pair], axis=0) > 0).any(axis=-1) for pair in self.pairs]
        self.is_different = np.any(differences, axis=0)


class LoopedScores(OutputScores):
    """Scores by any metric, which are computed one by one."""

    draws = LOOPED_DRAWS

    def scores(self, counts: np.ndarray) -> np.ndarray:
        samples = [np.repeat(np.arange(self.units), of_sample) for of_sample in counts]
        return np.array([[self.metric(run[rows], self.labels[rows]) for run in self.outputs] for rows in samples])

    def swapped_difference(self, masks: np.ndarray) -> np.ndarray:
        differences, rows = np.zeros((len(masks), len(self.pairs))), np.flatnonzero(self.is_different)
        for place in np.ndindex(differences.shape):
            mask, pair = rows[masks[place[0]] > 0], self.pairs[place[1]]
            both = self.outputs[pair]
            both[:, mask] = both[::-1, mask]
            differences[place] = self.metric(both[0], self.labels) - self.metric(both[1], self.labels)
        return np.asarray(differences.mean(axis=1))


class AreaScores(OutputScores):
    """Areas under ROC curves, of the probabilities of each class (N,), which are sorted once."""

    @cached_property
    def classes(self) -> list[list[tuple[np.ndarray, OfSamples]]]:
        """For each run and class: its examples, and their places among the others."""
        runs = [metrics.one_against_rest(run, self.labels) for run in self.outputs]
        return [[(np.flatnonzero(own), _places(values, own, ~own)) for own, values in run] for run in runs]

    def scores(self, counts: np.ndarray) -> np.ndarray:
        scores, counts = [], counts.astype(np.int32)
        for classes in self.classes:
            wins, pairs = np.zeros((2, len(classes), len(counts)))
            for number, (own, places) in enumerate(classes):
                weights = counts.take(own, axis=1)
                wins[number] = np.einsum("rn,rn->r", weights, places(counts), dtype=np.float64) / 2
                pairs[number] = weights.sum(axis=1) * (counts.sum(axis=1) - weights.sum(axis=1))
            areas, defined = metrics.ratio(wins, pairs).sum(axis=0), (pairs > 0).sum(axis=0)
            scores.append(np.where(defined, areas / np.maximum(defined, 1), 0.5))
        return np.stack(scores, axis=1)

    @cached_property
    def changes(self) -> np.ndarray:
        """What each example (N,) adds to the difference of the areas; a swap turns its sign.

        An area counts pairs of examples, and after a swap one method has the outputs that the other one has not. So
        the products of two swaps cancel in the difference of the methods, and a sum over examples remains: of their
        places among the outputs of both methods for the other classes.
        """
        changes, labels, all_of = np.zeros(self.units), np.tile(self.labels, 2), np.ones((1, 2 * self.units), np.int32)
        for pair in self.pairs:
            classes = metrics.one_against_rest(np.concatenate(self.outputs[pair]), labels)
            classes = [(own, values) for own, values in classes if 0 < own.sum() < len(own)]
            for own, values in classes:
                for rows, sign in ((own, 1), (~own, -1)):
                    places = sign * _places(values, rows, ~rows)(all_of)[0] / (own.sum() * (~own).sum() * len(classes))
                    changes[rows[: self.units]] += np.subtract(*np.split(places, 2))
        return changes / len(self.pairs)

    def swapped_difference(self, masks: np.ndarray) -> np.ndarray:
        return np.asarray(self.changes.sum() - 2 * masks @ self.changes[self.is_different])


def paired_scores(
    metric: str, first: Sequence[np.ndarray], second: Sequence[np.ndarray], labels: np.ndarray
) -> PairedScores:
    """Pair the outputs of two methods on the same examples.

    Args:
        metric: a key of ``METRICS``, or a metric of ``evaluate``, which is computed anew for each draw.
        first, second: outputs (N, C) of each run.
        labels: (N,), or (N, C) of 0 and 1 for multi-label tasks.
    """
    if metric not in metrics.SUMMED:
        return (AreaScores if metric == "auc" else LoopedScores)(first, second, metrics.metric_function(metric), labels)
    statistics, score = metrics.SUMMED[metric]
    one, other = ([statistics(outputs, labels) for outputs in runs] for runs in (first, second))
    scores = SummedScores(one, other, score)
    if metric in RANKED:
        scores.of_samples = RANKED[metric]([*first, *second], labels)
    return scores


def clustered_scores(first: Sequence[np.ndarray], second: Sequence[np.ndarray], clusters: np.ndarray) -> SummedScores:
    """Pair scores (N,) of each run on the same examples; the score is their mean. See ``SummedScores``."""
    one, other = ([np.stack([scores, np.ones_like(scores)], axis=1) for scores in runs] for runs in (first, second))
    return SummedScores(one, other, metrics.mean_of_sums, clusters)


def _percentiles(values: np.ndarray, units: int) -> tuple[float, float]:
    """Return the bounds of an interval over samples of units; of few units, they are expanded as by Student's t.

    Percentiles of small samples are as narrow as normal intervals with n in place of n - 1 (Hesterberg 2015, 3.3).
    """
    tail = (1 - CONFIDENCE) / 2
    if 1 < units < SMALL_SAMPLE:
        tail = float(ndtr(stdtrit(units - 1, tail) * (units / (units - 1)) ** 0.5))
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def _blocks(draws: int, units: int) -> list[int]:
    """Numbers of draws of blocks of at most ``CHUNK`` numbers."""
    size = max(1, CHUNK // units)
    return [min(size, draws - start) for start in range(0, draws, size)]
