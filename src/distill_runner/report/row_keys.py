"""Keys that separate the rows of a table: the method, and whatever else differs between results."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distill_runner.common.errors import as_typed
from distill_runner.report.cells import (
    DATA,
    Settings,
    data_of,
    is_scored,
    label,
    scored_on,
    settings,
    stage_of,
    telling_rows,
)
from distill_runner.report.collect import Result

EVERYWHERE: Mapping[str, str] = {
    "source": "from {}",
    "num_layers": "{} layers",
    "width": "width {}",
    "init": "init {}",
    "teacher": "teacher {}",
}
"""Facets that separate rows over all tasks together, and the words for each in a row's name."""
BY_TASK: Mapping[str, str] = {
    "dataset": "data {}",
    "config": "configuration {}",
    "revision": "revision {}",
    "columns": "columns {}",
    "labels": "labels {}",
    "train": "trained on {}",
    "select_on": "selected on {}",
    "hold_out": "{} held out",
    "scored_on": "scored on {}",
    "metric": "by {}",
    "budget": "{}",
    "num_params": "{:,} parameters",
    "teacher_seed": "teacher seed {}",
    "teacher_score": "teacher at {:.2f}",
}
"""Facets that separate rows within one task, since their values differ between tasks.

Settings follow under their own names, where no facet above already separates the results.
"""
OF_DATA = ("config", "revision", "columns", "labels", "train", "select_on", "hold_out")
"""Facets that a result names in its ``data`` (``Splits.used``)."""
PLACE = ""
"""Facet for the place of a result (see ``row_keys``). It separates results but is not part of a key."""

Facets = Mapping[str, Any]
"""Facets of a result by name. None if the run does not know the value, as when it failed before reading its models."""


@dataclass(frozen=True)
class RowKey:
    """The method's label, and the result's values of the facets that differ between results."""

    label: str
    facets: Facets

    @property
    def name(self) -> str:
        known = [(name, value) for name, value in self.facets.items() if value is not None]
        return ", ".join([self.label, *(_in_words(name, value) for name, value in known)])

    def may_be(self, other: "RowKey") -> bool:
        """Whether the two keys agree in the label and in every facet that both know."""
        mine, theirs = self.facets, other.facets
        return (
            self.label == other.label
            and mine.keys() == theirs.keys()
            and all(mine[name] == theirs[name] or None in (mine[name], theirs[name]) for name in mine)
        )


def row_keys(results: Sequence[Result], places: Sequence[Hashable] | None = None) -> list[RowKey]:
    """Return the key of each result. An unfinished run takes the key of a finished run that agrees in all known facets.

    A student with new weights has no source, which reads like an unknown one. So the initialisation must agree too.

    Args:
        places: place of each result, such as its point on an axis, if places already separate the results. Facets
            that follow from the place are left out of the keys.
    """
    settled = _telling_settings(results)
    facets = [
        {PLACE: place} | _facets(result) | _settled(result, settled)
        for result, place in zip(results, places or [None] * len(results), strict=True)
    ]
    telling = _telling_facets(results, facets, settled)
    keys = [
        RowKey(label(result), {name: has[name] for name in telling(result)})
        for result, has in zip(results, facets, strict=True)
    ]
    finished = [(key, has["init"]) for key, has, result in zip(keys, facets, results, strict=True) if is_scored(result)]

    def of_finished(key: RowKey, init: Any) -> RowKey:
        agreeing = (other for other, its in finished if key.may_be(other) and (its == init or None in (its, init)))
        return next(agreeing, key)

    return [
        key if is_scored(result) else of_finished(key, has["init"])
        for key, has, result in zip(keys, facets, results, strict=True)
    ]


def _in_words(name: str, value: Any) -> str:
    if name == "source" and (stage := stage_of(value)):
        return f"after {stage}"
    return {**EVERYWHERE, **BY_TASK}.get(name, f"{name} {{}}").format(value)


def _facets(result: Result) -> dict[str, Any]:
    student, known, data = result.get("student") or {}, settings(result), data_of(result)
    score = result.get("teacher_score")
    return {
        **{name: student.get(name) for name in ("source", "num_layers", "width", "init")},
        **{name: result.get(name) for name in ("teacher", "teacher_seed", "dataset", "metric")},
        **{name: as_typed(data[name]) if name in data else None for name in OF_DATA},
        "scored_on": _splits({name: data["validation"][name] for name in scored_on(result)}) if data else None,
        "budget": _budget(known.get("optim.epochs", result.get("epochs")), known.get("optim.max_steps")),
        "num_params": result.get("num_params"),
        "teacher_score": None if score is None else 100 * score,
    }


def _splits(scored: Mapping[str, str]) -> str:
    """Return splits in words; their names tell them apart if there are several."""
    named = (f"{name} {split}" for name, split in scored.items())
    return " and ".join(scored.values() if len(scored) == 1 else named)


def _budget(epochs: int | None, steps: int | None) -> str | None:
    """Return what ends training, in words; None if it is not known. Without ``steps`` they have no limit."""
    if epochs is None:
        return None if steps is None else f"{steps} steps"
    return f"{epochs} epochs" if steps is None else f"{epochs} epochs, at most {steps} steps"


MethodOnTask = tuple[str, str]
"""The method's label, and the task."""


def _of(result: Result) -> MethodOnTask:
    return label(result), result["task"]


def _telling_settings(results: Sequence[Result]) -> dict[MethodOnTask, list[str]]:
    """Return the settings that make separate rows, for each method on each task."""
    known: dict[MethodOnTask, list[Settings]] = {}
    for result in results:
        if has := settings(result):
            known.setdefault(_of(result), []).append(has)
    return {of: telling_rows(every) for of, every in known.items()}


def _settled(result: Result, settled: Mapping[MethodOnTask, Sequence[str]]) -> dict[str, Any]:
    has = settings(result)
    return {name: as_typed(has.get(name)) if has else None for name in settled.get(_of(result), [])}


def _telling_facets(
    results: Sequence[Result], facets: Sequence[Facets], settled: Mapping[MethodOnTask, Sequence[str]]
) -> Callable[[Result], list[str]]:
    """Return a function from a result to the facets that separate it, without facets that follow from earlier ones.

    A method's data come before the budget: ``kd, transfer_size 505`` must not be named by its number of epochs alone.
    Every facet of ``EVERYWHERE`` counts as an earlier one: those left out of names follow from those in them.
    """
    every = list(zip(results, facets, strict=True))
    everywhere = _telling(EVERYWHERE, facets)
    by_task = {}
    for task in dict.fromkeys(result["task"] for result in results):
        here = [has for result, has in every if result["task"] == task]
        by_task[task] = [name for name in _telling([*EVERYWHERE, *BY_TASK], here) if name in BY_TASK]
    by_method = {}
    for of, names in settled.items():
        here = [has for result, has in every if _of(result) == of]
        data = [name for name in names if name.partition(".")[0] in DATA]
        ordered = sorted([*by_task[of[1]], *data], key=lambda name: name == "budget")  # the budget last
        known = _telling([*EVERYWHERE, *ordered, *(name for name in names if name not in data)], here)
        by_method[of] = [name for name in known if name in names]
    return lambda result: [*everywhere, *by_task[result["task"]], *by_method.get(_of(result), [])]


def _telling(names: Iterable[str], facets: Sequence[Facets]) -> list[str]:
    """Return the names in which facets differ, without names whose values follow from earlier names."""
    chosen = [PLACE]
    for name in names:
        known = [has for has in facets if has[name] is not None]
        values = {(*(has[earlier] for earlier in chosen), has[name]) for has in known}
        if len({has[name] for has in known}) > 1 and len(values) > len({value[:-1] for value in values}):
            chosen.append(name)
    return chosen[1:]
