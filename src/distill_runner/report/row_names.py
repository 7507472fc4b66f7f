"""Names of the rows of a table: the method, and what separates its rows, in words."""

import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from distill_runner.common.errors import format_value, quantity
from distill_runner.report.collect import Result, data_of, grouped, label
from distill_runner.report.identity import BUDGET, TEACHER, Identity, identity_of

OVERALL = ("source", "num_layers", "width", "init", "teacher")
"""Facets that are named where they differ between any two rows of a table."""
OF_TASK: Mapping[str, str] = {
    "config": "configuration {}",
    "revision": "revision {}",
    "task.content": "data {}",
    "task.columns": "columns {}",
    "task.label": "label {}",
    "task.labels": "labels {}",
    "task.train": "trained on {}",
    "task.select_on": "selected on {}",
    "task.hold_out": "{} held out",
    "task.scored_on": "scored on {}",
    "task.metric": "by {}",
    "task.class_weights": "class weights {}",
    "budget": "{}",
    "teacher.seed": "teacher seed {}",
}
"""Facets that are named where they differ between rows on one task, and the words for each.

All other settings are named, under their own names, where they differ between the rows of one method on one task.
"""
FEW_NUMBERS = 6
"""Numbers of a list that a name shows; of a longer list it says the range."""


class Facet(NamedTuple):
    """A property of a run: ``value`` separates runs, ``words`` name it."""

    value: Hashable
    words: str


Facets = dict[str, Facet]


class RowKey(NamedTuple):
    """What all runs of a row have in common; ``settings`` are those of their identity, None if it is not known."""

    method: str
    task: str
    place: Hashable
    settings: Hashable
    choices: tuple[tuple[str, str], ...] = ()


def row_names(
    results: Sequence[Result], places: Sequence[Hashable] | None = None, split: Collection[str] = ()
) -> list[str]:
    """Return the name of the row of each result: the method's label, and what differs between rows.

    Runs whose settings come from different choices of a group, such as ``loss=recipe``, are no points of one grid. Runs
    with equal settings are one row, whatever was chosen. A run that failed before its settings were known joins the row
    that it may belong to, if there is only one.

    Args:
        places: place of each result, such as its tick on an axis, if places already separate the results. Facets that
            follow from the place are left out of the names.
        split: settings of a grid that separate rows.
    """
    runs, rows, choices = list[tuple[RowKey, Facets]](), dict[RowKey, Facets](), dict[Hashable, Any]()
    identities = _with_own_teachers(results)
    for result, identity, place in zip(results, identities, places or [None] * len(results), strict=True):
        key = RowKey(label(result), result["task"], place, None)
        if identity:
            own = {name: value for name, value in identity.grid.items() if name in split}
            identity = replace(identity, row=identity.row | own)
            settings, grid = frozenset(identity.row.items()), frozenset(identity.grid.items())
            of_run = choices.setdefault((key, settings, grid), tuple((result.get("choices") or {}).items()))
            key = key._replace(settings=settings, choices=of_run)
        of_choices = {name: Facet(value, f"{name} {value}") for name, value in key.choices}
        runs.append((key, _facets(result, identity) | of_choices))
        if identity:
            rows.setdefault(*runs[-1])
    names, of_runs = _names(rows), []
    for key, facets in runs:
        if key.settings is None:
            same_place = [(row, of_row) for row, of_row in rows.items() if row[:3] == key[:3]]
            matches = [row for row, of_row in same_place if _agree(facets, of_row)]
            key = matches[0] if len(matches) == 1 else key
        is_taken = key not in names and any(row.task == key.task and names[row] == key.method for row in rows)
        of_runs.append(names.get(key, f"{key.method}, settings unknown" if is_taken else key.method))
    return of_runs


def _agree(one: Facets, other: Facets) -> bool:
    """Return whether facets of ``OVERALL`` that both have are the same; new weights differ from unknown ones."""
    return all(one[name].words == other[name].words for name in {*OVERALL} & one.keys() & other.keys())


def _with_own_teachers(results: Sequence[Result]) -> list[Identity | None]:
    """Return the identities of results, without the seeds of teachers where each seed has a teacher of its own.

    That is where all runs that otherwise are seeds of one row have ``teacher.seed=${seed}``: their mean is over both.
    """
    identities = [identity_of(result) for result in results]
    rows = [dict(identity.row) if identity else {} for identity in identities]
    seeds = [{row.pop(name) for name in [*row] if name.endswith(".seed")} for row in rows]
    keys = [(label(run), run["task"], frozenset(row.items())) for run, row in zip(results, rows, strict=True)]
    for group in grouped((key, number) for number, key in enumerate(keys)).values():
        own = [(number, identity) for number in group if (identity := identities[number])]
        if len(own) > 1 and all(seeds[number] == {identity.seeds.get("seed")} for number, identity in own):
            for number, identity in own:
                identities[number] = replace(identity, row=rows[number])
    return identities


def differences(first: Result, second: Result) -> list[str]:
    """Return the settings in which two runs differ, in words; no seeds of the student.

    Loss terms and stages that only one of the runs has are left out: they are what a comparison of methods compares.
    """
    one, other = identity_of(first), identity_of(second)
    if one is None or other is None:
        return ["settings that are not known"]
    both = ((first, one), (second, other))
    a_facets, b_facets = _unambiguous([_facets(run, replace(own, row=own.row | own.grid)) for run, own in both])
    stages = one.upstream | other.upstream
    skipped = (one.terms ^ other.terms) | (one.upstream ^ other.upstream)
    skipped |= {"teacher_stage"} if skipped & stages else frozenset()  # one side has no teacher, or another one
    names = [name for name in {**a_facets, **b_facets} if name.partition(".")[0] not in skipped]
    groups = [{name.partition(".")[0] for name in side} for side in (a_facets, b_facets)]
    one_sided = (groups[0] ^ groups[1]) - {name for name in names if "." not in name}
    texts = list[str]()
    for name in sorted(names, key=lambda name: name.partition(".")[0] in stages):  # the student's own come first
        group = name.partition(".")[0]
        a, b = (side.get(name, Facet(None, f"no {name}")) for side in (a_facets, b_facets))
        if group in one_sided:  # such as a transfer set: all its settings are on one side
            texts.append(f"{group} / no {group}" if group in groups[0] else f"no {group} / {group}")
        elif a != b:
            texts.append(f"{a.words} / {b.words.removeprefix(f'{name} ')}")
    return list(dict.fromkeys(texts))


def _names(rows: Mapping[RowKey, Facets]) -> dict[RowKey, str]:
    """Return the name of each row; ``rows`` holds the facets of the first run of each."""
    names = {}
    rows = dict(zip(rows, _unambiguous(list(rows.values())), strict=True))
    overall = _separating(rows, OVERALL, ignore_absent=True)
    for task in dict.fromkeys(row.task for row in rows):
        of_task = {row: facets for row, facets in rows.items() if row.task == task}
        shared = {*overall, *_separating(of_task, [*OVERALL, *OF_TASK], ignore_absent=True)}
        for method in dict.fromkeys(row.method for row in of_task):
            of_method = {row: facets for row, facets in of_task.items() if row.method == method}
            order = dict.fromkeys(name for facets in of_method.values() for name in facets)
            # The budget comes last: it often follows from the data. A run that has not finished may lack its width.
            candidates = [name for name in (*OVERALL, *order) if name != "width"]
            separating = shared | {*_separating(of_method, sorted(candidates, key="budget".__eq__))}
            in_order = [name for name in dict.fromkeys((*OVERALL, *OF_TASK, *order)) if name in separating]
            for row, facets in of_method.items():
                names[row] = ", ".join([method, *(facets[name].words for name in in_order if name in facets)])
    return names


def _separating(rows: Mapping[RowKey, Facets], candidates: Iterable[str], ignore_absent: bool = False) -> list[str]:
    """Return the names of facets that separate rows of one place, without those that follow from earlier ones.

    Args:
        ignore_absent: leave out rows that lack a facet; otherwise its absence is a value too.
    """
    names: list[str] = []
    for name in candidates:
        compared = [(row, facets) for row, facets in rows.items() if name in facets or not ignore_absent]
        values = {(row.place, *(facets.get(key) for key in (*names, name))) for row, facets in compared}
        if len(values) > len({value[:-1] for value in values}) and len({value[-1] for value in values}) > 1:
            names.append(name)
    return names


def _facets(result: Result, identity: Identity | None) -> Facets:
    """Return the facets of a result by name, in the order in which a reader wants to know them."""
    student, data, identity = result.get("student") or {}, data_of(result), identity or Identity()
    facets: Facets = {}
    if source := student.get("source"):
        words = f"from {source}".replace("from stage:", "after ")
        if identity.row.get("model.source") == TEACHER:
            words = f"from the fine-tuned {source}"
        facets["source"] = Facet(words, words)
    if (depth := student.get("num_layers")) is not None:
        facets["num_layers"] = Facet(depth, quantity(depth, "layer") if depth else "static")
    for name in ("width", "init"):
        if student.get(name) is not None:
            facets[name] = Facet(student[name], f"{name} {student[name]}")
    if teacher := result.get("teacher"):
        facets["teacher"] = Facet(teacher, f"teacher {teacher}")
    for name in ("config", "revision"):
        if name in data:
            facets[name] = Facet(data[name], OF_TASK[name].format(format_value(data[name])))
    epochs, steps = map(identity.row.get, BUDGET)
    budget = [] if epochs is None else [quantity(epochs, "epoch")]
    budget += [] if steps is None else [f"{'at most ' if budget else ''}{quantity(steps, 'step')}"]
    if budget:
        facets["budget"] = Facet(", ".join(budget), ", ".join(budget))
    for name, value in identity.row.items():
        if name not in BUDGET:
            facets[name] = Facet(value, _words(name, value, result))
    return facets


def _words(name: str, value: Any, result: Result) -> str:
    stem, _, leaf = name.rpartition(".")
    if name not in OF_TASK and (value is None or isinstance(value, bool)):
        return name if value else f"no {name}"
    numbers = value if isinstance(value, tuple) and all(isinstance(part, int | float) for part in value) else ()
    text = format_value(value)
    if name == "task.content":
        text = str(result.get("dataset"))
    elif leaf == "content" or (leaf == "source" and ":" in str(value)):  # a hash says nothing to a reader
        return re.sub(r"\.parts\.\d+", "", stem)
    elif leaf == "term":
        return f"{stem}: {str(value).replace('_', ' ')}"
    elif name in ("task.scored_on", "task.select_on") and isinstance(value, tuple):
        text = " and ".join(value)
    elif len(numbers) > FEW_NUMBERS:
        text = f"from {min(numbers):g} to {max(numbers):g}"
    return OF_TASK.get(name, f"{name} {{}}").format(text)


def _unambiguous(facets: Sequence[Facets]) -> list[Facets]:
    """Give facets of equal value the same words, and number the values that share words in the order of the runs."""
    words: dict[tuple[str, Hashable], str] = {}
    for of_run in facets:
        for name, facet in of_run.items():
            words.setdefault((name, facet.value), facet.words)
    values = grouped(((name, text), value) for (name, value), text in words.items())
    for (name, text), of_text in values.items():
        for number, value in enumerate(of_text if len(of_text) > 1 else (), start=1):
            words[name, value] = f"{text} (version {number})"
    return [{name: Facet(facet.value, words[name, facet.value]) for name, facet in one.items()} for one in facets]
