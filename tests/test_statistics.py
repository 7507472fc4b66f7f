"""Means over seeds and tests over seeds and examples, against numbers by hand, scipy, and simulated errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_runner.report import statistics
from distill_runner.report.statistics import MethodTest, Spread, holm


def test_spread_by_hand() -> None:
    spread = Spread.from_values([66.0, 68.0, 70.0])
    # Variance (4 + 0 + 4) / 2 = 4; t(0.975, 2) = 4.302653 of the printed tables; 4.302653 * 2 / sqrt(3) = 4.968276.
    assert (spread.count, spread.mean, spread.sd) == (3, 68.0, 2.0)
    assert spread.interval == pytest.approx(4.968276, abs=1e-5)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12))
def test_the_interval_is_scipys(values: list[float]) -> None:
    from scipy import stats

    spread = Spread.from_values(values)
    if np.ptp(values) < 1e-9:
        assert spread.interval is None
        return
    assert spread.interval is not None
    low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert (spread.mean - spread.interval, spread.mean + spread.interval) == pytest.approx((low, high))


def test_holm_by_hand() -> None:
    # In order 0.01 x 4, 0.02 x 3, 0.03 x 2 (no less than the one before), 0.9 x 1.
    assert holm([0.02, 0.9, 0.01, 0.03]) == pytest.approx([0.06, 0.9, 0.04, 0.06])
    assert holm([0.4, 0.6]) == pytest.approx([0.8, 0.8])
    assert holm([0.8, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_rejects_what_stepping_down_rejects(p_values: list[float]) -> None:
    """Holm's own rule: go up from the smallest p-value and stop at the first above alpha / (how many are left)."""
    corrected = holm(p_values)
    for alpha in (0.01, 0.05, 0.3):
        rejected: set[int] = set()
        for place in sorted(range(len(p_values)), key=lambda number: p_values[number]):
            if p_values[place] * (len(p_values) - len(rejected)) > alpha:
                break
            rejected.add(place)
        assert {place for place, p in enumerate(corrected) if p <= alpha} == rejected


VARIANCES = st.floats(1e-8, 1e-2)


@given(st.integers(2, 40), VARIANCES, st.floats(-0.5, 0.5))
def test_without_a_part_of_the_examples_it_is_the_t_test(seeds: int, variance: float, difference: float) -> None:
    """scipy's Student t is the other route; every p-value and interval of the pages comes from this integral."""
    from scipy import special, stats

    test, scale = MethodTest(difference, seeds, variance, 0.0), variance**0.5
    square = (difference / scale) ** 2  # of small ones, the survival function has few digits
    inner = special.betainc(0.5, (seeds - 1) / 2, square / (seeds - 1 + square))
    p = 1 - inner if inner < 0.5 else 2 * stats.t.sf(square**0.5, seeds - 1)
    assert test.p == pytest.approx(p, rel=1e-9)
    half = stats.t.ppf(0.975, seeds - 1) * scale
    assert test.interval == pytest.approx((difference - half, difference + half), rel=1e-9, abs=1e-12)


def test_the_error_is_a_sum_of_t_and_normal() -> None:
    """Four million draws of the sum that the distribution of Behrens and Fisher describes."""
    draw = np.random.default_rng(0)
    test = MethodTest(0.0, 3, 0.2, 1.0)
    errors = draw.standard_normal(1_000_000) + np.sqrt(0.2) * draw.standard_t(2, 1_000_000)
    for error in (0.5, 2.0, 6.0):
        share = (errors >= error).mean()
        assert test.tail(error) == pytest.approx(share, abs=4 * (share / 1e6) ** 0.5)


@given(st.integers(2, 20), VARIANCES, VARIANCES, st.floats(-0.05, 0.05), st.floats(1e-4, 0.05))
def test_p_values_and_intervals_agree(
    seeds: int, of_seeds: float, of_examples: float, difference: float, margin: float
) -> None:
    """p < 0.05 exactly if the 95% interval excludes 0, and two one-sided tests exactly if the 90% one is inside."""
    test = MethodTest(difference, seeds, of_seeds, of_examples)
    low, high = test.interval
    assert high > low
    if abs(test.p - 0.05) > 1e-6:
        assert (test.p < 0.05) == (low > 0 or high < 0)
    half = test.half_width(0.1)
    if abs(test.p_same(margin) - 0.05) > 1e-6:
        assert (test.p_same(margin) < 0.05) == (-margin < difference - half and difference + half < margin)
        assert test.p_not_worse(margin) <= test.p_same(margin) + 1e-15


def test_looks_multiply_p_and_widen_the_interval() -> None:
    """Who adds seeds after a look at three must pay for it; three looks at 0.05 / 3 are at most 0.05 in all."""
    once, thrice = MethodTest(0.02, 5, 1e-5, 1e-5), MethodTest(0.02, 5, 1e-5, 1e-5, looks=3)
    assert thrice.p == pytest.approx(3 * once.p)
    assert thrice.half_width() == pytest.approx(once.half_width(0.05 / 3))
    assert thrice.p_same(0.025) == pytest.approx(3 * once.p_same(0.025))
    assert thrice.p_not_worse(0.0) == pytest.approx(3 * once.p_not_worse(0.0))
    assert (thrice.p_same(0.0), thrice.p_not_worse(-0.1), MethodTest(0.0, 5, 1e-5, 1e-5, looks=3).p) == (1, 1, 1)


@pytest.mark.parametrize("difference", [0.001, -0.004, 0.01])
@pytest.mark.parametrize("margin", [None, 0.005, 0.015])
def test_power_is_the_probability_of_either_outcome(difference: float, margin: float | None) -> None:
    """With a wrong power, a table advises a number of seeds that does not decide."""
    from scipy.stats import norm

    test = MethodTest(difference, 5, 0.004**2, 0.003**2)
    new, half = norm(difference, 0.005), test.half_width()
    expected = new.sf(half) + new.cdf(-half)
    if margin is not None and (same := margin - test.half_width(0.1)) > 0:
        assert same < half
        expected += new.cdf(same) - new.cdf(-same)
    assert test.power(margin) == pytest.approx(expected)
    assert test.power(0.03) == 1.0


def test_the_fewest_seeds_that_decide_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number one too large wastes a training run; the largest number still counts."""
    assert MethodTest(0.5, 2, 1e-6, 1e-6).seeds_needed() == 3
    pilot = MethodTest(0.0, 5, 0.006**2, 0.001**2)
    seeds = pilot.seeds_needed(0.01)
    assert seeds is not None
    assert pilot.with_seeds(seeds - 1).power(0.01) < statistics.POWER <= pilot.with_seeds(seeds).power(0.01)
    monkeypatch.setattr(statistics, "MAX_SEEDS", seeds)
    assert pilot.seeds_needed(0.01) == seeds
    monkeypatch.setattr(statistics, "MAX_SEEDS", seeds - 1)
    assert pilot.seeds_needed(0.01) is None


def test_the_variances_of_a_design_by_hand() -> None:
    """Two seeds, differences 1 and 3; on two samples of examples (2, 4) and (0, 2)."""
    test = MethodTest.from_seeds([1.0, 3.0], np.array([[2.0, 4.0], [0.0, 2.0]]))
    # Over seeds: variance 2, of the mean 1. Over samples: means 3 and 1, variance 2; each seed alone has 2 as well, so
    # that no part belongs to seed and example together.
    assert (test.difference, test.seed_variance, test.example_variance) == (2.0, 1.0, 2.0)
    # Where the seeds' samples are opposite, all belongs to both together, and none to the examples.
    test = MethodTest.from_seeds([1.0, 3.0], np.array([[2.0, 2.0], [0.0, 4.0]]))
    assert (test.seed_variance, test.example_variance) == (1.0, 0.0)
    # In part: means 3 and 0.5, variance 3.125; each seed alone has 8 and 0.5, and both together 4.25 - 3.125.
    assert MethodTest.from_seeds([1.0, 3.0], np.array([[4.0, 2.0], [0.0, 1.0]])).example_variance == 2.0


def test_equal_differences_of_seeds_are_rounded_numbers() -> None:
    """On 100 examples, two seeds with the same difference may differ by less than one example."""
    test = MethodTest.from_seeds([0.03, 0.03], np.zeros((5, 2)), step=0.01)
    assert test.seed_variance == pytest.approx(0.01**2 / 12 / 2)


def test_so_many_seeds_would_decide() -> None:
    """Simulated: with the number that is named, four of five new experiments decide."""
    seeds = MethodTest(0.012, 5, 0.006**2, 0.002**2).seeds_needed(0.005)
    assert seeds is not None
    draw, decided = np.random.default_rng(0), 0
    for _ in range(300):
        scores = 0.012 + 0.002 * draw.standard_normal() + 0.006 * 5**0.5 * draw.standard_normal(seeds)
        new = MethodTest(scores.mean(), seeds, scores.var(ddof=1) / seeds, 0.002**2)
        decided += new.p < 0.05 or new.p_same(0.005) < 0.05
    assert 0.74 < decided / 300 < 0.9
