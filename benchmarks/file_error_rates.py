"""Simulate how often ``distill-run compare --predictions`` is wrong, on files that it reads.

python -m benchmarks.file_error_rates        prints the errors of docs/compare.md (two minutes of one core)

Samples of examples are drawn 1,000 times, not 10,000. The population is that of ``benchmarks.error_rates``.
Where each method has one file, the seeds do not scatter, so that these models differ by the true difference.
"""

import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd

from benchmarks.error_rates import Population
from distill_runner.common.terminal import markdown_table
from distill_runner.report import file_comparison, resampling

MARGIN = 1.0
SETTINGS = [(seeds, difference) for seeds in (1, 3, 5) for difference in (-1.0, 0.0, 1.0)]


def simulate(folder: Path, seeds: int, difference: float, simulations: int) -> Counter[str]:
    """Return how often each conclusion is drawn of files with the labels 0 and 1."""
    population = Population(1e-6 if seeds == 1 else 1.0, difference=difference)
    generator, counts = np.random.default_rng(0), Counter[str]()
    sample = population.draw(generator, simulations, seeds)
    for number in range(simulations):
        gold = generator.integers(2, size=(sample.first.shape[-1],))
        pd.DataFrame({"id": range(len(gold)), "label": gold}).to_csv(folder / "gold.csv", index=False)
        files: dict[str, list[Path]] = {"a": [], "b": []}
        for method, correct in zip(files, (sample.first[number], sample.second[number]), strict=True):
            for seed, right in enumerate(correct):
                files[method].append(folder / f"{method}{seed}.csv")
                table = pd.DataFrame({"id": range(len(gold)), "prediction": np.where(right, gold, 1 - gold)})
                table.to_csv(files[method][-1], index=False)
        comparison = file_comparison.compare_files(files, folder / "gold.csv", MARGIN).comparisons[0]
        counts[comparison.conclusion] += 1
        counts["not worse"] += comparison.is_not_worse
    return counts


def main(simulations: int = 200) -> None:
    file_comparison.LABEL_DRAWS, resampling.DRAWS = 2, 1_000  # the intervals of labels are not what is simulated
    outcomes, rows = ("better", "worse", "the same", "undecided", "not worse"), []
    with TemporaryDirectory() as folder:
        for seeds, difference in SETTINGS:
            counts = simulate(Path(folder), seeds, difference, simulations)
            rows.append(
                [f"{seeds}", f"{difference:+g}", *(f"{100 * counts[one] / simulations:.1f}" for one in outcomes)]
            )
            print(" ".join(rows[-1]), flush=True)
    print(markdown_table(["files of each", "true difference", *outcomes], rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
