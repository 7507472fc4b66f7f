"""Results as rows of cells, whatever they are printed as: methods × tasks.

Runs of students, teachers, data, budgets or stages before the student that differ never share a row: what differs is
part of the row's name.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distill_runner.common.errors import as_typed
from distill_runner.report import published
from distill_runner.report.cells import (
    ResultCell,
    Settings,
    cell_of,
    is_scored,
    label,
    selection_of,
    settings,
    telling_rows,
)
from distill_runner.report.collect import Result


@dataclass(frozen=True)
class Row:
    """A method with one kind of student, its cells by task. ``result`` is one of its runs."""

    name: str
    cells: Mapping[str, ResultCell]
    result: Result

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(cell.kind for cell in self.cells.values()))


@dataclass(frozen=True)
class Teacher:
    """Scores of one teacher by task, and the published numbers beside them."""

    name: str
    scores: Mapping[str, float]
    published: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ResultTable:
    """Rows in the order in which the results came."""

    tasks: list[str]
    teachers: list[Teacher]
    rows: list[Row]

    @property
    def unfinished(self) -> list[tuple[str, Result]]:
        """Runs that have not finished, with the names of their rows."""
        return [(row.name, run) for row in self.rows for cell in row.cells.values() for run in cell.unfinished]


def tabulate(results: Iterable[Result]) -> ResultTable:
    """The table of ``results``, which need not have finished; one that ended before the student has no place in it."""
    known = distinct(result for result in results if is_scored(result) or result["status"] != "done")
    every = [placed for result in known for part in by_split(result) for placed in _in_columns(part)]
    tasks = list(dict.fromkeys(result["task"] for result in every))
    names = row_names(every)
    rows = []
    for name in dict.fromkeys(names):
        here = [result for result, its_name in zip(every, names, strict=True) if its_name == name]
        cells = {task: cell_of([result for result in here if result["task"] == task]) for task in tasks}
        rows.append(Row(name, cells, here[0]))
    return ResultTable(tasks, _teachers(every), rows)


def by_split(result: Result) -> list[Result]:
    """A result, and that of each validation split with a column of its own, such as a language (``splits``)."""
    parts = (result.get("splits") or {}).items() if is_scored(result) else ()
    return [result, *({**result, "others": [], **part, "task": f"{result['task']}_{name}"} for name, part in parts)]


def beside(task: str) -> str:
    """The column of what was selected on held-out examples of a task."""
    return f"{task}, held out"


def _in_columns(result: Result) -> Iterator[Result]:
    """The result in the column that it belongs to, and copies of it for other metrics that a paper prints."""
    task = beside(result["task"]) if "held_out" in str(selection_of(result).get("on")) else result["task"]
    here = {**result, "task": task, "of_task": result["task"]}
    yield here
    if not is_scored(result):
        return
    chosen = {"on": result["metric"], "score": result["score"], **selection_of(result)}
    for other in result.get("others") or []:
        yield {**here, **other, "task": f"{task} {other['metric']}", "selection": chosen}


def distinct(results: Iterable[Result]) -> list[Result]:
    """One result of each run: two folders may hold the same, or one of them a failure since mended."""
    kept: dict[Any, Result] = {}
    for number, result in enumerate(results):
        identity = (label(result), result["task"], result.get("key") or number)
        if identity not in kept or not is_scored(kept[identity]):
            kept[identity] = result
    return list(kept.values())


# What makes a row of its own, in the words of its name; those of the second group have other values on other tasks.
# Settings follow under their own names, where neither group says it already.
_EVERYWHERE: dict[str, str] = {
    "source": "from {}",
    "num_layers": "{} layers",
    "width": "width {}",
    "init": "init {}",
    "teacher": "teacher {}",
}
_BY_TASK: dict[str, str] = {
    "dataset": "data {}",
    "metric": "by {}",
    "epochs": "{} epochs",
    "steps": "{} steps",
    "num_params": "{:,} parameters",
    "teacher_score": "teacher at {:.2f}",
}
_WORDS = _EVERYWHERE | _BY_TASK
PLACE = ""
"""Name among the facets of where a result stands; it tells results apart without a word."""


def _facets(result: Result) -> dict[str, Any]:
    """None where a run does not know it, as one that failed before its models were read."""
    student, known = result.get("student") or {}, settings(result)
    score = result.get("teacher_score")
    return {
        **{name: student.get(name) for name in ("source", "num_layers", "width", "init")},
        **{name: result.get(name) for name in ("teacher", "dataset", "metric")},
        "epochs": known.get("optim.epochs", result.get("epochs")),
        "steps": known.get("optim.max_steps"),
        "num_params": result.get("num_params"),
        "teacher_score": None if score is None else 100 * score,
    }


def row_names(results: Sequence[Result], places: Sequence[Hashable] | None = None) -> list[str]:
    """For each result its label and, of what differs between the results, what it has.

    Args:
        places: where each result stands, if that tells them apart already: what follows from it is no part of a name.
    """
    settled = _telling_settings(results)
    facets = [
        {PLACE: place} | _facets(result) | _settled(result, settled)
        for result, place in zip(results, places or [None] * len(results), strict=True)
    ]
    naming = _naming(results, facets, settled)
    keys = [
        (label(result), {name: has[name] for name in naming(result)})
        for result, has in zip(results, facets, strict=True)
    ]
    whole = [key for key, result in zip(keys, results, strict=True) if is_scored(result)]
    names = []
    for (method, has), result in zip(keys, results, strict=True):
        if not is_scored(result):  # what it does not know is taken from a finished run of its kind
            has = next((other for same, other in whole if same == method and _agree(has, other)), has)
        words = [_WORDS.get(name, f"{name} {{}}").format(value) for name, value in has.items() if value is not None]
        names.append(", ".join([method, *words]))
    return names


def _agree(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        first[name] == second[name] or None in (first[name], second[name]) for name in first
    )


Group = tuple[str, str]
"""Label and task."""


def _group(result: Result) -> Group:
    return label(result), result["task"]


def _telling_settings(results: Sequence[Result]) -> dict[Group, list[str]]:
    """Of the settings of each method on each task, those that make rows."""
    known: dict[Group, list[Settings]] = {}
    for result in results:
        if has := settings(result):
            known.setdefault(_group(result), []).append(has)
    return {group: telling_rows(every) for group, every in known.items()}


def _settled(result: Result, settled: Mapping[Group, Sequence[str]]) -> dict[str, Any]:
    has = settings(result)
    return {name: as_typed(has.get(name)) if has else None for name in settled.get(_group(result), [])}


def _naming(
    results: Sequence[Result], facets: Sequence[Mapping[str, Any]], settled: Mapping[Group, Sequence[str]]
) -> Callable[[Result], list[str]]:
    """Gives the facets that tell a result from others, without those that follow from the ones before them."""
    every = list(zip(results, facets, strict=True))
    everywhere = _telling(_EVERYWHERE, facets)
    by_task = {}
    for task in dict.fromkeys(result["task"] for result in results):
        here = [has for result, has in every if result["task"] == task]
        by_task[task] = [name for name in _telling([*everywhere, *_BY_TASK], here) if name in _BY_TASK]
    by_group = {}
    for group, names in settled.items():
        here = [has for result, has in every if _group(result) == group]
        by_group[group] = [name for name in _telling([*everywhere, *by_task[group[1]], *names], here) if name in names]
    return lambda result: [*everywhere, *by_task[result["task"]], *by_group.get(_group(result), [])]


def _telling(names: Iterable[str], facets: Sequence[Mapping[str, Any]]) -> list[str]:
    chosen = [PLACE]
    for name in names:
        known = [has for has in facets if has[name] is not None]
        values = {(*(has[earlier] for earlier in chosen), has[name]) for has in known}
        if len({has[name] for has in known}) > 1 and len(values) > len({value[:-1] for value in values}):
            chosen.append(name)
    return chosen[1:]


def _teachers(results: Sequence[Result]) -> list[Teacher]:
    """One row of each teacher; a second one of the same name and another score on a task has its own."""
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
    found = {
        task: published.find("teacher", run["of_task"], num_layers=None, teacher=run["teacher"], metric=run["metric"])
        for task, run in runs.items()
    }
    return {task: number.model_dump() for task, number in found.items() if number}
