"""Paired tests of whether two methods differ: over the examples that both predicted, and the seeds that both ran."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isclose
from pathlib import Path

import numpy as np

from distill_runner.common.errors import UserError, quantity, suggestion
from distill_runner.datasets.metrics import LOWER_IS_BETTER, metric_function
from distill_runner.report import resampling
from distill_runner.report.collect import TEST_PREDICTIONS, VALIDATION_PREDICTIONS, Result, scored_on, tested_on
from distill_runner.report.frame import Cell, Point, ResultTable, held_out_column
from distill_runner.report.identity import shared_stages
from distill_runner.report.row_names import differences
from distill_runner.report.statistics import ALPHA, MethodTest, holm

BETTER, WORSE, SAME, UNDECIDED = "better", "worse", "the same", "undecided"


@dataclass(frozen=True)
class Comparison:
    """Comparison of two rows on one task: the first minus the second.

    Attributes:
        difference: between the values in the table, in percentage points; None if one is missing or the metrics differ.
        examples: test over the examples, in fractions; None if it cannot be computed.
        shared: number of seeds that both rows ran.
        seeds_p: two-sided p-value of the paired t-test over the shared seeds; None if it cannot be computed.
        methods: test over seeds and examples, of the shared seeds, in fractions; None if it cannot be computed.
        margin: in points; methods that differ by less are the same. None if only differences are of interest.
        of_models: p-values of the tests at the margin over the examples; None unless the conclusion is on these models,
            since one method has a single file of predictions.
        score_intervals: 95% intervals over the examples of both scores, in fractions; None for runs.
        is_selected: whether a point was selected from a grid by these scores, so that no test has a known error.
        fixed_stages: for each row, the stages that all of its seeds share and the other row does not have.
        corrected: p-values by test, with Holm's correction for all comparisons made together.
        family: number of p-values that are corrected together, by test.
        remarks: why a test cannot be computed, what to beware of, and in which settings the rows differ.
    """

    first: str
    second: str
    task: str
    remarks: tuple[str, ...]
    metric: str | None = None
    difference: float | None = None
    examples: resampling.ExampleTest | None = None
    shared: int = 0
    seeds_p: float | None = None
    methods: MethodTest | None = None
    margin: float | None = None
    of_models: Mapping[str, float] | None = None
    score_intervals: tuple[tuple[float, float], tuple[float, float]] | None = None
    is_selected: bool = False
    fixed_stages: Mapping[str, Sequence[str]] = field(default_factory=dict)
    corrected: Mapping[str, float] = field(default_factory=dict)
    family: Mapping[str, int] = field(default_factory=dict)

    @property
    def p_values(self) -> dict[str, float]:
        """The p-values by test: ``examples``, ``seeds``, ``methods``; with a margin, ``same`` and ``not_worse``."""
        p_values = {"examples": self.examples.p} if self.examples else {}
        if self.seeds_p is not None:
            p_values["seeds"] = self.seeds_p
        if self.methods:
            p_values["methods"] = self.methods.p
            if self.margin is not None:
                p_values["same"] = self.methods.p_same(self.margin / 100)
                if self.metric not in LOWER_IS_BETTER:
                    p_values["not_worse"] = self.methods.p_not_worse(self.margin / 100)
        return {**p_values, **(self.of_models or {})}

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval that the conclusion rests on, in fractions; None without one."""
        test = self.methods if self.of_models is None else self.examples
        return test.interval if test else None

    def is_significant(self, test: str) -> bool:
        p = self.corrected.get(test, self.p_values.get(test))
        return p is not None and p <= ALPHA and not self.is_selected

    @property
    def conclusion(self) -> str:
        """What the test over seeds and examples says of the first method: one of the four words of this module."""
        name, test = ("methods", self.methods) if self.of_models is None else ("examples", self.examples)
        if test and self.is_significant(name):
            return BETTER if (test.difference > 0) != (self.metric in LOWER_IS_BETTER) else WORSE
        return SAME if self.is_significant("same") else UNDECIDED

    @property
    def is_not_worse(self) -> bool:
        """Whether the first method is not worse by the margin or more."""
        return self.is_significant("not_worse")

    @property
    def seeds_needed(self) -> int | None:
        """About how many seeds would decide; None if the comparison is decided, or no number up to 100 would do."""
        if self.methods is None or self.conclusion != UNDECIDED:
            return None
        alpha = ALPHA / self.family.get("methods", 1)
        return self.methods.seeds_needed(None if self.margin is None else self.margin / 100, alpha)


def compare(
    table: ResultTable, *groups: Sequence[str], margin: float | None = None, looks: int = 1
) -> list[Comparison]:
    """Compare the first row of each group with the group's other rows, on each task of the table.

    The p-values of all comparisons are corrected together.

    Args:
        groups: names of rows, or of methods that have only one row.
        margin: difference in points below which methods are the same.
        looks: how often the seeds so far were tested, this time included.
    Raises:
        UserError: a group has fewer than two rows, or a name fits no row or several rows.
    """
    pairs = list[tuple[str, str]]()
    for names in groups:
        first, *others = [_row(table, name) for name in names]
        if not others or first in others:
            raise UserError("--compare", " ".join(names), "must name two rows or more, the first one once")
        pairs += [(first, other) for other in others]
    rows = [({name: table.rows[name] for name in pair}, task) for pair in pairs for task in table.tasks]
    return correct([compare_rows(task, pair, margin, looks) for pair, task in rows])


def correct(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Add Holm's p-values. Each test asks another question, so its p-values are a family of their own."""
    p_values, family = [comparison.p_values for comparison in comparisons], {}
    corrected: list[dict[str, float]] = [{} for _ in comparisons]
    for test in dict.fromkeys(test for of_one in p_values for test in of_one):
        numbers = [number for number, of_one in enumerate(p_values) if test in of_one]
        family[test] = len(numbers)
        for number, p in zip(numbers, holm([p_values[number][test] for number in numbers]), strict=True):
            corrected[number][test] = p
    pairs = zip(comparisons, corrected, strict=True)
    return [replace(comparison, corrected=of_one, family=family) for comparison, of_one in pairs]


def _row(table: ResultTable, name: str) -> str:
    """Return the row that a user names: by its name, by its label, or by its method."""
    rows = list[str]()
    for row, cells in table.rows.items():
        method = next(run["method"] for cell in cells.values() for run in (*cell.runs, *cell.unfinished))
        rows += [row] if name in (row, method, row.partition(",")[0]) else []
    # A point that cannot run is named by its method alone, without the mapping; it must not hide the row with scores.
    rows = [row for row in rows if any(cell.points for cell in table.rows[row].values())] or rows
    matches = [row for row in rows if row == name] or rows
    if len(matches) == 1:
        return matches[0]
    remedy = f"Known: {'; '.join(matches)}." if matches else suggestion(name, table.rows)
    raise UserError("--compare", name, "several rows have this name" if matches else "there is no such row", remedy)


def optimism(table: ResultTable) -> list[Comparison]:
    """Compare selection on the reported examples with selection on held-out examples, where a row has both for a task.

    Runs with held-out selection train on fewer examples; the difference includes this effect.
    """
    return [
        compare_cells({f"{row} selected on validation": cell, "on held-out examples": held_out}, task)
        for row, task, cell in table.cells
        if cell.points and (held_out := table.rows[row].get(held_out_column(task))) and held_out.points
    ]


def compare_rows(
    task: str, rows: Mapping[str, Mapping[str, Cell]], margin: float | None = None, looks: int = 1
) -> Comparison:
    """Compare two rows on a task, with the settings in which they differ and the stages that all seeds share."""
    cells = {name: row[task] for name, row in rows.items()}
    comparison = compare_cells(cells, task, margin, looks)
    if not all(cell.points for cell in cells.values()):
        return comparison
    stages = {name: shared_stages(cell.runs).items() for name, cell in cells.items()}
    shared = set.intersection(*map(set, stages.values()))
    remarks, fixed_stages = [f"both rows share one {stage}" for stage, _ in sorted(shared)], {}
    for name, of_row in stages.items():
        if own := sorted(stage for stage, key in of_row if (stage, key) not in shared):
            fixed_stages[name] = own
            remarks.append(f"seeds of the last stage only: those of {name} share one {' and one '.join(own)}")
    if settings := differences(*(min(cell.runs, key=lambda run: run["seed"]) for cell in cells.values())):
        remarks.append(f"they differ in {', '.join(settings)}")
    return replace(comparison, remarks=(*comparison.remarks, *remarks), fixed_stages=fixed_stages)


def compare_cells(cells: Mapping[str, Cell], task: str, margin: float | None = None, looks: int = 1) -> Comparison:
    first, second = cells
    names = (first, second, task)
    if missing := tuple(f"{name} is {cell.status}" for name, cell in cells.items() if not cell.points):
        return Comparison(*names, missing)
    one, other = (cell.points[0] for cell in cells.values())
    metric = one.runs[0]["metric"]
    if metric != other.runs[0]["metric"]:
        return Comparison(*names, ("their metrics differ",))
    count = len(one.runs) + len(other.runs)
    one, other, seeds = _with_shared_seeds(one, other)
    is_part = len(one.runs) + len(other.runs) < count
    left_out = [f"of the {quantity(len(seeds), 'seed')} that both rows have"] if is_part else []
    scores, problems = _paired_scores(one, other)
    examples = scores.test() if scores else None
    if examples and examples.interval is None:
        problems.append(f"too few for an interval: {examples.differing} of {examples.units} differ")
    runs, size = (*one.runs, *other.runs), len(one.runs)

    def by_seed(values: np.ndarray) -> np.ndarray:
        """Return the differences (..., seeds) of the means of values (..., runs)."""
        differences = []
        for seed in seeds:
            first = [number for number, run in enumerate(one.runs) if run["seed"] == seed]
            second = [number for number, run in enumerate(other.runs, start=size) if run["seed"] == seed]
            differences.append(values[..., first].mean(-1) - values[..., second].mean(-1))
        return np.stack(differences, axis=-1)

    seeds_p = methods = of_models = intervals = None
    if scores and "read" in runs[0]:
        intervals = scores.score_interval(slice(size)), scores.score_interval(slice(size, None))
    if scores and intervals and len(seeds) < 2:
        tests = {"same": scores.p_same} | ({} if metric in LOWER_IS_BETTER else {"not_worse": scores.p_not_worse})
        of_models = {} if margin is None else {name: test(margin / 100) for name, test in tests.items()}
    elif len(seeds) < 2:
        verb = "is" if len(seeds) == 1 else "are"
        problems.append(f"no test over seeds: it needs at least two that both rows ran; there {verb} {len(seeds)}")
    elif np.ptp(differences := by_seed(np.array([run["score"] for run in runs]))) < 1e-12:
        problems.append("no t-test: the difference is the same for every seed")
    else:
        from scipy.stats import ttest_1samp  # imported here: it takes half a second

        seeds_p = float(ttest_1samp(differences, 0.0).pvalue)
    if scores and examples and len(seeds) > 1 and examples.variance is not None:
        minimum, step = examples.variance if scores.exact_interval else 0.0, 1 / examples.examples
        observed, resampled = by_seed(scores.observed).tolist(), by_seed(scores.resampled)
        methods = MethodTest.from_seeds(observed, resampled, minimum, step, looks)
    # Larger grids have larger maxima, and p-values after a choice are too small.
    points = [len(cell.points) if cell.is_optimistic else 1 for cell in cells.values()]
    text = f"the best of {points[0]} and of {points[1]} points were chosen on these examples: p is too small"
    selected = [text] if max(points) > 1 else []
    return Comparison(
        *names,
        (*problems, *left_out, *selected),
        metric=metric,
        difference=one.spread.mean - other.spread.mean,
        examples=examples,
        shared=len(seeds),
        seeds_p=seeds_p,
        methods=methods,
        margin=margin,
        of_models=of_models,
        score_intervals=intervals,
        is_selected=bool(selected),
    )


def _with_shared_seeds(one: Point, other: Point) -> tuple[Point, Point, list[int]]:
    """Return the points with the runs of the seeds that both have, or all runs if it is one seed; and these seeds."""
    of_each = [dict.fromkeys(run["seed"] for run in point.runs) for point in (one, other)]
    seeds = [seed for seed in of_each[0] if seed in of_each[1]]
    if len(seeds) > 1:
        one, other = (Point(tuple(run for run in point.runs if run["seed"] in seeds)) for point in (one, other))
    return one, other, seeds


def _paired_scores(first: Point, second: Point) -> tuple[resampling.PairedScores | None, list[str]]:
    if any(len(scored_on(run)) > 1 for point in (first, second) for run in point.runs):
        return None, ["no test over examples: the score is a mean over several splits"]
    complete = [[of_run for run in point.runs if (of_run := _predictions(run))] for point in (first, second)]
    if any(len(of_runs) < len(point.runs) for of_runs, point in zip(complete, (first, second), strict=True)):
        return None, ["no test over examples: predictions are not kept for all runs"]
    if (scores := pair_predictions(first.runs[0]["metric"], *complete)) is None:
        return None, ["no test over examples: their examples, or the numbers of their classes, differ"]
    return scores, []


def pair_predictions(
    metric: str, first: Sequence["Predictions"], second: Sequence["Predictions"]
) -> resampling.PairedScores | None:
    """Pair the predictions of the runs of two methods; None if they are not for the same examples."""
    sample = first[0]
    for run in (*first, *second):
        same = sample.source == run.source and sample.values.shape == run.values.shape
        if not same or not np.array_equal(sample.units, run.units):
            return None
    one, other = ([of_run.values for of_run in method] for method in (first, second))
    if sample.source == "outputs":
        return resampling.paired_scores(metric, one, other, sample.units)
    if sample.source == "counts":
        return resampling.SummedScores(one, other, resampling.mean_f1_of_counts, sample.units)
    return resampling.clustered_scores(one, other, sample.units)


@dataclass(frozen=True)
class Predictions:
    """Outputs (N, C) with labels (N,); or scores (N,) or counts (N, 3 T) with the clusters (N,) of the examples."""

    source: str
    values: np.ndarray
    units: np.ndarray

    @classmethod
    def read(cls, file: Path, metric: str) -> "Predictions":
        """Read a file of ``VALIDATION_PREDICTIONS`` or ``TEST_PREDICTIONS``.

        Raises:
            OSError, ValueError, KeyError: the file is truncated, or not written by this package.
        """
        with np.load(file) as stored:
            arrays = dict(stored)
        for source in ("counts", "score"):
            if (values := arrays.get(f"{source}-{metric}")) is not None:
                return cls(source, values, arrays["clusters"])
        return cls("outputs", arrays["outputs"], arrays["labels"])

    def score(self, metric: str) -> float:
        if self.source == "outputs":
            return metric_function(metric)(self.values, self.units)
        if self.source == "score":
            return float(self.values.mean())
        return float(resampling.mean_f1_of_counts(self.values.sum(axis=0)))


def _predictions(run: Result) -> Predictions | None:
    """Return the predictions of the run's split; None if their score is not the run's."""
    if "read" in run:  # a file of predictions
        return run["read"]
    pattern = TEST_PREDICTIONS if tested_on(run) else VALIDATION_PREDICTIONS
    (split,) = scored_on(run) or ["validation"]
    try:
        predictions = Predictions.read(Path(run["folder"], pattern.replace("*", split)), run["metric"])
    except (OSError, ValueError, KeyError):  # truncated, or not written by this package
        return None
    return predictions if isclose(predictions.score(run["metric"]), run["score"], abs_tol=1e-6) else None
