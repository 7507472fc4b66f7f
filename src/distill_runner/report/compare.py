"""Paired tests of whether two methods differ: over the examples that both predicted, and the seeds that both ran."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path

import numpy as np

from distill_runner.common.errors import UserError, nearest
from distill_runner.datasets.metrics import METRICS
from distill_runner.report.cells import GRID, GRID_MEAN, ResultCell, SettingScores, scored_on
from distill_runner.report.collect import Result
from distill_runner.report.rows import ResultTable, Row, beside
from distill_runner.report.statistics import Bootstrap, clustered_bootstrap, holm, paired_bootstrap, paired_t

PREDICTIONS = "predictions-*.npz"
"""Prediction files in a run's folder, one per validation split: ``outputs`` (N, C) and ``labels`` (N,).

If the score is a mean over examples that depend on each other: ``score-<metric>`` (N,) and ``clusters`` (N,) instead.
"""


@dataclass(frozen=True)
class Comparison:
    """Comparison of two rows on one task: the first minus the second.

    Attributes:
        difference: between the values in the table, in percentage points; None if one is missing or the metrics differ.
        examples: bootstrap over the examples, in fractions; None if it cannot be computed.
        shared: number of seeds that both rows ran.
        seeds_p: two-sided p-value of the paired t-test over the shared seeds; None if it cannot be computed.
        examples_holm, seeds_holm: the same p-values with Holm's correction for all comparisons made together.
        family: number of p-values that are corrected together: over examples, and over seeds.
        remarks: why a test cannot be computed, and what to beware of.
    """

    first: str
    second: str
    task: str
    remarks: tuple[str, ...]
    metric: str | None = None
    difference: float | None = None
    examples: Bootstrap | None = None
    shared: int = 0
    seeds_p: float | None = None
    examples_holm: float | None = None
    seeds_holm: float | None = None
    family: tuple[int, int] = (0, 0)


def compare(table: ResultTable, *groups: Sequence[str]) -> list[Comparison]:
    """Compare the first row of each group with the group's other rows, on each task of the table.

    The p-values of all comparisons are corrected together.

    Args:
        groups: names of rows, or of methods that have only one row.
    Raises:
        UserError: a group has fewer than two rows, or a name fits no row or several rows.
    """
    pairs = [pair for names in groups for pair in _pairs(table, names)]
    return _corrected([_on_task(task, *pair) for pair in pairs for task in table.tasks])


def _pairs(table: ResultTable, names: Sequence[str]) -> list[tuple[Row, Row]]:
    first, *others = [_row(table, name) for name in names]
    if not others or any(other is first for other in others):
        raise UserError("--compare", " ".join(names), "names one row, not two")
    return [(first, other) for other in others]


def _corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Add Holm's p-values. The two tests ask different questions, so each test is a separate family."""
    over_examples = _holm(comparisons, lambda each: each.examples.p if each.examples else None)
    over_seeds = _holm(comparisons, lambda each: each.seeds_p)
    family = len(over_examples), len(over_seeds)
    return [
        replace(each, examples_holm=over_examples.get(number), seeds_holm=over_seeds.get(number), family=family)
        for number, each in enumerate(comparisons)
    ]


def _holm(comparisons: Sequence[Comparison], p_of: Callable[[Comparison], float | None]) -> dict[int, float]:
    """Map the index of each comparison that has a p-value to its corrected p-value."""
    found = {number: p for number, each in enumerate(comparisons) if (p := p_of(each)) is not None}
    return dict(zip(found, holm(list(found.values())), strict=True))


def sentence(comparison: Comparison) -> str:
    """Describe the comparison in words, percentages and p-values."""
    head = f"{comparison.first} against {comparison.second} on {comparison.task}"
    told = []
    if comparison.difference is not None:
        told.append(f"{comparison.difference:+.2f} {comparison.metric}")
    if paired := comparison.examples:
        bounds = f"[{100 * paired.low:+.2f}, {100 * paired.high:+.2f}]"
        corrected = _of_family(comparison.examples_holm, comparison.family[0])
        over = f"{paired.examples} examples" + f" in {paired.drawn} clusters" * (paired.drawn < paired.examples)
        told.append(f"bootstrap over {over}: 95 % {bounds}, {_p(paired.p)}{corrected}")
    if comparison.seeds_p is not None:
        corrected = _of_family(comparison.seeds_holm, comparison.family[1])
        told.append(f"paired t-test over {comparison.shared} seeds: {_p(comparison.seeds_p)}{corrected}")
    return f"{head}: {'; '.join([*told, *comparison.remarks])}"


def _of_family(p: float | None, size: int) -> str:
    return "" if p is None or size < 2 else f" (Holm, {size} tests: {_p(p)})"


def _p(value: float) -> str:
    return "p < 0.0001" if value < 0.0001 else f"p {value:.4f}"


def _row(table: ResultTable, name: str) -> Row:
    named = [row for row in table.rows if name in (row.name, row.result["method"], row.name.partition(",")[0])]
    # A point that cannot run is named by its method alone, without the mapping; it must not hide the row with scores.
    scored = [row for row in named if any(cell.chosen for cell in row.cells.values())] or named
    found = [row for row in scored if row.name == name] or scored
    if len(found) == 1:
        return found[0]
    names = [row.name for row in found or table.rows]
    problem = "several rows have this name" if found else "there is no such row"
    raise UserError("--compare", name, problem, f"Known: {'; '.join(names)}." if found else nearest(name, names))


def optimism(table: ResultTable) -> list[Comparison]:
    """Compare selection on the reported examples with selection on held-out examples, where a row has both for a task.

    Runs with held-out selection train on fewer examples; the difference includes this effect.
    """
    return [
        _between({f"{row.name} selected on validation": cell, "on held-out examples": row.cells[beside(task)]}, task)
        for row in table.rows
        for task, cell in row.cells.items()
        if cell.chosen and (held := row.cells.get(beside(task))) and held.chosen
    ]


def _on_task(task: str, first: Row, second: Row) -> Comparison:
    return _between({row.name: row.cells[task] for row in (first, second)}, task)


def _between(cells: Mapping[str, ResultCell], task: str) -> Comparison:
    first, second = cells
    names = (first, second, task)
    if missing := tuple(f"{name} is {cell.status}" for name, cell in cells.items() if cell.chosen is None):
        return Comparison(*names, missing)
    one, other = (cell.chosen for cell in cells.values() if cell.chosen)
    metric = one.runs[0]["metric"]
    if metric != other.runs[0]["metric"]:
        return Comparison(*names, ("their metrics differ",))
    examples, lacking = _over_examples(one, other)
    scores = _shared_scores(one, other)
    p = paired_t(*scores)
    remarks = (*lacking, *_on_seeds(len(scores[0]), p), *_on_grids(list(cells.values())))
    difference = one.spread.mean - other.spread.mean
    return Comparison(*names, remarks, metric, difference, examples, len(scores[0]), p)


def _over_examples(first: SettingScores, second: SettingScores) -> tuple[Bootstrap | None, list[str]]:
    if any(len(scored_on(run)) > 1 for point in (first, second) for run in point.runs):
        return None, ["no bootstrap: the score is a mean over validation splits"]
    kept = [[_kept(run) for run in point.runs] for point in (first, second)]
    found = [[each for each in point if each] for point in kept]
    if any(len(have) < len(wanted) for have, wanted in zip(found, kept, strict=True)):
        return None, ["no bootstrap: predictions are not kept for all runs"]
    labels = found[0][0][1]
    if any(not np.array_equal(labels, other) for point in found for _, other in point):
        return None, ["no bootstrap: the runs were judged on different examples"]
    one, other = ([output for output, _ in point] for point in found)
    if one[0].ndim == 1:
        return clustered_bootstrap(one, other, labels), []
    return paired_bootstrap(first.runs[0]["metric"], one, other, labels), []


def _kept(run: Result) -> tuple[np.ndarray, np.ndarray] | None:
    """Return outputs (N, C) and labels (N,) of the run's split; None if its metric is not the run's score.

    For a score over dependent examples: the score (N,) and the cluster (N,) of each example. An older result does not
    name its split; then it is the first one whose metric equals the score.
    """
    folder, split = Path(run["folder"]), "".join(scored_on(run))
    for file in [folder / PREDICTIONS.replace("*", split)] if split else sorted(folder.glob(PREDICTIONS)):
        try:
            with np.load(file) as arrays:
                if (scores := arrays.get(f"score-{run['metric']}")) is not None:
                    if isclose(scores.mean(), run["score"], abs_tol=1e-6):
                        return scores, arrays["clusters"]
                    continue
                outputs, labels = arrays["outputs"], arrays["labels"]
            if isclose(METRICS[run["metric"]](outputs, labels), run["score"], abs_tol=1e-6):
                return outputs, labels
        except (OSError, ValueError, KeyError):  # truncated, or not written by this package
            continue
    return None


def _shared_scores(first: SettingScores, second: SettingScores) -> tuple[list[float], list[float]]:
    by_seed = [{run["seed"]: float(run["score"]) for run in point.runs} for point in (first, second)]
    shared = [seed for seed in by_seed[0] if seed in by_seed[1]]
    return [by_seed[0][seed] for seed in shared], [by_seed[1][seed] for seed in shared]


def _on_seeds(count: int, p: float | None) -> list[str]:
    if count < 2:
        return [
            f"no t-test: it needs at least two seeds that both rows ran; there {'is' if count == 1 else 'are'} {count}"
        ]
    return ["no t-test: the difference is the same for every seed"] if p is None else []


def _on_grids(cells: Sequence[ResultCell]) -> list[str]:
    """Warn of choices from grids: larger grids have larger maxima, and p-values after a choice are too small."""
    points = [len(cell.points) if cell.kind in (GRID, GRID_MEAN) else 1 for cell in cells]
    if max(points) == 1:
        return []
    return [f"the best of {points[0]} and of {points[1]} points were chosen on these examples: p is too small"]
