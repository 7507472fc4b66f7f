"""Tables of results: rows of methods, columns of tasks, and in each cell the points of a grid, each with its seeds.

A result holds scores as fractions. Here and in all printed output, scores are percentages, as in the papers.
"""

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import inf, isnan
from statistics import fmean
from typing import TYPE_CHECKING, Any

from distill_runner.report import published
from distill_runner.report.collect import (
    Result,
    data_of,
    is_scored,
    label,
    scored_on,
    selection_of,
    settings,
    tested_on,
)
from distill_runner.report.identity import TEACHER, identity_of
from distill_runner.report.row_names import row_names
from distill_runner.report.statistics import Spread

if TYPE_CHECKING:
    import pandas as pd

AVERAGE, TEST = "average", "test"
GRID, GRID_MEAN, ELSEWHERE = "best of grid", "best mean of grid", "chosen by {}"
"""How the point of a grid was chosen: by the scores that the table shows, or by other scores of the same runs."""


def frame(results: Iterable[Result]) -> "pd.DataFrame":
    """Return a data frame with a row for each run of a student: names, scores times 100, cost, and a column a setting.

    The column ``row`` is the name of the row of a table that the run belongs to, ``label`` its method with mapping and
    attention. Columns of settings have the setting's key, such as ``optim.lr``.
    """
    import pandas as pd

    names = ("task", "method", "mapping", "teacher", "seed", "status", "metric", "best_epoch", "seconds", "folder")
    students, rows = [result for result in results if result.get("stage", "student") == "student"], []
    for result, row_name in zip(students, row_names(students), strict=True):
        scores = {"score": result.get("score"), "teacher_score": result.get("teacher_score")}
        scores |= {f"metrics.{name}": value for name, value in (result.get("metrics") or {}).items()}
        row = {"row": row_name, "label": label(result)} | {name: result.get(name) for name in names}
        row |= {name: None if value is None else 100 * value for name, value in scores.items()}
        rows.append(row | {"num_layers": (result.get("student") or {}).get("num_layers")} | {**settings(result)})
    return pd.DataFrame(rows)


def varied(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of settings that differ, without settings of a stage that equal the student's in every run.

    Args:
        runs: settings of each run by dotted name.
    """
    names = dict.fromkeys(name for run in runs for name in run)
    differ = [name for name in names if len({json.dumps(run.get(name)) for run in runs}) > 1]
    return [name for name in differ if any(run.get(name) != run.get(name.partition(".")[2]) for run in runs)]


@dataclass(frozen=True)
class SettingScores:
    """Finished runs with equal settings and different seeds; ``spread`` describes their scores in percent."""

    runs: tuple[Result, ...]

    @cached_property
    def spread(self) -> Spread:
        by_seed: dict[int, list[float]] = {}
        for run in self.runs:
            by_seed.setdefault(run["seed"], []).append(100 * run["score"])
        # Several draws of a mapping for each of several seeds are no further independent seeds.
        are_crossed = 1 < len(by_seed) < len(self.runs)
        return Spread.from_values([*map(fmean, by_seed.values())] if are_crossed else [*chain(*by_seed.values())])

    @property
    def selection(self) -> float:
        """Mean score by which grids choose: the reported score, or one on held-out examples or by another metric."""
        return fmean(100 * selection_of(run).get("score", run["score"]) for run in self.runs)


@dataclass(frozen=True)
class ResultCell:
    """One method on one task: the finished points of its grid, and the runs that have not finished."""

    points: tuple[SettingScores, ...]
    unfinished: tuple[Result, ...] = ()

    @cached_property
    def best_points(self) -> list[SettingScores]:
        """Points with the best mean among the points with the most seeds; a mean over few seeds is more often lucky."""
        seeds = max((point.spread.count for point in self.points), default=0)
        candidates = [point for point in self.points if point.spread.count == seeds]
        means = [-inf if isnan(point.selection) else point.selection for point in candidates]
        return [point for point, mean in zip(candidates, means, strict=True) if mean == max(means)]

    @property
    def best_point(self) -> SettingScores | None:
        """First of the best points; None if no run has finished."""
        return self.best_points[0] if self.best_points else None

    @property
    def kind(self) -> str:
        """How the value was chosen from a grid; empty for a single run or the mean of its seeds."""
        if self.best_point is None or len(self.points) == 1:
            return ""
        if selector := selection_of(self.best_point.runs[0]).get("on"):
            return ELSEWHERE.format(selector)
        return GRID_MEAN if self.best_point.spread.count > 1 else GRID

    @property
    def is_optimistic(self) -> bool:
        """Whether the examples of this value chose a point of a grid, by any metric: the value is then too high."""
        if not self.kind or self.best_point is None:
            return False
        run = self.best_point.runs[0]
        selector, column = selection_of(run).get("on", ""), run["task"]
        is_another_split = selector.startswith(f"{run.get('of_task', column)}_") and selector != column
        return not (tested_on(run) or selector.startswith("held_out ") or is_another_split)

    @property
    def value(self) -> float | None:
        return self.best_point.spread.mean if self.best_point else None

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """What tables say of the best point and its grid, by column of ``formats.COLUMNS``; empty without a point.

        ``best_run`` is the score of the single run that is best by the score by which grids choose. ``grid_mean`` is
        the mean of the points' means: the score to expect without a search. ``steps_in_all`` trained the student, those
        of its earlier phases included.
        """
        if self.best_point is None:
            return {}
        run, spread = self.best_point.runs[0], self.best_point.spread
        runs = [run for point in self.points for run in point.runs]
        scores = [selection_of(run).get("score", run["score"]) for run in runs]
        finite = [(score, -number) for number, score in enumerate(scores) if not isnan(score)]
        return {
            "metric": run["metric"],
            "kind": self.kind,
            "value": spread.mean,
            "seeds": spread.count,
            "sd": spread.sd,
            "interval": spread.interval,
            "best_run": 100 * runs[-max(finite)[1]]["score"] if finite else None,
            "points": len(self.points),
            "grid_mean": fmean(point.spread.mean for point in self.points) if len(self.points) > 1 else None,
            "steps_in_all": run.get("steps_in_all"),
        } | _printed(run.get("published"), spread.mean)

    @property
    def status(self) -> str:
        """``done``, or the reason why there is no value."""
        if self.points:
            return "done"
        statuses = [run["status"] for run in self.unfinished]
        return "running" if "running" in statuses else (statuses or ["not run"])[-1]

    @cached_property
    def best_settings(self) -> dict[str, Any]:
        """Settings of the best point in which the grid's points differ."""
        if self.best_point is None:
            return {}
        names = varied([settings(point.runs[0]) for point in self.points])
        return {name: settings(self.best_point.runs[0]).get(name) for name in names}


def _printed(number: Mapping[str, Any] | None, value: float) -> dict[str, Any]:
    """Return the number that a paper prints, by the columns of a table, and the difference of ``value`` from it."""
    if not number:
        return {}
    printed = {"published": number["value"], "source": number["source"], "comparable": number["comparable"]}
    return printed | {"difference": value - number["value"]}


def cell_of(runs: Sequence[Result]) -> ResultCell:
    """Return the cell of the runs of one row on one task. A seed that was run twice counts once."""
    points = [{_seeds(run): run for run in reversed(group)} for group in by_setting(filter(is_scored, runs))]
    return ResultCell(
        tuple(SettingScores(tuple(reversed(by_seed.values()))) for by_seed in points),
        tuple(run for run in runs if not is_scored(run)),
    )


def by_setting(runs: Iterable[Result]) -> list[list[Result]]:
    """Group the runs of a row by the settings of their grid. Runs of one group differ only in their seeds."""
    groups: dict[Hashable, list[Result]] = {}
    for run in runs:
        identity = identity_of(run)
        groups.setdefault(frozenset(identity.grid.items()) if identity else None, []).append(run)
    return list(groups.values())


def _seeds(run: Result) -> Hashable:
    identity = identity_of(run)
    return frozenset(identity.seeds.items()) if identity else run.get("key")


@dataclass(frozen=True)
class Row:
    """Runs that differ only in task, seeds and the settings of a grid: cells by task. ``result`` is one of the runs."""

    name: str
    cells: Mapping[str, ResultCell]
    result: Result


@dataclass(frozen=True)
class Teacher:
    """A teacher. ``numbers`` has its ``value`` in percent by task, and what a paper prints, as in ``ResultCell``."""

    name: str
    numbers: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ResultTable:
    """A table. Tasks, teachers and rows keep the order of the results.

    Attributes:
        tasks: names of the columns.
        means: columns that are means of others, with the names of those. Averages over tasks are not among ``tasks``.
    """

    tasks: list[str]
    teachers: list[Teacher]
    rows: list[Row]
    means: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def cells(self) -> list[tuple[str, str, ResultCell]]:
        """All cells, each with the names of row and task."""
        return [(row.name, task, cell) for row in self.rows for task, cell in row.cells.items()]

    @property
    def unfinished(self) -> list[tuple[str, Result]]:
        """Runs that have not finished, each with the name of its row."""
        return [(name, run) for name, _, cell in self.cells for run in cell.unfinished]


def tabulate(results: Iterable[Result]) -> ResultTable:
    """Return the table of ``results``, finished or not, without runs that ended with a stage before the student."""
    students = distinct(result for result in results if is_scored(result) or result["status"] != "done")
    entries = [entry for result in students for entry in _in_columns(result)]
    tasks = list(dict.fromkeys(entry["task"] for entry in entries))
    by_row: dict[str, list[Result]] = {}
    for name, entry in zip(row_names(entries), entries, strict=True):
        by_row.setdefault(name, []).append(entry)
    rows = []
    for name, runs in by_row.items():
        cells = {task: cell_of([run for run in runs if run["task"] == task]) for task in tasks}
        rows.append(Row(name, cells, runs[0]))
    return ResultTable(tasks, _teachers(entries), rows, _means(entries))


def _means(entries: Sequence[Result]) -> dict[str, list[str]]:
    """Return the columns that are means of others, with those: of a task's splits, and of the same part of all tasks.

    A column whose rows are means of different splits is left out: the names of the rows then say which.
    """
    means: dict[str, list[str]] = {}
    for column in dict.fromkeys(entry["task"] for entry in entries):
        parts = {tuple(entry.get("mean_of", ())) for entry in entries if entry["task"] == column}
        if len(parts) == 1 and len(part := parts.pop()) > 1:
            means[column] = [*part]
    by_average: dict[str, list[str]] = {}
    for name, column in dict.fromkeys((entry["average"], entry["task"]) for entry in entries if "average" in entry):
        by_average.setdefault(name, []).append(column)
    return means | {name: columns for name, columns in by_average.items() if len(columns) > 1}


def held_out_column(task: str) -> str:
    """Return the name of the column for runs of ``task`` that were selected on held-out examples."""
    return f"{task}, held out"


def column_of(result: Result) -> str:
    """Return the name of the column that shows the result."""
    selectors = (data_of(result).get("select_on"), selection_of(result).get("on"))  # the first, before there is a score
    held_out = any("held_out" in str(selector) for selector in selectors)
    return held_out_column(result["task"]) if held_out else result["task"]


def _in_columns(result: Result) -> Iterator[Result]:
    """Yield the result with its column's name as task, and a copy for each other score that has a column.

    These are the scores on splits with columns of their own, on test splits, and by other metrics that a paper prints.
    A grid chooses its point by the score that chose it on the validation splits, never by another column.
    """
    task, column, is_done = result["task"], column_of(result), is_scored(result)
    suffix = column.removeprefix(task)
    splits = (result.get("splits") or {}) if is_done else {}
    own = {"task": column, "of_task": task, "average": AVERAGE + suffix}
    yield from _with_other_metrics({**result, **own, "mean_of": _columns(task, scored_on(result), suffix)})
    if not is_done:
        return
    selection = {"on": column, "score": result["score"], **selection_of(result)}
    part = {**result, "of_task": task, "others": [], "selection": selection}
    for name, numbers in splits.items():
        yield {**part, **numbers, "split": name, "task": f"{task}_{name}{suffix}"}
    if test := result.get("test"):
        suffix, tested = f"{suffix} {TEST}", test["splits"]
        own = {"task": task + suffix, "average": AVERAGE + suffix, "mean_of": _columns(task, tested, suffix)}
        yield from _with_other_metrics({**part, **test, **own, "splits": {}, "tested_on": tested})
        for name in test["columns"]:
            numbers = {**tested[name], "metric": test["metric"], "split": name, "tested_on": {name: tested[name]}}
            yield {**part, **numbers, "task": f"{task}_{name}{suffix}"}


def _columns(task: str, splits: Iterable[str], suffix: str) -> list[str]:
    return [f"{task}_{name}{suffix}" for name in splits]


def _with_other_metrics(entry: Result) -> Iterator[Result]:
    """Yield an entry of the table, and a copy for each other metric of it that a paper prints."""
    yield entry
    if is_scored(entry):
        selection = {"on": entry["metric"], "score": entry["score"], **selection_of(entry)}
        for other in entry.get("others") or []:
            copy = {key: value for key, value in entry.items() if key not in ("average", "mean_of")}
            yield {**copy, **other, "task": f"{entry['task']} {other['metric']}", "selection": selection}


def distinct(results: Iterable[Result]) -> list[Result]:
    """Return one result per run, since two folders may hold the same run: the one with most scores."""
    runs: dict[Hashable, Result] = {}
    for number, result in enumerate(results):
        run = (label(result), result["task"], result.get("key") or number, str(result.get("conditions")))
        if run not in runs or not is_scored(runs[run]) or (result.get("test") and not runs[run].get("test")):
            runs[run] = result
    return list(runs.values())


def _teachers(results: Sequence[Result]) -> list[Teacher]:
    """Return a row per teacher. A teacher of the same name with another score on a task gets a separate row."""
    rows: dict[str, dict[str, Result]] = {}
    for result in results:
        if not is_scored(result) or result.get("teacher_score") is None:
            continue
        score = 100 * result["teacher_score"]
        name = f"teacher {result['teacher']}"
        first = rows.setdefault(name, {}).setdefault(result["task"], result)
        if first["teacher_score"] != result["teacher_score"]:
            rows.setdefault(f"{name} at {score:.2f}", {}).setdefault(result["task"], result)
    return [Teacher(name, {task: _teacher_numbers(run) for task, run in runs.items()}) for name, runs in rows.items()]


def _teacher_numbers(run: Result) -> dict[str, Any]:
    """Return the score of a run's teacher, and the number that the paper of the run's method prints for it."""
    papers, teacher, score = (
        published.papers_of(run["method"]),
        run.get("teacher_model") or {},
        100 * run["teacher_score"],
    )
    if number := run.get("published"):
        papers = [paper for paper in papers if number["source"].startswith(published.titles()[paper])]
    model = published.ScoredModel(**teacher, teacher=run["teacher"], teacher_type=teacher.get("model_type"))
    printed = published.find(TEACHER, _quantity(run), model, papers=papers)
    return {"value": score} | _printed(printed.model_dump() if printed else None, score)


def _quantity(entry: Result) -> published.Quantity:
    """Return what the score of an entry of the table is."""
    splits, is_part = tuple(scored_on(entry)), "split" in entry
    is_test = bool(tested_on(entry)) or splits == (TEST,)
    return published.Quantity(entry["of_task"], splits, entry["metric"], is_test, is_part)
