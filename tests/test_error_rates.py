"""The simulation of errors: its tests of many simulations at once are those that tables call."""

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import error_rates
from benchmarks.error_rates import Population, conclusions, method_tests, permutation_p, resampled, t_test_p
from distill_runner.report.resampling import clustered_scores
from distill_runner.report.statistics import MethodTest

PAGE = Path(__file__).parents[1] / "docs" / "statistics.md"
SEEDS = 5


@pytest.fixture(scope="module")
def sample() -> error_rates.Sample:
    return Population(1.0, difference=1.0).draw(np.random.default_rng(0), 8, SEEDS, 500)


def test_the_simulated_test_is_that_of_a_table(sample: error_rates.Sample) -> None:
    """Otherwise the rates of the page would be those of another test."""
    for fast, first, second in zip(method_tests(sample.differences), sample.first, sample.second, strict=True):
        one, other = [*first.astype(float)], [*second.astype(float)]
        scores = clustered_scores(one, other, np.arange(500))
        resampled_differences = scores.resampled[:, :SEEDS] - scores.resampled[:, SEEDS:]
        differences = (scores.observed[:SEEDS] - scores.observed[SEEDS:]).tolist()
        slow = MethodTest.from_seeds(differences, resampled_differences, step=1 / 500)
        assert fast.difference == pytest.approx(slow.difference, abs=1e-6)
        assert fast.seed_variance == pytest.approx(slow.seed_variance, rel=1e-4)
        total = slow.seed_variance + slow.example_variance
        assert fast.example_variance == pytest.approx(slow.example_variance, abs=0.05 * total)


def test_simulated_permutations_and_samples_are_those_of_a_table(sample: error_rates.Sample) -> None:
    p_values, distribution = permutation_p(sample.differences), resampled(sample.differences, draws_seeds=False)
    for number, (first, second) in enumerate(zip(sample.first, sample.second, strict=True)):
        test = clustered_scores([*first.astype(float)], [*second.astype(float)], np.arange(500)).test()
        assert p_values[number] == pytest.approx(test.p, abs=4 * (test.p / 1000) ** 0.5 + 0.002)
        assert test.low is not None
        assert np.quantile(distribution[:, number], 0.025) == pytest.approx(test.low, abs=0.004)


def test_the_simulated_t_test_is_scipys(sample: error_rates.Sample) -> None:
    from scipy.stats import ttest_1samp

    means = sample.differences.mean(axis=2)
    assert t_test_p(sample.differences) == pytest.approx(ttest_1samp(means, 0, axis=1).pvalue, rel=1e-3)


def test_the_population_has_the_parameters_that_the_page_names() -> None:
    """Accuracy 79, seeds that scatter by 2 points, and seeds that disagree on 8 to 10% of the examples."""
    sample = Population(2.0, difference=3.0).draw(np.random.default_rng(0), 200, 10)
    assert sample.first.mean() - sample.second.mean() == pytest.approx(0.03, abs=0.005)
    assert (sample.first.mean() + sample.second.mean()) / 2 == pytest.approx(0.79, abs=0.005)
    assert sample.first.mean(axis=2).std(axis=1).mean() == pytest.approx(0.02, abs=0.004)
    assert (sample.first[:, 0] != sample.first[:, 1]).mean() == pytest.approx(0.09, abs=0.02)


def test_the_page_has_the_tables_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line is simulated again; the command replaces all tables, in order."""
    shares = [100 * share for share in conclusions(1.0, margin=1.0, seeds=3, scatter=1.0).values()]
    (line,) = re.findall(r"^\| 1 \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    of_three = [cell.split(", ")[error_rates.SEEDS.index(3)] for cell in line.split(" | ")]
    assert [float(cell) for cell in of_three] == pytest.approx(shares, abs=0.5)
    count = PAGE.read_text().count(error_rates.START)
    monkeypatch.setattr(error_rates, "sections", lambda: iter([f"table {number}" for number in range(count)]))
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    error_rates.main(["--write", str(page)])
    assert re.findall(r"^table \d$", page.read_text(), re.MULTILINE) == [f"table {number}" for number in range(6)]
    assert len(page.read_text()) < len(PAGE.read_text())
