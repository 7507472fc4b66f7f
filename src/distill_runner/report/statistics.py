"""Means over seeds, tests of whether two methods differ for other seeds and examples, and Holm's correction."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt

import numpy as np
from scipy.special import gammaln, ndtr, ndtri, stdtrit

CONFIDENCE, ALPHA, POWER = 0.95, 0.05, 0.8
CRITICAL = 1.959963984540054
MAX_SEEDS = 100
"""Largest number of seeds that an estimate names."""


@dataclass(frozen=True)
class Spread:
    """Mean and spread of a sample of n values.

    Attributes:
        count: n, the number of values.
        sd: standard deviation (n - 1 in the denominator); None if n = 1.
        interval: half the width of the 95% interval of the mean; None if n = 1 or all values are equal, which are too
            few to say how far others would be.
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
        sd = float(np.std(values, ddof=1))
        if np.ptp(values) < 1e-9:
            return cls(count, mean, sd)
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
class MethodTest:
    """Difference of two methods (first minus second) for other seeds and other examples.

    The model has random effects of seeds, of examples, and of both together: the difference of seed s on example i is
    ``difference + seed_s + example_i + residual_si``. Then the error of the mean is the sum of two independent parts:
    Student's t times the root of ``seed_variance``, and a normal one with ``example_variance``. That sum has the
    distribution of Behrens and Fisher. Without a part of the examples it is the paired t-test over seeds.

    Attributes:
        seeds: number of paired seeds, at least 2.
        seed_variance: of the mean over seeds, from the scatter of their differences; includes the residual.
        example_variance: of the mean over examples, without the residual.
        looks: how often the seeds so far were tested, this test included; p-values are multiplied by it.
    """

    difference: float
    seeds: int
    seed_variance: float
    example_variance: float
    looks: int = 1

    @classmethod
    def from_seeds(
        cls,
        differences: Sequence[float],
        resampled: np.ndarray,
        minimum: float = 0.0,
        step: float = 0.0,
        looks: int = 1,
    ) -> "MethodTest":
        """Estimate the variances.

        Args:
            differences: of each seed.
            resampled: (R, seeds), the differences on bootstrap samples of the examples.
            minimum: the least variance over the examples, where too few of them differ for the bootstrap.
            step: what one example adds to a score. Scores are rounded to it, so equal seeds may differ by a part of it.
        """
        seeds = len(differences)
        seed_variance = max(float(np.var(differences, ddof=1)), step**2 / 12) / seeds
        of_mean = float(resampled.mean(axis=1).var(ddof=1))
        residual = (float(resampled.var(axis=0, ddof=1).mean()) - of_mean) / (seeds - 1)
        return cls(float(np.mean(differences)), seeds, seed_variance, max(of_mean - residual, minimum, 0.0), looks)

    @cached_property
    def _scales(self) -> tuple[np.ndarray, np.ndarray]:
        """Standard deviations of the error, with their weights: one for each value of the scatter over seeds.

        The integral is over the logarithm of a chi-squared variable, where the trapezoidal rule is accurate.
        """
        freedom = self.seeds - 1
        logarithms = np.linspace(-80 / freedom - 8, np.log(freedom + 60 + 12 * sqrt(freedom)), 2000)
        half = freedom / 2
        density = np.exp(half * logarithms - np.exp(logarithms) / 2 - half * np.log(2) - gammaln(half))
        weights = density / density.sum()
        return np.sqrt(self.example_variance + self.seed_variance * freedom * np.exp(-logarithms)), weights

    def tail(self, error: float) -> float:
        """Return the probability that the error is at least ``error``."""
        scales, weights = self._scales
        return float(weights @ ndtr(-error / scales))

    @property
    def p(self) -> float:
        """Two-sided p-value of no difference."""
        return min(1.0, 2 * self.tail(abs(self.difference)) * self.looks)

    def p_not_worse(self, margin: float) -> float:
        """Return the p-value of the first method being worse by ``margin`` or more; small if it is not (one-sided)."""
        return min(1.0, self.tail(self.difference + margin) * self.looks)

    def p_same(self, margin: float) -> float:
        """Return the p-value of a difference of ``margin`` or more: the larger of two one-sided tests."""
        return min(1.0, self.tail(margin - abs(self.difference)) * self.looks)

    def half_width(self, tails: float = 1 - CONFIDENCE) -> float:
        """Return the error that is exceeded, to either side, with probability ``tails`` divided by ``looks``."""
        from scipy.optimize import brentq  # imported here: a table without comparisons starts earlier

        if self.seed_variance + self.example_variance == 0:
            return 0.0
        tail = tails / self.looks / 2
        # The two parts of the error are that large together only if one of them exceeds its own quantile.
        of_seeds, of_examples = -stdtrit(self.seeds - 1, tail / 2), -ndtri(tail / 2)
        limit = sqrt(self.seed_variance) * of_seeds + sqrt(self.example_variance) * of_examples
        return float(brentq(lambda half: self.tail(half) - tail, 0.0, limit, xtol=1e-15 * limit))

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the 95% interval, of a higher level after several looks."""
        half = self.half_width()
        return self.difference - half, self.difference + half

    def with_seeds(self, seeds: int) -> "MethodTest":
        """Return the test that another number of seeds with the same scatter and difference would give."""
        return MethodTest(self.difference, seeds, self.seed_variance * self.seeds / seeds, self.example_variance)

    def power(self, margin: float | None, alpha: float = ALPHA) -> float:
        """Return about how likely a new test of this size is to decide, if difference and scatter are the true ones."""
        sd, size = sqrt(self.seed_variance + self.example_variance), abs(self.difference)
        different = self.half_width(alpha)
        same = -inf if margin is None else margin - self.half_width(2 * alpha)
        if same > different:  # each outcome decides
            return 1.0
        power = float(ndtr((size - different) / sd) + ndtr((-size - different) / sd))
        return power + (float(ndtr((same - size) / sd) - ndtr((-same - size) / sd)) if same > 0 else 0.0)

    def seeds_needed(self, margin: float | None = None, alpha: float = ALPHA) -> int | None:
        """Return about how many seeds, more than now, would decide with probability ``POWER``.

        Args:
            alpha: level of each test: less than 0.05 if several tests are corrected together.
        Returns:
            None if more than ``MAX_SEEDS``, or if these examples are too few for any number of seeds.
        """
        numbers = range(self.seeds + 1, MAX_SEEDS + 1)
        return next((seeds for seeds in numbers if self.with_seeds(seeds).power(margin, alpha) >= POWER), None)
