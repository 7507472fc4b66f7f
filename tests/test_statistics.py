"""Means over seeds and paired tests, against numbers by hand and independent references in float64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_runner.datasets.metrics import METRICS
from distill_runner.report import statistics
from distill_runner.report.statistics import Spread, clustered_bootstrap, holm, paired_bootstrap


def test_spread_by_hand() -> None:
    spread = Spread.from_values([66.0, 68.0, 70.0])
    # Variance (4 + 0 + 4) / 2 = 4; t(0.975, 2) = 4.302653 of the printed tables; 4.302653 * 2 / sqrt(3) = 4.968276.
    assert (spread.count, spread.mean, spread.sd) == (3, 68.0, 2.0)
    assert spread.interval == pytest.approx(4.968276, abs=1e-5)


def test_one_value_has_no_spread() -> None:
    assert Spread.from_values([66.0]) == Spread(1, 66.0, None, None)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12))
def test_the_interval_is_scipys(values: list[float]) -> None:
    from scipy import stats

    spread = Spread.from_values(values)
    assert spread.interval is not None
    if np.ptp(values) < 1e-6:
        assert spread.interval == pytest.approx(0, abs=1e-5)
        return
    low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert (spread.mean - spread.interval, spread.mean + spread.interval) == pytest.approx((low, high))


def test_holm_by_hand() -> None:
    # In order 0.01 x 4, 0.02 x 3, 0.03 x 2 (no less than the one before), 0.9 x 1.
    assert holm([0.02, 0.9, 0.01, 0.03]) == pytest.approx([0.06, 0.9, 0.04, 0.06])
    assert holm([0.4, 0.6]) == pytest.approx([0.8, 0.8])
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


def outputs_and_labels(metric: str, size: int = 60) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Two seeds of a better and two of a worse model; three classes for accuracy and Matthews' correlation."""
    draw = np.random.default_rng(3)
    if metric in ("pearson", "spearman"):
        scores = draw.uniform(0, 5, size).astype(np.float32)
        noisy = [(scores + draw.normal(0, sd, size)).astype(np.float32)[:, None] for sd in (1, 1.5, 2.5, 3)]
        return noisy[:2], noisy[2:], scores
    classes = 2 if metric == "f1" else 3
    labels = draw.integers(classes, size=size)
    models = []
    for noise in (1, 1.2, 2, 2.2):
        models.append((np.eye(classes)[labels] + draw.normal(0, noise, (size, classes))).astype(np.float32))
    return models[:2], models[2:], labels


def reference(metric: str, first: list[np.ndarray], second: list[np.ndarray], labels: np.ndarray) -> np.ndarray:
    """The differences of 100 resamples, example by example, with scikit-learn's and scipy's own metrics."""
    draw, size = np.random.default_rng(statistics.SEED), len(labels)
    of = METRICS[metric]
    rows = draw.integers(size, size=(100, size))
    return np.array(
        [np.mean([of(m[r], labels[r]) for m in first]) - np.mean([of(m[r], labels[r]) for m in second]) for r in rows]
    )


@pytest.mark.parametrize("metric", ["accuracy", "f1", "f1_weighted", "matthews", "pearson", "spearman"])
def test_bootstrap_is_that_of_a_plain_loop(metric: str) -> None:
    first, second, labels = outputs_and_labels(metric)
    found = paired_bootstrap(metric, first, second, labels, resamples=100)
    differences = reference(metric, first, second, labels)
    of = METRICS[metric]
    observed = np.mean([of(m, labels) for m in first]) - np.mean([of(m, labels) for m in second])
    assert found.difference == pytest.approx(observed, abs=1e-12)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(differences, [0.025, 0.975])), abs=1e-12)
    far = sum(abs(difference - observed) >= abs(observed) - 1e-12 for difference in differences)
    assert found.p == (1 + far) / 101
    assert found.examples == len(labels)


def test_bootstrap_in_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, labels = outputs_and_labels("matthews")
    whole = paired_bootstrap("matthews", first, second, labels, resamples=101)
    monkeypatch.setattr(statistics, "CHUNK", 7 * len(labels))
    assert paired_bootstrap("matthews", first, second, labels, resamples=101) == whole


def test_examples_of_one_cluster_are_drawn_together() -> None:
    """Three copies of each example tell no more than one; taken for thirds of 90 examples they would seem to."""
    rng = np.random.default_rng(0)
    one, other = [rng.random(30), rng.random(30)], [rng.random(30), rng.random(30)]
    single = clustered_bootstrap(one, other, np.arange(30))
    more, less = ([np.repeat(scores, 3) for scores in seeds] for seeds in (one, other))
    copies = clustered_bootstrap(more, less, np.repeat(np.arange(30), 3))
    assert (copies.units, copies.examples, single.examples) == (30, 90, 30)
    assert (copies.difference, copies.low, copies.high) == pytest.approx((single.difference, single.low, single.high))
    assert copies.p == pytest.approx(single.p)
    assert single.difference == pytest.approx(np.mean(one) - np.mean(other))
    unclustered = clustered_bootstrap(more, less, np.arange(90))
    assert unclustered.high - unclustered.low < 0.75 * (copies.high - copies.low)


def test_clusters_of_different_sizes_by_hand() -> None:
    """Two clusters of 1 and 3 examples: drawn twice, once each, or the other twice, with means 1, 1/4 and 0."""
    found = clustered_bootstrap([np.array([1.0, 0, 0, 0])], [np.zeros(4)], np.array([7, 3, 3, 3]))
    assert (found.difference, found.low, found.high) == (0.25, 0, 1)
    assert found.p == pytest.approx(1 / 2, abs=0.02)  # as far from 1/4 as 0 is: the two draws of one cluster alone


def test_a_constant_prediction_has_no_correlation_in_any_resample() -> None:
    labels = np.array([0, 1] * 10)
    constant = [np.tile([1.0, 0.0], (20, 1))]
    assert paired_bootstrap("matthews", constant, constant, labels, resamples=50).difference == 0


def test_equal_models_do_not_differ() -> None:
    first, _, labels = outputs_and_labels("accuracy")
    found = paired_bootstrap("accuracy", first, first, labels, resamples=100)
    assert (found.difference, found.low, found.high, found.p) == (0, 0, 0, 1)


def test_under_the_null_small_p_values_are_rare() -> None:
    """Two models that are right as often: of 200 data sets about 10 have p < 0.05, and 22 would be 4 sd more."""
    draw, rejected = np.random.default_rng(0), 0
    for _ in range(200):
        labels = draw.integers(2, size=100)
        models = [np.eye(2)[np.where(draw.random(100) < 0.7, labels, 1 - labels)] for _ in range(2)]
        rejected += paired_bootstrap("accuracy", [models[0]], [models[1]], labels, resamples=400).p < 0.05
    assert rejected <= 22
