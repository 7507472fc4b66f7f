"""Simulate how often the tests of a table are wrong, and how often its intervals contain the true difference.

python -m benchmarks.error_rates                            prints the tables (under two minutes of one core)
python -m benchmarks.error_rates --write docs/statistics.md puts them into the page

Examples differ in difficulty, seeds in accuracy, and each model errs at random. Method, example and seed add to a
normal latent variable, and an answer is right if it is positive. The parameters fit 2-layer students of SST-2 (872
sentences, accuracy 79, two seeds disagree on 8 to 10% of the sentences).
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import ndtr, ndtri
from scipy.stats import t as student

from distill_runner.common.terminal import markdown_table
from distill_runner.report.resampling import PairedScores, clustered_scores, paired_scores
from distill_runner.report.statistics import ALPHA, MethodTest

EXAMPLES, SIMULATIONS, DRAWS, SMALL = 872, 2_000, 1_000, 400
SEEDS, SCATTERS = (2, 3, 5, 10), (1.0, 2.0, 3.0)
DIFFICULTY, ACCURACY = 4.0, 0.79
AGREEING, DIFFERENT = 0.3, 1.5
"""Standard deviations of the part of method and example: methods that fail on the same examples, and on others."""
START, END = "<!-- error rates -->", "<!-- end of error rates -->"


@dataclass(frozen=True)
class Population:
    """Two methods of which seeds and examples are drawn.

    Attributes:
        scatter: standard deviation over seeds of the accuracy on all examples, in points.
        specific: standard deviation of the part of method and example.
        difference: of the two methods' accuracies, in points.
    """

    scatter: float
    specific: float = AGREEING
    difference: float = 0.0

    @property
    def example_sd(self) -> float:
        """Standard deviation of the latent variable of one model."""
        return float(np.sqrt(1 + DIFFICULTY**2 + self.specific**2))

    @property
    def seed_sd(self) -> float:
        density = np.exp(-(ndtri(ACCURACY) ** 2) / 2) / np.sqrt(2 * np.pi)
        return self.scatter / 100 / density * self.example_sd

    def draw(self, generator: np.random.Generator, size: int, seeds: int, examples: int = EXAMPLES) -> "Sample":
        shape = (size, 1, examples)
        difficulty = DIFFICULTY * generator.standard_normal(shape, dtype=np.float32)
        is_correct, levels = [], []
        for sign in (1, -1):
            accuracy = ACCURACY + sign * self.difference / 200
            level = ndtri(accuracy) * np.hypot(self.example_sd, self.seed_sd)
            latent = difficulty + self.specific * generator.standard_normal(shape, dtype=np.float32)
            seed = level + self.seed_sd * generator.standard_normal((size, seeds, 1), dtype=np.float32)
            noise = generator.standard_normal((size, seeds, examples), dtype=np.float32)
            is_correct.append(latent + seed.astype(np.float32) + noise > 0)
            levels.append((latent[:, 0] + np.float32(level), seed[..., 0]))
        return Sample(self, is_correct[0], is_correct[1], levels)


@dataclass(frozen=True)
class Sample:
    """Answers (simulations, seeds, examples) of both methods, right or wrong, and what they were drawn from."""

    population: Population
    first: np.ndarray
    second: np.ndarray
    levels: Sequence[tuple[np.ndarray, np.ndarray]]

    @property
    def differences(self) -> np.ndarray:
        return self.first.astype(np.float32) - self.second.astype(np.float32)

    @property
    def of_other_examples(self) -> np.ndarray:
        """Expected difference of these models on other examples."""
        one, other = (ndtr(seeds / self.population.example_sd).mean(axis=1) for _, seeds in self.levels)
        return np.asarray(one - other)

    @property
    def expected_of_other_seeds(self) -> tuple[np.ndarray, np.ndarray]:
        """Expected accuracies of other seeds of both methods on these examples."""
        spread = np.hypot(1, self.population.seed_sd)
        one, other = (np.asarray(ndtr(examples / spread).mean(axis=1)) for examples, _ in self.levels)
        return one, other

    @property
    def of_other_seeds(self) -> np.ndarray:
        """Expected difference of other seeds on these examples."""
        return np.subtract(*self.expected_of_other_seeds)


# --- Tests of many simulations at once


def method_tests(differences: np.ndarray, looks: int = 1) -> list[MethodTest]:
    """Return the test over seeds and examples of each simulation; variances of means take the bootstrap's place."""
    seeds, examples = differences.shape[1:]
    of_seeds = differences.mean(axis=2)
    seed_variance = np.maximum(of_seeds.var(axis=1, ddof=1), 1 / examples**2 / 12) / seeds
    of_mean = differences.mean(axis=1).var(axis=1) / examples
    residual = (differences.var(axis=2).mean(axis=1) / examples - of_mean) / (seeds - 1)
    parts = zip(of_seeds.mean(axis=1), seed_variance, np.maximum(of_mean - residual, 0), strict=True)
    return [MethodTest(float(mean), seeds, float(one), float(other), looks) for mean, one, other in parts]


def permutation_p(differences: np.ndarray) -> np.ndarray:
    """P-values of sign flips of the examples' mean differences; the same flips for all simulations."""
    means = differences.mean(axis=1)
    flips = np.random.default_rng(1).integers(2, size=(DRAWS, means.shape[1]), dtype=np.int8).astype(np.float32) * 2 - 1
    is_extreme = np.abs(flips @ means.T) >= np.abs(means.sum(axis=1)) - 1e-4
    return np.asarray((1 + is_extreme.sum(axis=0)) / (1 + DRAWS))


def resampled(differences: np.ndarray, draws_seeds: bool) -> np.ndarray:
    """Bootstrap distributions (draws, simulations) of the difference, over examples and, if asked for, over seeds."""
    size, seeds, examples = differences.shape
    generator = np.random.default_rng(2)
    counts = generator.multinomial(examples, np.full(examples, 1 / examples), DRAWS).astype(np.float32) / examples
    if not draws_seeds:
        return np.asarray(counts @ differences.mean(axis=1).T)
    of_seeds = generator.multinomial(seeds, np.full(seeds, 1 / seeds), DRAWS).astype(np.float32) / seeds
    total = np.zeros((DRAWS, size), dtype=np.float32)
    for seed in range(seeds):
        total += of_seeds[:, seed, None] * (counts @ differences[:, seed].T)
    return total


def t_test_p(differences: np.ndarray, truth: np.ndarray | float = 0.0) -> np.ndarray:
    """P-values of the paired t-test over seeds; 1 if all seeds have the same difference."""
    means, seeds = differences.mean(axis=2), differences.shape[1]
    error = means.std(axis=1, ddof=1) / np.sqrt(seeds)
    ratio = np.divide(np.abs(means.mean(axis=1) - truth), error, out=np.zeros(len(error)), where=error > 1e-7)
    return np.asarray(2 * student.sf(ratio, seeds - 1))


def clark_p(differences: np.ndarray) -> np.ndarray:
    """P-values of min F' (Clark 1973): the sum of both variances, with Satterthwaite's degrees of freedom."""
    seeds, examples = differences.shape[1:]
    of_seeds = differences.mean(axis=2)
    one = of_seeds.var(axis=1, ddof=1) / seeds
    other = differences.mean(axis=1).var(axis=1) / examples
    freedom = (one + other) ** 2 / np.maximum(one**2 / (seeds - 1) + other**2 / (examples - 1), 1e-30)
    return np.asarray(2 * student.sf(np.abs(of_seeds.mean(axis=1)) / np.sqrt(one + other), freedom))


def is_excluded(distribution: np.ndarray, value: np.ndarray | float = 0.0) -> np.ndarray:
    """Whether percentile intervals of 95% exclude a value."""
    low, high = np.quantile(distribution, [ALPHA / 2, 1 - ALPHA / 2], axis=0)
    return np.asarray((value < low - 1e-7) | (value > high + 1e-7))


# --- Tables


def false_positives(population: Population, seeds: int) -> dict[str, float]:
    """Share of simulations in which each test says that the methods differ, though they do not."""
    sample = population.draw(np.random.default_rng([3, seeds]), SIMULATIONS, seeds)
    differences = sample.differences
    over_examples, over_seeds = permutation_p(differences), t_test_p(differences)
    signs = np.sign(differences.mean(axis=2)).sum(axis=1)
    is_significant = {
        "permutation test over examples": over_examples <= ALPHA,
        "the same, and all seeds agree": (over_examples <= ALPHA) & (np.abs(signs) == seeds),
        "paired t-test over seeds": over_seeds <= ALPHA,
        "both of these tests": np.maximum(over_examples, over_seeds) <= ALPHA,
        "hierarchical bootstrap": is_excluded(resampled(differences, draws_seeds=True)),
        "min F' with Satterthwaite's degrees of freedom": clark_p(differences) <= ALPHA,
        "**over seeds and examples**": np.array([test.p for test in method_tests(differences)]) <= ALPHA,
    }
    return {name: float(values.mean()) for name, values in is_significant.items()}


def coverage(population: Population, seeds: int) -> dict[str, float]:
    """Share of simulations in which each interval contains what it is an interval of."""
    sample = population.draw(np.random.default_rng([4, seeds]), SIMULATIONS, seeds)
    differences, truth = sample.differences, population.difference / 100
    over_examples = resampled(differences, draws_seeds=False)
    tests = method_tests(differences)
    own = np.array([2 * test.tail(abs(test.difference - truth)) for test in tests])
    t_of_row = t_test_p(sample.first.astype(np.float32), sample.expected_of_other_seeds[0])
    is_outside = {
        "Student's t of one row's mean: other seeds on these examples": t_of_row <= ALPHA,
        "Student's t of a difference: other seeds on these examples": t_test_p(differences, sample.of_other_seeds)
        <= ALPHA,
        "the same interval: other seeds and other examples": t_test_p(differences, truth) <= ALPHA,
        "bootstrap over examples: these models on other examples": is_excluded(over_examples, sample.of_other_examples),
        "the same interval: other seeds and examples": is_excluded(over_examples, truth),
        "hierarchical bootstrap: other seeds and examples": is_excluded(resampled(differences, True), truth),
        "**over seeds and examples**": own <= ALPHA,
    }
    return {name: 1 - float(values.mean()) for name, values in is_outside.items()}


def conclusions(difference: float, margin: float, seeds: int, scatter: float) -> dict[str, float]:
    """Share of each conclusion of ``distill-run compare --margin`` for a true difference in points."""
    population = Population(scatter, difference=difference)
    sample = population.draw(np.random.default_rng([5, seeds]), SIMULATIONS, seeds)
    tests = method_tests(sample.differences)
    words = [_conclusion(test, margin / 100) for test in tests]
    rates = {word: words.count(word) / len(words) for word in ("better", "worse", "the same", "undecided")}
    return rates | {"not worse": sum(test.p_not_worse(margin / 100) <= ALPHA for test in tests) / len(tests)}


def _conclusion(test: MethodTest, margin: float) -> str:
    if test.p <= ALPHA:
        return "better" if test.difference > 0 else "worse"
    return "the same" if test.p_same(margin) <= ALPHA else "undecided"


def sequential(scatter: float, seeds: tuple[int, int] = (3, 5)) -> dict[str, float]:
    """Share of false differences if seeds are added where the first ones show none."""
    sample = Population(scatter).draw(np.random.default_rng(6), 2 * SIMULATIONS, seeds[1])
    differences = sample.differences
    few = differences[:, : seeds[0]]
    t_tests = [t_test_p(few), t_test_p(differences)]
    methods = [np.array([test.p for test in method_tests(part)]) for part in (few, differences)]
    rates = {
        f"paired t-test: {seeds[1]} seeds": t_tests[1] <= ALPHA,
        f"paired t-test: {seeds[0]} seeds, then {seeds[1]}": np.minimum(*t_tests) <= ALPHA,
        "the same with p-values times two": np.minimum(*t_tests) <= ALPHA / 2,
        f"over seeds and examples: {seeds[1]} seeds": methods[1] <= ALPHA,
        f"over seeds and examples: {seeds[0]} seeds, then {seeds[1]}": np.minimum(*methods) <= ALPHA,
        "the same with `--looks 2`": np.minimum(*methods) <= ALPHA / 2,
    }
    return {name: float(values.mean()) for name, values in rates.items()}


def other_scores(scatter: float = 1.0, seeds: int = 5) -> dict[str, dict[str, float]]:
    """Rates of false differences of the functions that a table calls, for other scores and numbers of examples."""

    def matthews(first: np.ndarray, second: np.ndarray) -> PairedScores:
        labels = np.arange(first.shape[-1]) % 10 < 7  # as in CoLA
        one, other = (np.eye(2)[np.where(runs, labels, ~labels).astype(int)] for runs in (first, second))
        return paired_scores("matthews", [*one], [*other], labels.astype(int))

    def clustered(first: np.ndarray, second: np.ndarray) -> PairedScores:
        texts = np.sort(np.random.default_rng(7).integers(first.shape[-1] // 5, size=first.shape[-1]))
        return clustered_scores([*first.astype(float)], [*second.astype(float)], texts)

    def accuracy(first: np.ndarray, second: np.ndarray) -> PairedScores:
        return clustered_scores([*first.astype(float)], [*second.astype(float)], np.arange(first.shape[-1]))

    cases: dict[str, tuple[int, Callable[[np.ndarray, np.ndarray], PairedScores]]] = {
        "accuracy, 277 examples": (277, accuracy),
        "Matthews correlation, 1,043 examples": (1043, matthews),
        "mean over 2,000 questions on 400 texts": (2000, clustered),
    }
    return {name: _rates(Population(scatter), seeds, *case) for name, case in cases.items()}


def _rates(
    population: Population,
    seeds: int,
    examples: int,
    pair: Callable[[np.ndarray, np.ndarray], PairedScores],
) -> dict[str, float]:
    over_one, over_both = [], []
    equal = Population(0.0, population.specific).draw(np.random.default_rng([7, examples]), SMALL, 1, examples)
    for first, second in zip(equal.first, equal.second, strict=True):
        scores = pair(first, second)
        scores.draws = DRAWS
        over_one.append(scores.test().p)
    sample = population.draw(np.random.default_rng([8, examples]), SMALL, seeds, examples)
    for first, second in zip(sample.first, sample.second, strict=True):
        scores = pair(first, second)
        scores.draws = DRAWS
        one, other = scores.observed[:seeds], scores.observed[seeds:]
        resampled_differences = scores.resampled[:, :seeds] - scores.resampled[:, seeds:]
        over_both.append(MethodTest.from_seeds((one - other).tolist(), resampled_differences, step=1 / examples).p)
    over_both_name = f"over seeds and examples, {seeds} seeds, ±{population.scatter:g}"
    p_values = {"permutation test over examples, equal models": over_one, over_both_name: over_both}
    return {name: float(np.mean(np.array(values) <= ALPHA)) for name, values in p_values.items()}


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def percents(shares: Iterable[float]) -> str:
    return ", ".join(map(percent, shares))


def listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def by_design(rates: Callable[[Population, int], dict[str, float]], specific: float, title: str) -> str:
    """Return a table of rates in percent, with a column for each scatter; its numbers are those of ``SEEDS``."""
    columns = [[rates(Population(scatter, specific), seeds) for seeds in SEEDS] for scatter in SCATTERS]
    rows = [[name, *(percents(of_seeds[name] for of_seeds in column) for column in columns)] for name in columns[0][0]]
    return markdown_table([title, *(f"±{scatter:g}: {listed(SEEDS)} seeds" for scatter in SCATTERS)], rows)


def sections() -> Iterator[str]:
    """Yield the tables of the page."""
    yield by_design(false_positives, AGREEING, "methods that fail on the same examples, %")
    yield by_design(false_positives, DIFFERENT, "methods that fail on different examples, %")
    yield by_design(coverage, AGREEING, "intervals of 95%")
    rows = []
    for difference in (-1.0, 0.0, 1.0, 2.0, 4.0):
        by_seeds = [conclusions(difference, margin=1.0, seeds=seeds, scatter=1.0) for seeds in SEEDS]
        rows.append([f"{difference:g}", *(percents(shares[word] for shares in by_seeds) for word in by_seeds[0])])
    yield markdown_table([f"true difference; {listed(SEEDS)} seeds", *by_seeds[0]], rows)
    looks = {f"±{scatter:g}": sequential(scatter) for scatter in SCATTERS}
    names = next(iter(looks.values()))
    yield markdown_table(["%", *looks], [[name, *(percent(looks[one][name]) for one in looks)] for name in names])
    others = other_scores()
    tests = [*next(iter(others.values()))]
    rows = [[name, *(percent(rates[test]) for test in tests)] for name, rates in others.items()]
    yield markdown_table(["%", *tests], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page whose tables are replaced, in order")
    options = parser.parse_args(arguments)
    tables = [*sections()]
    if options.write is None:
        print("\n\n".join(tables))
        return
    head, *parts = options.write.read_text(encoding="utf-8").split(START)
    for table, part in zip(tables, parts, strict=True):
        head += f"{START}\n{table}\n{END}{part.partition(END)[2]}"
    options.write.write_text(head, encoding="utf-8")


if __name__ == "__main__":
    main()
