"""Paired tests of whether two methods differ: over the examples that both predicted, and the seeds that both ran."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from statistics import fmean

import numpy as np

from distill_runner.common.errors import UserError, suggestion
from distill_runner.datasets.metrics import METRICS
from distill_runner.report.collect import Result, scored_on
from distill_runner.report.identity import differences, shared_stages
from distill_runner.report.rows import GRID, GRID_MEAN, ResultCell, ResultTable, Row, SettingScores, held_out_column
from distill_runner.report.statistics import Bootstrap, clustered_bootstrap, holm, paired_bootstrap

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
        remarks: why a test cannot be computed, what to beware of, and in which settings the rows differ.
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
    of_examples = _holm(comparisons, lambda comparison: comparison.examples.p if comparison.examples else None)
    of_seeds = _holm(comparisons, lambda comparison: comparison.seeds_p)
    family = len(of_examples), len(of_seeds)
    return [
        replace(comparison, examples_holm=of_examples.get(number), seeds_holm=of_seeds.get(number), family=family)
        for number, comparison in enumerate(comparisons)
    ]


def _holm(comparisons: Sequence[Comparison], p_of: Callable[[Comparison], float | None]) -> dict[int, float]:
    """Map the index of each comparison that has a p-value to its corrected p-value."""
    p_values = {number: p for number, one in enumerate(comparisons) if (p := p_of(one)) is not None}
    return dict(zip(p_values, holm(list(p_values.values())), strict=True))


def sentence(comparison: Comparison) -> str:
    """Describe the comparison in words, percentages and p-values."""
    head = f"{comparison.first} against {comparison.second} on {comparison.task}"
    parts = []
    if comparison.difference is not None:
        parts.append(f"{comparison.difference:+.2f} {comparison.metric}")
    if paired := comparison.examples:
        bounds = f"[{100 * paired.low:+.2f}, {100 * paired.high:+.2f}]"
        corrected = _of_family(comparison.examples_holm, comparison.family[0])
        units = f"{paired.examples} examples" + f" in {paired.units} clusters" * (paired.units < paired.examples)
        parts.append(f"bootstrap over {units}: 95% {bounds}, {_p(paired.p)}{corrected}")
    if comparison.seeds_p is not None:
        corrected = _of_family(comparison.seeds_holm, comparison.family[1])
        parts.append(f"paired t-test over {comparison.shared} seeds: {_p(comparison.seeds_p)}{corrected}")
    return f"{head}: {'; '.join([*parts, *comparison.remarks])}"


def _of_family(p: float | None, size: int) -> str:
    return "" if p is None or size < 2 else f" (Holm, {size} tests: {_p(p)})"


def _p(value: float) -> str:
    return "p < 0.0001" if value < 0.0001 else f"p {value:.4f}"


def _row(table: ResultTable, name: str) -> Row:
    rows = [row for row in table.rows if name in (row.name, row.result["method"], row.name.partition(",")[0])]
    # A point that cannot run is named by its method alone, without the mapping; it must not hide the row with scores.
    scored = [row for row in rows if any(cell.best_point for cell in row.cells.values())] or rows
    matches = [row for row in scored if row.name == name] or scored
    if len(matches) == 1:
        return matches[0]
    names = [row.name for row in matches or table.rows]
    problem = "several rows have this name" if matches else "there is no such row"
    raise UserError("--compare", name, problem, f"Known: {'; '.join(names)}." if matches else suggestion(name, names))


def optimism(table: ResultTable) -> list[Comparison]:
    """Compare selection on the reported examples with selection on held-out examples, where a row has both for a task.

    Runs with held-out selection train on fewer examples; the difference includes this effect.
    """
    return [
        _compare_cells({f"{row.name} selected on validation": cell, "on held-out examples": held_out}, task)
        for row in table.rows
        for task, cell in row.cells.items()
        if cell.best_point and (held_out := row.cells.get(held_out_column(task))) and held_out.best_point
    ]


def _on_task(task: str, first: Row, second: Row) -> Comparison:
    """Compare two rows on a task, with the settings in which they differ and the seeds that are not of the method."""
    comparison = _compare_cells({row.name: row.cells[task] for row in (first, second)}, task)
    points = [(row.name, point) for row in (first, second) if (point := row.cells[task].best_point)]
    if len(points) < 2:
        return comparison
    remarks = [
        f"the seeds of {name} share one {stage}" for name, point in points for stage in shared_stages(point.runs)
    ]
    if settings := differences(*(point.runs[0] for _, point in points)):
        remarks.append(f"they differ in {', '.join(settings)}")
    return replace(comparison, remarks=(*comparison.remarks, *remarks))


def _compare_cells(cells: Mapping[str, ResultCell], task: str) -> Comparison:
    first, second = cells
    names = (first, second, task)
    if missing := tuple(f"{name} is {cell.status}" for name, cell in cells.items() if cell.best_point is None):
        return Comparison(*names, missing)
    one, other = (cell.best_point for cell in cells.values() if cell.best_point)
    metric = one.runs[0]["metric"]
    if metric != other.runs[0]["metric"]:
        return Comparison(*names, ("their metrics differ",))
    examples, problems = _test_examples(one, other)
    scores = _shared_scores(one, other)
    p = _test_seeds(*scores)
    remarks = (*problems, *_seeds_remarks(len(scores[0]), p), *_grid_remarks(list(cells.values())))
    difference = one.spread.mean - other.spread.mean
    return Comparison(*names, remarks, metric, difference, examples, len(scores[0]), p)


def _test_examples(first: SettingScores, second: SettingScores) -> tuple[Bootstrap | None, list[str]]:
    if any(len(scored_on(run)) > 1 for point in (first, second) for run in point.runs):
        return None, ["no bootstrap: the score is a mean over validation splits"]
    predictions = [[_predictions(run) for run in point.runs] for point in (first, second)]
    complete = [[of_run for of_run in point if of_run] for point in predictions]
    if any(len(point) < len(runs) for point, runs in zip(complete, predictions, strict=True)):
        return None, ["no bootstrap: predictions are not kept for all runs"]
    labels = complete[0][0][1]
    if any(not np.array_equal(labels, other) for point in complete for _, other in point):
        return None, ["no bootstrap: their examples, or the numbers of their classes, differ"]
    one, other = ([output for output, _ in point] for point in complete)
    if one[0].ndim == 1:
        return clustered_bootstrap(one, other, labels), []
    return paired_bootstrap(first.runs[0]["metric"], one, other, labels), []


def _predictions(run: Result) -> tuple[np.ndarray, np.ndarray] | None:
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
    """Return the scores of the seeds that both ran: means, where stages before the student had several seeds."""
    seeds = [list(dict.fromkeys(run["seed"] for run in point.runs)) for point in (first, second)]
    shared = [seed for seed in seeds[0] if seed in seeds[1]]
    one, other = (
        [fmean(float(run["score"]) for run in point.runs if run["seed"] == seed) for seed in shared]
        for point in (first, second)
    )
    return one, other


def _test_seeds(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the p-value of the paired t-test; None below two pairs, or if all differences are equal."""
    if len(first) < 2 or np.ptp(np.subtract(first, second)) < 1e-12:
        return None
    from scipy.stats import ttest_rel  # imported here: it takes half a second

    return float(ttest_rel(first, second).pvalue)


def _seeds_remarks(count: int, p: float | None) -> list[str]:
    if count < 2:
        return [
            f"no t-test: it needs at least two seeds that both rows ran; there {'is' if count == 1 else 'are'} {count}"
        ]
    return ["no t-test: the difference is the same for every seed"] if p is None else []


def _grid_remarks(cells: Sequence[ResultCell]) -> list[str]:
    """Warn of choices from grids: larger grids have larger maxima, and p-values after a choice are too small."""
    points = [len(cell.points) if cell.kind in (GRID, GRID_MEAN) else 1 for cell in cells]
    if max(points) == 1:
        return []
    return [f"the best of {points[0]} and of {points[1]} points were chosen on these examples: p is too small"]
