"""Results as rows of cells for every output format: methods × tasks.

Runs that differ in student, teacher, data, budget or a stage before the student never share a row. The difference
becomes part of the row's name.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distill_runner.report import published
from distill_runner.report.cells import ResultCell, cell_of, data_of, is_scored, label, selection_of
from distill_runner.report.collect import Result
from distill_runner.report.row_keys import row_keys


@dataclass(frozen=True)
class Row:
    """A method with one kind of student, and its cells by task. ``result`` is one of its runs."""

    name: str
    cells: Mapping[str, ResultCell]
    result: Result

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(cell.kind for cell in self.cells.values()))


@dataclass(frozen=True)
class Teacher:
    """Scores of one teacher by task, in percent, and the published numbers for them."""

    name: str
    scores: Mapping[str, float]
    published: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ResultTable:
    """A table. Tasks, teachers and rows keep the order of the results."""

    tasks: list[str]
    teachers: list[Teacher]
    rows: list[Row]

    @property
    def unfinished(self) -> list[tuple[str, Result]]:
        """Runs that have not finished, each with the name of its row."""
        return [(row.name, run) for row in self.rows for cell in row.cells.values() for run in cell.unfinished]


def tabulate(results: Iterable[Result]) -> ResultTable:
    """Return the table of ``results``, finished or not, without runs that ended with a stage before the student."""
    known = distinct(result for result in results if is_scored(result) or result["status"] != "done")
    every = [placed for result in known for part in by_split(result) for placed in _in_columns(part)]
    tasks = list(dict.fromkeys(result["task"] for result in every))
    names = [key.name for key in row_keys(every)]
    rows = []
    for name in dict.fromkeys(names):
        here = [result for result, its_name in zip(every, names, strict=True) if its_name == name]
        cells = {task: cell_of([result for result in here if result["task"] == task]) for task in tasks}
        rows.append(Row(name, cells, here[0]))
    return ResultTable(tasks, _teachers(every), rows)


def by_split(result: Result) -> list[Result]:
    """Return the result and a copy for each validation split (``splits``) with its own column, such as a language."""
    parts = (result.get("splits") or {}).items() if is_scored(result) else ()
    own = ({**part, "split": name, "task": f"{result['task']}_{name}"} for name, part in parts)
    return [result, *({**result, "others": [], **each} for each in own)]


def beside(task: str) -> str:
    """Return the name of the column for runs of ``task`` that were selected on held-out examples."""
    return f"{task}, held out"


def column_of(result: Result) -> str:
    """Return the name of the column that shows the result."""
    selects = (data_of(result).get("select_on"), selection_of(result).get("on"))  # the first, before there is a score
    return beside(result["task"]) if any("held_out" in str(on) for on in selects) else result["task"]


def _in_columns(result: Result) -> Iterator[Result]:
    """Yield the result with its column's name as task, and a copy for each other metric that a paper prints."""
    task = column_of(result)
    here = {**result, "task": task, "of_task": result["task"]}
    yield here
    if not is_scored(result):
        return
    chosen = {"on": result["metric"], "score": result["score"], **selection_of(result)}
    for other in result.get("others") or []:
        yield {**here, **other, "task": f"{task} {other['metric']}", "selection": chosen}


def distinct(results: Iterable[Result]) -> list[Result]:
    """Return one result per run, since two folders may hold the same run; a finished result replaces a failure."""
    kept: dict[Any, Result] = {}
    for number, result in enumerate(results):
        identity = (label(result), result["task"], result.get("key") or number)
        if identity not in kept or not is_scored(kept[identity]):
            kept[identity] = result
    return list(kept.values())


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
    return [
        Teacher(name, {task: 100 * run["teacher_score"] for task, run in runs.items()}, _of_teacher(runs))
        for name, runs in rows.items()
    ]


def _of_teacher(runs: Mapping[str, Result]) -> dict[str, Mapping[str, Any]]:
    found = {}
    for task, run in runs.items():
        split = "test" if "test" in data_of(run).get("validation", ()) else "dev"  # as for the student
        known = {"teacher": run["teacher"], "metric": run["metric"], "split": split}
        found[task] = published.find("teacher", run["of_task"], num_layers=None, **known)
    return {task: number.model_dump() for task, number in found.items() if number}
