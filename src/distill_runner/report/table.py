"""Results as text for a terminal: the rows at the end of a run, and methods against tasks in 80 columns.

A result is the content of a run's ``result.json``. Its scores lie in 0..1 and are shown times 100, as the
papers print them. ``mapping`` and ``attention`` are names or None. A result that failed also holds ``error``,
whose first line says why; it need not hold what only a finished run knows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, dist, sqrt
from statistics import fmean
from typing import Any

from distill_runner.report import published

Result = Mapping[str, Any]
WIDTH = 80
MEAN = "mean"


def label(result: Result) -> str:
    """Method with its mapping and, unless it is the plain dot product, its attention: ``alp po kqv-4``."""
    attention = result.get("attention")
    parts = [result["method"], result.get("mapping"), None if attention == "dot" else attention]
    return " ".join(part for part in parts if part)


def result_row(result: Result) -> str:
    """The end of one run in a few lines: score, teacher, published number, cost, where the student lies."""
    if result["status"] != "done":
        return f"{_why(result)}\n  folder     {result['folder']}"
    score, student = 100 * result["score"], result["student"]
    lines = [f"{label(result)} on {result['task']}, seed {result['seed']}: {score:.2f} {result['metric']}"]
    if result.get("teacher_score") is not None:
        teacher = 100 * result["teacher_score"]
        lines.append(f"  teacher    {teacher:.2f} ({score - teacher:+.2f}), {result['teacher']}")
    if number := result.get("published"):
        remark = "" if number["comparable"] else "; its teacher, size or metric is another"
        difference = f"({score - number['value']:+.2f})"
        lines.append(f"  published  {number['value']:.2f} {difference}, {number['source']}{remark}")
    return "\n".join(
        [
            *lines,
            f"  student    {student['num_layers']} layers of width {student['width']}, "
            f"init {student['init']}, {result['num_params'] / 1e6:.1f}M parameters",
            f"  training   best epoch {result['best_epoch']} of {result['epochs']}, "
            f"{_duration(result['seconds'])}, {result['examples_per_second']:.0f} examples/s",
            f"  folder     {result['folder']}",
        ]
    )


@dataclass(frozen=True)
class Row:
    """A line of the table, cells by task.

    Attributes:
        values: in percent.
        words: what stands where there is no value; a dash where neither is.
        bracketed: tasks whose value is a reference only.
        averaged: whether the mean over the tasks has a meaning.
    """

    name: str
    values: Mapping[str, float]
    words: Mapping[str, str] = field(default_factory=dict)
    bracketed: frozenset[str] = frozenset()
    averaged: bool = True

    def cell(self, task: str) -> str:
        if task not in self.values:
            return self.words.get(task, "-") + " "
        return f"({self.values[task]:.2f})" if task in self.bracketed else f"{self.values[task]:.2f} "

    def with_average(self, tasks: Sequence[str]) -> "Row":
        if not self.averaged or any(task not in self.values for task in tasks):
            return self
        values = {**self.values, MEAN: fmean(self.values[task] for task in tasks)}
        bracketed = self.bracketed | {MEAN} if self.bracketed else self.bracketed
        return replace(self, values=values, bracketed=bracketed)


def methods_table(results: Sequence[Result]) -> str:
    """Methods × tasks with the teachers first and published numbers beneath the measured ones, in 80 columns.

    Several runs of one cell are shown as their mean, with the standard deviation and the number of seeds
    beneath, if their seeds differ; otherwise they are a search, and the best is shown and called so.
    """
    if not results:
        return "no results"
    tasks = list(dict.fromkeys(result["task"] for result in results))
    rows = _teacher_rows(results)
    for name in dict.fromkeys(label(result) for result in results):
        rows += _method_rows(name, [result for result in results if label(result) == name])
    if len(tasks) > 1:
        rows = [row.with_average(tasks) for row in rows]
        tasks = [*tasks, MEAN]
    parts = _blocks(tasks, rows)
    if any(row.bracketed for row in rows):
        parts.append("In brackets: the paper's teacher, size or metric is not that of the run.")
    if reasons := [_fit(_why(result)) for result in results if result["status"] != "done"]:
        parts.append("\n".join(reasons))
    return "\n\n".join(parts)


def _teacher_rows(results: Sequence[Result]) -> list[Row]:
    rows: list[Row] = []
    taught = [result for result in results if result["status"] == "done" and result.get("teacher_score") is not None]
    for teacher in dict.fromkeys(result["teacher"] for result in taught):
        here = [result for result in taught if result["teacher"] == teacher]
        scores = {result["task"]: 100 * result["teacher_score"] for result in here}
        numbers = {
            result["task"]: published.find(
                "teacher", result["task"], num_layers=None, teacher=teacher, metric=result["metric"]
            )
            for result in here
        }
        printed = {task: number.model_dump() for task, number in numbers.items() if number}
        rows += [Row(f"teacher {teacher}", scores), *_published_rows(printed)]
    return rows


def _method_rows(name: str, results: Sequence[Result]) -> list[Row]:
    values: dict[str, dict[str, float]] = {name: {}}  # row name -> task -> percent
    spreads: dict[str, dict[str, float]] = {}
    words: dict[str, str] = {}
    for task in dict.fromkeys(result["task"] for result in results):
        here = [result for result in results if result["task"] == task]
        done = [result for result in here if result["status"] == "done"]
        scores = [100 * result["score"] for result in done]
        if not done:
            words[task] = here[-1]["status"]
        elif len({result["seed"] for result in done}) < len(done):
            values.setdefault(f"{name}, best of {len(done)}", {})[task] = max(scores)
        else:
            values[name][task] = mean = fmean(scores)
            if len(done) > 1:
                spreads.setdefault(f"  sd, {len(done)} seeds", {})[task] = dist(scores, [mean] * len(done)) / sqrt(
                    len(done) - 1
                )
    printed = {result["task"]: result["published"] for result in results if result.get("published")}
    return [
        *(Row(row, cells, words if row == name else {}) for row, cells in values.items() if cells or words),
        *(Row(row, cells, averaged=False) for row, cells in spreads.items()),
        *_published_rows(printed),
    ]


def _published_rows(printed: Mapping[str, Result]) -> list[Row]:
    """One row per source, of the published numbers by task."""
    return [
        Row(
            f"  {source}",
            {task: number["value"] for task, number in printed.items() if number["source"] == source},
            bracketed=frozenset(task for task, number in printed.items() if not number["comparable"]),
        )
        for source in dict.fromkeys(number["source"] for number in printed.values())
    ]


def _blocks(tasks: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """The table, cut into as few and as equal blocks of tasks as fit the width."""
    left = min(1 + max(len(row.name) for row in rows), WIDTH // 2)
    cell = 1 + max(len(text) for task in tasks for text in [f"{task} ", *(row.cell(task) for row in rows)])
    most = max(1, (WIDTH + 1 - left) // cell)  # the blank that ends a line is cut off
    count = ceil(len(tasks) / ceil(len(tasks) / most))
    blocks = []
    for part in (tasks[start : start + count] for start in range(0, len(tasks), count)):
        lines = [" " * left + "".join(f"{task + ' ':>{cell}}" for task in part)]
        for row in rows:
            cells = "".join(f"{row.cell(task):>{cell}}" for task in part)
            lines.append(_fit(row.name, left - 1).ljust(left) + cells)
        blocks.append("\n".join(line.rstrip() for line in lines))
    return blocks


def _why(result: Result) -> str:
    reason = str(result.get("error") or "").partition("\n")[0]
    if not reason and result["status"] == "interrupted":
        reason = "the same command takes it up again"
    head = f"{label(result)} on {result['task']}, seed {result['seed']} {result['status']}"
    return f"{head}: {reason}" if reason else head


def _fit(text: str, width: int = WIDTH) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
