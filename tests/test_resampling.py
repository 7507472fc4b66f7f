"""Paired tests over examples, against exact tests of scipy, plain loops, and simulated errors."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from scipy.stats import pearsonr, rankdata, spearmanr, zscore
from sklearn import metrics as sk

from distill_runner.datasets.metrics import METRICS, REGRESSION_METRICS, SUMMED, f1_of_counts
from distill_runner.report import resampling
from distill_runner.report.resampling import PairedScores, SummedScores, clustered_scores, paired_scores
from helpers.small_runs import few_fast

MULTILABEL = ("f1_micro", "subset_accuracy")


def right_or_wrong(first: np.ndarray, second: np.ndarray) -> PairedScores:
    """One run each, which are right (1) or wrong (0)."""
    one, other = ([np.eye(2)[1 - run.astype(int)]] for run in (first, second))
    return paired_scores("accuracy", one, other, np.zeros(len(first), dtype=int))


@pytest.mark.parametrize(("size", "p"), [(2, 0.5), (5, 0.0625), (6, 0.03125)])
@pytest.mark.parametrize("equal", [0, 100])
def test_few_differing_examples_have_an_exact_p(size: int, p: float, equal: int) -> None:
    """Of five of five differing examples the bootstrap said p 0.0001, with an interval of width 0."""
    test = right_or_wrong(np.ones(size + equal), np.repeat([0, 1], [size, equal])).test()
    assert (test.p, test.is_exact, test.differing) == (p, True, size)
    assert test.low is not None
    assert test.high is not None
    assert test.low < size / (size + equal) <= test.high


@given(st.integers(0, 40), st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_right_or_wrong_is_mcnemars_exact_test(better: int, worse: int) -> None:
    from scipy.stats import binomtest

    first = np.repeat([1, 0, 1], [better, worse, 10])
    test = right_or_wrong(first, np.repeat([0, 1, 1], [better, worse, 10])).test()
    reference = binomtest(better, better + worse).pvalue if better + worse else 1
    assert test.p == pytest.approx(reference, rel=1e-12)


@pytest.mark.parametrize(
    ("scores", "clusters", "p", "low"),
    [
        (np.zeros(872), np.arange(872), 1, 0.0125 ** (1 / 872) - 1),  # Clopper and Pearson's bound of 0 in 872
        (np.ones(100), np.zeros(100), 1, None),  # a hundred questions about one text are one unit
        (np.ones(24), np.arange(24) // 2, 2**-11, None),  # each bootstrap sample has a difference of 1
        (np.array([1.0, 2, 4]), np.arange(3), 2 / 8, None),  # two of the eight signs reach 7
    ],
)
def test_few_differing_units(scores: np.ndarray, clusters: np.ndarray, p: float, low: float | None) -> None:
    """An interval of width 0 would say that no other example could make a difference."""
    test = clustered_scores([scores], [np.zeros(len(scores))], clusters).test()
    assert (test.p, test.low) == (p, None if low is None else pytest.approx(low))


def test_models_that_always_differ_have_an_interval() -> None:
    """All of 30 examples differ by 1, and so does each bootstrap sample."""
    test = right_or_wrong(np.ones(30), np.zeros(30)).test()
    assert test.low is not None
    assert test.low < 0.9
    assert test.high == 1


def test_the_exact_interval_covers() -> None:
    """Simulated: shares of 0.2% and 0.1% of 872, where percentiles of the few differing examples are too close."""
    draw, covered = np.random.default_rng(0), 0
    for _ in range(200):
        kinds = draw.choice([1, -1, 0], p=[0.002, 0.001, 0.997], size=872)
        test = right_or_wrong(kinds > 0, kinds < 0).test()
        assert test.low is not None
        assert test.high is not None
        covered += test.low <= 0.001 <= test.high
    assert covered >= 190


def outputs_and_labels(metric: str, size: int = 60) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Two seeds of a better and two of a worse model; three classes, but two for F1 and AUC."""
    draw = np.random.default_rng(3)
    if metric in REGRESSION_METRICS:
        scores = draw.uniform(0, 5, size).astype(np.float32)
        noisy = [(scores + draw.normal(0, sd, size)).astype(np.float32)[:, None] for sd in (1, 1.5, 2.5, 3)]
        return noisy[:2], noisy[2:], scores
    if metric in MULTILABEL:
        labels = draw.integers(2, size=(size, 3))
        models = [labels - 0.5 + draw.normal(0, noise, labels.shape) for noise in (0.3, 0.4, 0.6, 0.7)]
        return models[:2], models[2:], labels
    classes = 2 if metric in ("f1", "accuracy_f1", "auc") else 3
    labels = draw.integers(classes, size=size)
    models = []
    for noise in (1, 1.2, 2, 2.2):
        models.append((np.eye(classes)[labels] + draw.normal(0, noise, (size, classes))).astype(np.float32))
    return models[:2], models[2:], labels


ALL = [*SUMMED, "auc"]
BY_RANK = ("pearson", lambda run: zscore(rankdata(run, axis=0), axis=0))
BY_SCORE = ("pearson", lambda run: zscore(run.astype(np.float64), axis=0))
EXCHANGED: dict[str, list[tuple[str, Callable[[np.ndarray], np.ndarray]]]] = {
    "spearman": [BY_RANK],
    "pearson": [BY_SCORE],
    "pearson_spearman": [BY_RANK, BY_SCORE],
}
"""Metrics that do not depend on the scale of outputs, and what methods swap instead."""


def by_others(metric: str, outputs: np.ndarray, labels: np.ndarray) -> float:
    """The metric by scikit-learn and scipy, where they have it."""
    shares = softmax(outputs.astype(np.float64), axis=1)
    predicted = outputs > 0 if labels.ndim == 2 else outputs.argmax(axis=1)
    average = {"f1": "binary", "f1_micro": "micro", "f1_macro": "macro", "f1_weighted": "weighted"}.get(metric)
    if average:
        return float(sk.f1_score(labels, predicted, average=average, zero_division=0.0))
    functions: dict[str, Callable[[], float]] = {
        "accuracy": lambda: sk.accuracy_score(labels, predicted),
        "subset_accuracy": lambda: sk.accuracy_score(labels, predicted),
        "matthews": lambda: sk.matthews_corrcoef(labels, predicted),
        "auc": lambda: sk.roc_auc_score(labels, shares[:, 1] if shares.shape[1] == 2 else shares, multi_class="ovr"),
        "brier": lambda: sk.brier_score_loss(labels, shares, scale_by_half=False),
        "pearson": lambda: pearsonr(outputs[:, 0].astype(np.float64), labels)[0],
        "spearman": lambda: spearmanr(outputs[:, 0], labels)[0],
    }
    return functions.get(metric, lambda: METRICS[metric](outputs, labels))()


@pytest.mark.parametrize("metric", ALL)
def test_the_interval_is_that_of_a_plain_loop(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resamples one by one, with scikit-learn's and scipy's own metrics, and in blocks of seven draws."""
    monkeypatch.setattr(resampling, "CHUNK", 7 * 60)
    monkeypatch.setattr(resampling, "DRAWS", 15)
    first, second, labels = outputs_and_labels(metric)
    test = paired_scores(metric, first, second, labels).test()
    rows = np.random.default_rng(resampling.SEED).integers(len(labels), size=(15, len(labels)))

    def difference(sample: np.ndarray) -> float:
        scores = [[by_others(metric, run[sample], labels[sample]) for run in runs] for runs in (first, second)]
        return float(np.mean(scores[0]) - np.mean(scores[1]))

    mean, observed = [difference(sample) for sample in rows], difference(np.arange(len(labels)))
    assert test.difference == pytest.approx(observed, abs=1e-12)
    assert (test.low, test.high) == pytest.approx(tuple(np.quantile(mean, [0.025, 0.975])), abs=1e-12)
    assert test.variance == pytest.approx(np.var(mean, ddof=1))
    assert test.examples == len(labels)


@pytest.mark.parametrize(
    "metric", ["pearson_spearman", *few_fast([one for one in ALL if one != "pearson_spearman"], 5)]
)
@pytest.mark.parametrize("seeds", [(2, 2), (2, 1)])
def test_p_is_that_of_swapped_predictions(metric: str, seeds: tuple[int, int]) -> None:
    """All ways to swap the predictions of six of eight examples, or six ranks; the numbers of seeds may differ."""
    first, second, labels = outputs_and_labels(metric, 6 if metric in EXCHANGED else 8)
    same = first[0][6:]
    first, second = (
        [np.concatenate([run[:6], same]) for run in runs[:count]]
        for runs, count in zip((first, second), seeds, strict=True)
    )
    test = paired_scores(metric, first, second, labels).test()
    parts = EXCHANGED.get(metric, [(metric, lambda run: run)])
    pairs = [*zip(first, second, strict=True)] if seeds[0] == seeds[1] else [*product(first, second)]
    differences = []
    for swaps in product([False, True], repeat=6):
        mask = np.array([*swaps, *[False] * (len(labels) - 6)])[:, None]
        scores = []
        for name, exchanged in parts:
            gold = rankdata(labels) if (name, exchanged) == BY_RANK else labels
            for one, other in ((exchanged(one), exchanged(other)) for one, other in pairs):
                both = np.where(mask, other, one), np.where(mask, one, other)
                scores.append(by_others(name, both[0], gold) - by_others(name, both[1], gold))
        differences.append(np.mean(scores))
    assert test.p == pytest.approx(np.mean(np.abs(differences) >= abs(test.difference) - 1e-9))
    assert test.is_exact


@pytest.mark.parametrize("metric", ["auc", "spearman", "pearson_spearman"])
def test_samples_with_equal_outputs_are_scored_as_by_others(metric: str) -> None:
    """Sorted once, ranks of a sample follow from counts; equal outputs share a rank, in and between four classes."""
    draw = np.random.default_rng(2)
    labels, counts = draw.integers(4, size=80), draw.poisson(1, size=(9, 80))
    runs = [np.round(2 * np.eye(4)[labels] + draw.normal(size=(80, 4))) for _ in range(2)]
    runs = runs if metric == "auc" else [run[:, :1] for run in runs]
    scores = paired_scores(metric, runs[:1], runs[1:], labels).scores(counts)
    for rows, of_sample in zip((np.repeat(np.arange(80), one) for one in counts), scores, strict=True):
        assert of_sample == pytest.approx([by_others(metric, run[rows], labels[rows]) for run in runs], abs=1e-12)


def test_many_examples_have_fewer_draws() -> None:
    sizes = {277: 10_000, 4_000: 4_194, 10_000: 2_000, 40_000: 2_000}
    assert {size: right_or_wrong(np.ones(size), np.zeros(size)).draws for size in sizes} == sizes


def test_p_is_never_below_one_of_all_draws() -> None:
    """Sixty differing examples are 2^60 permutations; of 10,000 draws none is as extreme."""
    values = np.random.default_rng(0).uniform(0.5, 1, 60)
    test = clustered_scores([values], [np.zeros(60)], np.arange(60)).test()
    assert (test.p, test.is_exact) == (1 / 10_001, False)


@pytest.mark.parametrize("metric", REGRESSION_METRICS)
def test_a_test_does_not_depend_on_the_scale_of_outputs(metric: str) -> None:
    """Cosines of one method between 0.8 and 1, of another between -1 and 1: whoever swaps them tests their scale."""
    first, second, labels = outputs_and_labels(metric)
    plain = paired_scores(metric, first, second, labels).test()
    scaled = paired_scores(metric, [0.01 * run.astype(np.float64) + 0.9 for run in first], second, labels).test()
    assert (scaled.difference, scaled.low, scaled.high) == pytest.approx((plain.difference, plain.low, plain.high))
    assert scaled.p == pytest.approx(plain.p, abs=0.002)


def test_examples_of_one_cluster_are_drawn_together() -> None:
    """Three copies of each example tell no more than one; taken for thirds of 90 examples they would seem to."""
    rng = np.random.default_rng(0)
    one, other = [rng.random(30), rng.random(30)], [rng.random(30), rng.random(30)]
    single = clustered_scores(one, other, np.arange(30)).test()
    more, less = ([np.repeat(scores, 3) for scores in seeds] for seeds in (one, other))
    copies = clustered_scores(more, less, np.repeat(np.arange(30), 3)).test()
    assert (copies.units, copies.examples, single.examples) == (30, 90, 30)
    assert (copies.difference, copies.low, copies.high) == pytest.approx((single.difference, single.low, single.high))
    assert copies.p == pytest.approx(single.p)
    assert single.difference == pytest.approx(np.mean(one) - np.mean(other))
    unclustered = clustered_scores(more, less, np.arange(90)).test()
    assert unclustered.high - unclustered.low < 0.75 * (copies.high - copies.low)  # type: ignore[operator]


def test_f1_of_entities_is_a_ratio_of_sums_over_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences of a text belong together, and F1 is no mean over them: 2 tp / (predicted + actual) of the sums."""
    rng = np.random.default_rng(0)
    texts, actual = rng.integers(20, size=200), rng.poisson(2, 200)
    models = []
    for accuracy in (0.8, 0.75, 0.6, 0.65):
        correct = rng.binomial(actual, accuracy)
        models.append(np.stack([correct, correct + rng.poisson(0.3, 200), actual], axis=1))
    monkeypatch.setattr(resampling, "DRAWS", 200)
    test = SummedScores(models[:2], models[2:], f1_of_counts, texts).test()

    def f1(counts: np.ndarray) -> float:
        return 2 * counts[:, 0].sum() / (counts[:, 1].sum() + counts[:, 2].sum())

    def difference(rows: np.ndarray) -> float:
        scores = [f1(model[rows]) for model in models]
        return float(np.mean(scores[:2]) - np.mean(scores[2:]))

    samples = np.random.default_rng(resampling.SEED).integers(20, size=(200, 20))
    resampled = [difference(np.concatenate([np.flatnonzero(texts == text) for text in of])) for of in samples]
    assert test.difference == pytest.approx(difference(np.arange(200)))
    # Percentiles of 20 texts are as wide as intervals of Student's t with 19 degrees of freedom (Hesterberg 2015).
    tail = scipy.stats.norm.cdf(scipy.stats.t.ppf(0.025, 19) * (20 / 19) ** 0.5)
    assert (test.low, test.high) == pytest.approx(tuple(np.quantile(resampled, [tail, 1 - tail])))
    assert (test.units, test.p) == (20, 1 / 201)


@pytest.mark.parametrize("size", [6, 20, 100])
def test_under_the_null_small_p_values_are_rare(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models that are right as often: of 300 datasets about 15 have p < 0.05, and 30 would be 4 sd more."""
    monkeypatch.setattr(resampling, "DRAWS", 400)
    draw, rejected = np.random.default_rng(0), 0
    for _ in range(300):
        labels = draw.integers(2, size=size)
        models = [np.eye(2)[np.where(draw.random(size) < 0.7, labels, 1 - labels)] for _ in range(4)]
        rejected += paired_scores("accuracy", models[:2], models[2:], labels).test().p < 0.05
    assert rejected <= 30
