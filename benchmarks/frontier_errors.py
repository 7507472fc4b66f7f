"""Simulate how often a frontier chooses a student that is worse than its teacher by the margin or more.

python -m benchmarks.frontier_errors                          prints the table (about a minute of one core)
python -m benchmarks.frontier_errors --write docs/frontier.md puts it into the page

Examples differ in difficulty, and each model errs at random. Five students of one teacher, larger ones first, lack some
points of the teacher's accuracy; three seeds each, in float32 and in int8, which changes a few answers. The parameters
fit students of SST-2, as in ``error_rates``.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy.special import ndtr, ndtri

from benchmarks.error_rates import DIFFICULTY
from distill_runner.common.terminal import markdown_table
from distill_runner.deploy.frontier import FrontierRow, with_tests
from distill_runner.deploy.measure import RunningCost
from distill_runner.report.statistics import ALPHA, holm

SIMULATIONS, SEEDS, TEACHER, MARGIN = 2_000, 3, 0.91, 0.01
SPECIFIC, FLIPS = 0.7, 0.005
"""Standard deviation of the part of student and example, and the share of answers that int8 changes."""
CASES = {
    "all lack exactly the margin": (1.0, 1.0, 1.0, 1.0, 1.0),
    "0, 0.3, 1, 2 and 5 points": (0.0, 0.3, 1.0, 2.0, 5.0),
    "1, 2, 3, 5 and 8 points": (1.0, 2.0, 3.0, 5.0, 8.0),
    "none lacks any": (0.0, 0.0, 0.0, 0.0, 0.0),
}
SIZES = (200, 872, 5_000)
START, END = "<!-- frontier errors -->", "<!-- end of frontier errors -->"
Rule = Callable[[Sequence[FrontierRow]], set[int]]
COST = RunningCost({50: 1.0}, 1.0)


def differences(generator: np.random.Generator, lacking: Sequence[float], examples: int) -> np.ndarray:
    """Draw one frontier: differences (2 forms, students, examples) of the seeds' mean answers to the teacher's."""
    sd, deviation = np.sqrt(1 + DIFFICULTY**2 + SPECIFIC**2), generator.standard_normal
    difficulty = DIFFICULTY * deviation(examples)
    teacher = difficulty + SPECIFIC * deviation(examples) + deviation(examples) + ndtri(TEACHER) * sd > 0
    levels = ndtri(TEACHER - np.asarray(lacking) / 100)[:, None, None] * sd
    specific = SPECIFIC * deviation((len(lacking), 1, examples))
    exact = difficulty + specific + deviation((len(lacking), SEEDS, examples)) + levels > 0
    # Equally many right and wrong answers change, so that int8 has the accuracy of float32.
    accuracy = TEACHER - np.asarray(lacking)[:, None, None] / 100
    share = FLIPS / 2 / np.where(exact, accuracy, 1 - accuracy)
    int8 = exact ^ (generator.random(exact.shape) < share)
    return np.stack([exact, int8]).mean(axis=2) - teacher


def p_not_worse(of_examples: np.ndarray) -> np.ndarray:
    """P-values of ``PairedScores.p_not_worse`` for many students at once; the variance takes the bootstrap's place."""
    examples = of_examples.shape[-1]
    variance = np.maximum(of_examples.var(axis=-1), MARGIN * (1 - MARGIN)) / examples
    return np.asarray(ndtr(-(of_examples.mean(axis=-1) + MARGIN) / np.sqrt(variance)))


def rows_of(p_values: np.ndarray) -> list[FrontierRow]:
    """Return the rows of a frontier, whose sizes fall by student and from float32 to int8."""
    return [
        FrontierRow(f"{number}", form, "cut", size - 10 * number, SEEDS, 0.0, (0.0, 0.0), 0.0, float(p), COST)
        for form, size, of_form in zip(("ONNX", "ONNX int8"), (200, 100), p_values, strict=True)
        for number, p in enumerate(of_form)
    ]


def in_chains(rows: Sequence[FrontierRow]) -> set[int]:
    return {number for number, row in enumerate(with_tests(rows)) if row.is_good}


def uncorrected(rows: Sequence[FrontierRow]) -> set[int]:
    return {number for number, row in enumerate(rows) if row.p is not None and row.p <= ALPHA}


def by_holm(rows: Sequence[FrontierRow]) -> set[int]:
    return {number for number, p in enumerate(holm([row.p or 0.0 for row in rows])) if p <= ALPHA}


IN_ORDER = "in order"
"""The rule of this package."""
RULES: dict[str, Rule] = {IN_ORDER: in_chains, "Holm": by_holm, "each at 5%": uncorrected}


def rates(lacking: Sequence[float], examples: int, simulations: int = SIMULATIONS) -> dict[str, tuple[float, float]]:
    """Return, by rule, how often the choice is a student that lacks the margin, and how often it is a better one."""
    generator = np.random.default_rng(0)
    counts = {name: [0, 0] for name in RULES}
    is_bad = [points >= 100 * MARGIN for points in (*lacking, *lacking)]
    for _ in range(simulations):
        rows = rows_of(p_not_worse(differences(generator, lacking, examples)))
        for name, rule in RULES.items():
            if good := rule(rows):
                smallest = min(good, key=lambda number: rows[number].num_bytes)
                counts[name][0 if is_bad[smallest] else 1] += 1
    return {name: (bad / simulations, fine / simulations) for name, (bad, fine) in counts.items()}


def lines() -> Iterator[list[str]]:
    """Yield a row for each case and rule, with both rates for each number of examples."""
    for case, lacking in CASES.items():
        by_size = [rates(lacking, examples) for examples in SIZES]
        for rule in RULES:
            cells = (f"{100 * bad:.1f}, {100 * fine:.1f}" for bad, fine in (of_size[rule] for of_size in by_size))
            yield [case if rule == IN_ORDER else "", rule, *cells]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="page between whose marks the table is put")
    options = parser.parse_args(arguments)
    text = markdown_table(["students lack", "rule", *(f"{size:,} examples" for size in SIZES)], lines(), text_columns=2)
    if options.write is None:
        print(text)
        return
    page = options.write.read_text(encoding="utf-8")
    head, _, rest = page.partition(START)
    options.write.write_text(f"{head}{START}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
