"""Results as frames: a row for each run, and for tables a row for each cell, which holds the points of a grid.

A result and its row in ``frame`` hold scores as fractions, as ``evaluate`` does. Tables and all printed output have
percentages, as the papers.
"""

import json
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isnan
from statistics import fmean
from typing import TYPE_CHECKING, Any

from distill_runner.common.errors import UserError, command, suggestion
from distill_runner.report import published
from distill_runner.report.collect import (
    Result,
    data_of,
    grouped,
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
NAMES = ("task", "method", "mapping", "teacher", "seed", "status", "metric", "best_epoch", "seconds", "folder")
COLUMNS = (
    *("row", "method", "task", "status", "metric", "kind", "value", "seeds", "sd", "interval", "best_run", "points"),
    *("grid_mean", "published", "source", "comparable", "difference", "teacher", "teacher_score", "num_layers"),
    *("settings", "scores"),
)
"""Columns of a table as CSV: ``scores`` (by seed) and ``settings`` (hyper-parameters) of the best point are JSON."""


def frame(results: Iterable[Result]) -> "pd.DataFrame":
    """Return a data frame with a row for each run of a student: names, scores, cost, and a column for each setting.

    Scores are fractions. The column ``row`` is the name of the row of a table that the run belongs to, ``label`` its
    method with mapping and attention. Columns of settings have the setting's key, such as ``optim.lr``.
    """
    import pandas as pd

    students, rows = [result for result in results if result.get("stage", "student") == "student"], []
    for result, row_name in zip(students, row_names(students), strict=True):
        scores = {"score": result.get("score"), "teacher_score": result.get("teacher_score")}
        scores |= {f"metrics.{name}": value for name, value in (result.get("metrics") or {}).items()}
        row = {"row": row_name, "label": label(result)} | {name: result.get(name) for name in NAMES} | scores
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


# --- Points and cells


@dataclass(frozen=True)
class Point:
    """Finished runs with equal settings and different seeds."""

    runs: tuple[Result, ...]

    @cached_property
    def spread(self) -> Spread:
        """Mean and spread of the scores in percent; several draws of a mapping for each of several seeds are one."""
        by_seed = grouped((run["seed"], 100 * run["score"]) for run in self.runs)
        if 1 < len(by_seed) < len(self.runs):
            return Spread.from_values([*map(fmean, by_seed.values())])
        return Spread.from_values([100 * run["score"] for run in self.runs])

    @cached_property
    def rank(self) -> tuple[int, float]:
        """Number of seeds, since a mean over few is more often lucky, and the mean score by which grids choose.

        That is the reported score, or one on held-out examples or by another metric.
        """
        mean = fmean(100 * selection_of(run).get("score", run["score"]) for run in self.runs)
        return self.spread.count, -inf if isnan(mean) else mean


@dataclass(frozen=True)
class Cell:
    """A row on one task.

    Attributes:
        points: finished points of the grid, the best first.
        ties: number of points with the rank of the first.
        unfinished: runs that have not finished.
    """

    points: tuple[Point, ...] = ()
    unfinished: tuple[Result, ...] = ()
    ties: int = 0

    @property
    def runs(self) -> tuple[Result, ...]:
        """Runs of the best point."""
        return self.points[0].runs if self.points else ()

    @property
    def value(self) -> float | None:
        return self.points[0].spread.mean if self.points else None

    @property
    def status(self) -> str:
        """``done``, or the reason why there is no value."""
        if self.points:
            return "done"
        statuses = [run["status"] for run in self.unfinished]
        return "running" if "running" in statuses else (statuses or ["not run"])[-1]

    @property
    def kind(self) -> str:
        """How the value was chosen from a grid; empty for a single run or the mean of its seeds."""
        if len(self.points) < 2:
            return ""
        if selector := selection_of(self.runs[0]).get("on"):
            return ELSEWHERE.format(selector)
        return GRID_MEAN if self.points[0].spread.count > 1 else GRID

    @property
    def is_optimistic(self) -> bool:
        """Whether the examples of this value chose a point of a grid, by any metric: the value is then too high."""
        if not self.kind:
            return False
        run = self.runs[0]
        selector, column = selection_of(run).get("on", ""), run["task"]
        is_another_split = selector.startswith(f"{run.get('of_task', column)}_") and selector != column
        return not (tested_on(run) or selector.startswith("held_out ") or is_another_split)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings of the best point in which the grid's points differ."""
        names = varied([settings(point.runs[0]) for point in self.points])
        return {name: settings(self.runs[0]).get(name) for name in names}

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """What tables say of the best point and its grid, by column of the table's frame; empty without a point.

        ``best_run`` is the score of the single run that is best by the score by which grids choose. ``grid_mean`` is
        the mean of the points' means: the score to expect without a search. ``steps_in_all`` trained the student, those
        of its earlier phases included.
        """
        if not self.points:
            return {}
        run, spread = self.runs[0], self.points[0].spread
        scores = [(selection_of(r).get("score", r["score"]), r["score"]) for point in self.points for r in point.runs]
        best = max((pair for pair in scores if not isnan(pair[0])), key=lambda pair: pair[0], default=None)
        means = [point.spread.mean for point in self.points]
        return {
            "metric": run["metric"],
            "kind": self.kind,
            "value": spread.mean,
            "seeds": spread.count,
            "sd": spread.sd,
            "interval": spread.interval,
            "best_run": 100 * best[1] if best else None,
            "points": len(means),
            "grid_mean": fmean(means) if len(means) > 1 else None,
            "steps_in_all": run.get("steps_in_all"),
            "teacher": run.get("teacher"),
            "teacher_score": 100 * run["teacher_score"] if run.get("teacher_score") is not None else None,
            "num_layers": (run.get("student") or {}).get("num_layers"),
            "settings": json.dumps(self.settings),
            "scores": json.dumps(_scores_by_seed(self.runs)),
        } | _printed(run.get("published"), spread.mean)


def _printed(number: Mapping[str, Any] | None, value: float) -> dict[str, Any]:
    """Return the number that a paper prints, by the columns of a table, and the difference of ``value`` from it."""
    if not number:
        return {}
    printed = {"published": number["value"], "source": number["source"], "comparable": number["comparable"]}
    return printed | {"difference": value - number["value"]}


def _scores_by_seed(runs: Sequence[Result]) -> dict[str, float]:
    """Return the score of each run by its seed; by the seeds of all stages, if several runs have one seed."""
    if len({run["seed"] for run in runs}) == len(runs):
        return {str(run["seed"]): 100 * run["score"] for run in runs}
    seeds = [sorted(identity.seeds.items()) if (identity := identity_of(run)) else () for run in runs]
    names = [", ".join(f"{name}={seed}" for name, seed in of_run) for of_run in seeds]
    return {name or str(run["seed"]): 100 * run["score"] for name, run in zip(names, runs, strict=True)}


def cell_of(runs: Sequence[Result]) -> Cell:
    """Return the cell of the runs of one row on one task. A seed that was run twice counts once."""
    points = []
    for group in by_setting(filter(is_scored, runs)):
        pairs = ((identity_of(run), run) for run in group)
        seeds = [frozenset(one.seeds.items()) if one else run.get("key") for one, run in pairs]
        points.append(Point(tuple(run for n, run in enumerate(group) if seeds[n] not in seeds[:n])))
    points.sort(key=lambda point: point.rank, reverse=True)
    ties = sum(point.rank == points[0].rank for point in points)
    return Cell(tuple(points), tuple(run for run in runs if not is_scored(run)), ties)


def by_setting(runs: Iterable[Result]) -> list[list[Result]]:
    """Group the runs of a row by the settings of their grid. Runs of one group differ only in their seeds."""
    pairs = ((identity_of(run), run) for run in runs)
    by_grid = grouped((frozenset(identity.grid.items()) if identity else None, run) for identity, run in pairs)
    return list(by_grid.values())


# --- Tables


@dataclass(frozen=True)
class ResultTable:
    """A table. Tasks, teachers and rows keep the order of the results.

    Attributes:
        tasks: names of the columns.
        teachers: numbers of each teacher by name and task, such as ``value`` and ``published``.
        rows: cells by row and task; runs of a row differ only in task, seeds and the settings of a grid.
        means: columns that are means of others, with the names of those. Averages over tasks are not among ``tasks``.
    """

    tasks: list[str]
    teachers: Mapping[str, Mapping[str, Mapping[str, Any]]]
    rows: Mapping[str, Mapping[str, Cell]]
    means: Mapping[str, Sequence[str]]

    @property
    def cells(self) -> list[tuple[str, str, Cell]]:
        """All cells, each with the names of row and task."""
        return [(row, task, cell) for row, cells in self.rows.items() for task, cell in cells.items()]

    @property
    def unfinished(self) -> list[tuple[str, Result]]:
        """Runs that have not finished, each with the name of its row."""
        return [(name, run) for name, _, cell in self.cells for run in cell.unfinished]

    @cached_property
    def frame(self) -> "pd.DataFrame":
        """The numbers of all cells, one a row, teachers first; ``optimism`` is the score minus the held-out score."""
        import pandas as pd

        lines: list[dict[str, Any]] = [
            {"row": name, "task": task, "status": "done", "kind": "", **numbers}
            for name, of_teacher in self.teachers.items()
            for task, numbers in of_teacher.items()
        ]
        for row, task, cell in self.cells:
            run = next(run for of_row in self.rows[row].values() for run in (*of_row.runs, *of_row.unfinished))
            lines.append({"row": row, "method": label(run), "task": task, "status": cell.status} | cell.numbers)
            held_out = self.rows[row].get(held_out_column(task), Cell()).value
            if cell.value is not None and held_out is not None:
                lines[-1]["optimism"] = cell.value - held_out
        return pd.DataFrame(lines, columns=[*COLUMNS, "steps_in_all", "optimism"], dtype=object)


def tabulate(results: Iterable[Result], split: Collection[str] = ()) -> ResultTable:
    """Return the table of ``results``, finished or not, without runs that ended with a stage before the student.

    Args:
        split: settings of a grid whose values are rows, such as ``optim.lr``.
    Raises:
        UserError: no run has a setting of this name.
    """
    students = distinct(result for result in results if is_scored(result) or result["status"] != "done")
    entries = [entry for result in students for entry in _in_columns(result)]
    tasks = list(dict.fromkeys(entry["task"] for entry in entries))
    rows: dict[str, dict[str, list[Result]]] = {}
    identities = [identity for entry in entries if (identity := identity_of(entry))] if split else []
    distinct_settings = {item for identity in identities for item in identity.grid.items()}
    names = Counter(name for name, _ in distinct_settings)  # with the number of values
    for name in [name for name in split if name not in names]:
        remedy = suggestion(name, [other for other, num_values in names.items() if num_values > 1])
        if any(name in identity.seeds for identity in identities):
            remedy = "Rows are means over seeds; see the column 'scores': " + command("distill-run table --format csv")
        raise UserError("--split", name, "is no setting of a grid here", remedy)
    for name, entry in zip(row_names(entries, split=split), entries, strict=True):
        rows.setdefault(name, {task: [] for task in tasks})[entry["task"]].append(entry)
    cells = {row: {task: cell_of(runs) for task, runs in of_row.items()} for row, of_row in rows.items()}
    return ResultTable(tasks, _teachers(entries), cells, _means(entries))


def _means(entries: Sequence[Result]) -> dict[str, list[str]]:
    """Return the columns that are means of others, with those: of a task's splits, and of the same part of all tasks.

    A column whose rows are means of different splits is left out: the names of the rows then say which.
    """
    means: dict[str, list[str]] = {}
    for column in dict.fromkeys(entry["task"] for entry in entries):
        parts = {tuple(entry.get("mean_of", ())) for entry in entries if entry["task"] == column}
        if len(parts) == 1 and len(part := parts.pop()) > 1:
            means[column] = [*part]
    averages = dict.fromkeys((entry["average"], entry["task"]) for entry in entries if "average" in entry)
    return means | {name: columns for name, columns in grouped(averages).items() if len(columns) > 1}


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
    task, column, test = result["task"], column_of(result), result.get("test")
    suffix, selection = column.removeprefix(task), selection_of(result)
    chosen_by = {"on": column, "score": result.get("score"), **selection}
    part = {**result, "of_task": task, "others": [], "selection": chosen_by}

    def with_other_metrics(entry: Result, splits: Iterable[str], suffix: str) -> Iterator[Result]:
        """Yield the entry of all splits, and a copy for each other metric of it that a paper prints."""
        mean = {"average": AVERAGE + suffix, "mean_of": [f"{task}_{name}{suffix}" for name in splits]}
        yield {**entry, "of_task": task, "task": f"{task}{suffix}", **mean}
        for other in (entry.get("others") or []) if is_scored(entry) else []:
            chosen_by = {"on": entry["metric"], "score": entry["score"], **selection_of(entry)}
            names = {"of_task": task, **other, "task": f"{task}{suffix} {other['metric']}"}
            yield {**entry, **names, "selection": chosen_by}

    yield from with_other_metrics(result, scored_on(result), suffix)
    if not is_scored(result):
        return
    for name, numbers in (result.get("splits") or {}).items():
        yield {**part, **numbers, "split": name, "task": f"{task}_{name}{suffix}"}
    if test:
        splits, suffix = test["splits"], f"{suffix} {TEST}"
        yield from with_other_metrics({**part, **test, "splits": {}, "tested_on": splits}, splits, suffix)
        for name in test["columns"]:
            numbers = {**splits[name], "metric": test["metric"], "split": name, "tested_on": {name: splits[name]}}
            yield {**part, **numbers, "task": f"{task}_{name}{suffix}"}


def distinct(results: Iterable[Result]) -> list[Result]:
    """Return one result per run, since two folders may hold the same run: the one with most scores."""
    runs: dict[Hashable, Result] = {}
    for number, result in enumerate(results):
        run = (label(result), result["task"], result.get("key") or number, str(result.get("conditions")))
        if run not in runs or not is_scored(runs[run]) or (result.get("test") and not runs[run].get("test")):
            runs[run] = result
    return list(runs.values())


def _teachers(results: Sequence[Result]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the numbers of each teacher by task. One of the same name with another score on a task is another row."""
    rows: dict[str, dict[str, Result]] = {}
    for result in results:
        if is_scored(result) and result.get("teacher_score") is not None:
            name = f"teacher {result['teacher']}"
            first = rows.setdefault(name, {}).setdefault(result["task"], result)
            if first["metric"] != result["metric"]:
                name += f" by {result['metric']}"
                first = rows.setdefault(name, {}).setdefault(result["task"], result)
            if first["teacher_score"] != result["teacher_score"]:
                score = f"{100 * result['teacher_score']:.2f}"
                rows.setdefault(f"{name} at {score}", {}).setdefault(result["task"], result)
    return {name: {task: _teacher_numbers(run) for task, run in runs.items()} for name, runs in rows.items()}


def _teacher_numbers(run: Result) -> dict[str, Any]:
    """Return the score of a run's teacher, and the number that the paper of the run's method prints for it."""
    papers, score = published.papers_of(run["method"]), 100 * run["teacher_score"]
    teacher = run.get("teacher_model") or {}
    if run.get("data_match") == published.OTHER:
        return {"value": score}
    if number := run.get("published"):
        papers = [paper for paper in papers if number["source"].startswith(published.titles()[paper])]
    splits = tuple(scored_on(run))
    is_test = bool(tested_on(run)) or splits == (TEST,)
    quantity = published.Quantity(run["of_task"], splits, run["metric"], is_test, "split" in run)
    model = published.ScoredModel(**teacher, teacher=run["teacher"], teacher_type=teacher.get("model_type"))
    printed = published.find(TEACHER, quantity, model, papers=papers)
    comparable = {"comparable": printed.comparable and run.get("data_match") != published.PART} if printed else {}
    return {"value": score} | _printed({**printed.model_dump(), **comparable} if printed else None, score)
