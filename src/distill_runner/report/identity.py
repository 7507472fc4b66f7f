"""Which runs are seeds of one row of a table.

The identity of a run is the specification of its stages, as the store keeps them, without the seeds of the student.
Runs of equal identity are seeds of one row, and runs of different identity never are.
"""

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from distill_runner.common.errors import format_value, quantity
from distill_runner.report.collect import Result, data_of, label, scored_on, tested_on, upstream_keys

if TYPE_CHECKING:
    from distill_runner.pipeline.stages import Stage

Spec = Mapping[str, Any]
Specs = Mapping[str, Spec]
"""Specs of stages by key."""
Settings = dict[str, Any]
"""Settings by dotted name, such as ``optim.lr`` or ``distil.relations.heads``."""

TEACHER = "teacher"
BUDGET = ("optim.epochs", "optim.max_steps")
"""Options of the optimizer that end training."""
NOT_SEARCHED = frozenset({*BUDGET, "optim.patience", "optim.accumulation", "optim.bucketing"})
"""Options of the optimizer that are no hyper-parameters: runs that differ in them are never points of one grid."""
PARTS = ("model", "data", "share", "teacher", "teacher_outputs", "route", "views", "precision", "method", "select")
"""Parts of a stage's spec in the order in which a reader wants to know them; all others follow."""
UNREAD = frozenset({"test", "by_split", "split_off"})
"""Options of a task that affect neither training nor the score. ``train`` holds the effect of the last one."""


@dataclass(frozen=True)
class Identity:
    """What determines a run.

    Attributes:
        row: settings that separate rows.
        grid: settings of a hyper-parameter search: optimizer, weights and temperatures of the loss, and selection, of
            the student and of the stages that its weights come from.
        seeds: seeds of these stages and of their random mappings.
        stages: names of these stages, nearest first, without the student.
        upstream: names of all stages upstream of the student, those of its teachers too.
        terms: names of the student's loss terms.
    """

    row: Settings = field(default_factory=dict)
    grid: Settings = field(default_factory=dict)
    seeds: Settings = field(default_factory=dict)
    stages: tuple[str, ...] = ()
    upstream: frozenset[str] = frozenset()
    terms: frozenset[str] = frozenset()


def recorded_identity(stage: "Stage", conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a result that hold its identity: specs of the stage and of all stages upstream, by key.

    Args:
        conditions: ``training_conditions`` of the student. Several processes normalize separate parts of a batch of
            images, and compare the examples of each part alone. Other options only change the rounding.
    """
    specs = {part.key: part.spec for part in (stage, *stage.all_upstream)}
    reads_parts = stage.shape.reads_images or stage.config.method.compares_examples
    unread = set() if reads_parts else {"num_processes"}
    return {"key": stage.key, "specs": specs, "conditions": {k: v for k, v in conditions.items() if k not in unread}}


def identity_of(result: Result) -> Identity | None:
    """Return the identity of a run; None if its result does not hold the specs of all its stages."""
    specs, student = result.get("specs") or {}, result.get("key")
    names = _stage_names(student, specs) if student else {}
    if not student or not names:
        return None
    own = _own_stages(student, specs)
    identity = Identity(
        stages=tuple(names[key] for key in own[1:]),
        upstream=frozenset(names.values()) - {names[student]},
        terms=frozenset(specs[student]["method"]),
    )
    for key, stage in names.items():
        prefix = "" if key == student else f"{stage}."
        for part, name, value in _stage_settings(specs[key], names, result if key == student else {}):
            settings = identity.row
            if key in own and (part == "seed" or (part == "method" and name.endswith(".mapping.seed"))):
                settings = identity.seeds
            elif key in own and _is_searched(part, name, value):
                settings = identity.grid
            settings[f"{prefix}{name}"] = _hashable(value)
    identity.row.update(result.get("conditions") or {})
    return identity


def _stage_names(student: str, specs: Specs) -> dict[str, str]:
    """Return the names of a stage and of all stages upstream of it by key, nearest first; empty if a spec is lost."""
    names: dict[str, str] = {}
    queue = [(student, "student")]
    while queue:
        key, name = queue.pop(0)
        if key not in specs:
            return {}
        if key not in names:
            name = specs[key].get("stage", name)  # an ensemble, or columns of the data, do not name their stage
            names[key] = name if name not in names.values() else f"{name}-{key}"
            queue += [(upstream, TEACHER) for upstream in upstream_keys(specs[key])]
    return names


def _own_stages(student: str, specs: Specs) -> list[str]:
    """Return the keys of the student and of the stages that its weights come from, up to the first teacher's stage.

    The run of a teacher, as of a grid that stopped there, is its own student.
    """
    chain = [student]
    while source := specs[chain[-1]].get("model", {}).get("upstream"):
        chain.append(source)
    queue = [teacher for key in chain if (teacher := specs[key].get("teacher"))]
    queue += [key for key in chain[1:] if specs[key].get("stage") == TEACHER]
    teachers = set[str]()
    while queue:
        if (key := queue.pop()) not in teachers:
            teachers.add(key)
            queue += upstream_keys(specs[key])
    return [key for key in chain if key not in teachers]


def _stage_settings(spec: Spec, names: Mapping[str, str], result: Result) -> Iterator[tuple[str, str, Any]]:
    """Yield part, name and value of the settings of a stage that have an effect, those of ``PARTS`` first."""
    model, unread = spec.get("model", {}), {"stage"}
    if (spec.get("optim") or {}).get("epochs") == 0 or spec.get("method") == {}:  # the model is not trained
        unread |= {"optim", "select", "share"} | ({"seed"} if model.get("head") == "keep" else set())
    for part in dict.fromkeys((*PARTS, *spec)):
        value = spec.get(part)
        if part in unread or value in (None, []):
            continue
        match part:
            case "teacher":
                settings: Settings = {"teacher_stage": names[value]}
            case "members":
                settings = {part: [names[key] for key in value]}
            case "data":
                settings = _data_settings(spec, result)
            case "model":
                copies = model.keys() & {"upstream", "content"}  # new weights are copied from no layers
                own = {key: value for key, value in model.items() if key != "upstream" and (copies or key != "layers")}
                source = {"source": names[model["upstream"]]} if "upstream" in model else {}
                settings = dict(flat(source | own, "model."))
            case "method":
                settings = {name.removeprefix("method."): leaf for name, leaf in flat(value)}
            case _:
                settings = dict(flat({part: value}))
        for name, leaf in settings.items():
            yield part, name, leaf


def _data_settings(spec: Spec, result: Result) -> Settings:
    """Return the settings of the examples that a stage learns from and is scored on.

    Args:
        result: of the student. It names the splits of its score, where a spec of an older version does not.
    """
    data = dict(spec["data"])
    if "metrics" not in data:
        return dict(flat(data, "corpus."))
    transfer, splits, select_on = data.pop("transfer", {}), data.pop("validation"), data.pop("select_on", None)
    selecting = [select_on] if select_on in splits else [*splits] if select_on == "mean" else [next(iter(splits))]
    recorded = data.pop("scored_on", None) or data_of(result).get("scored_on", ())
    selecting = [name for name in recorded if name in splits] or selecting
    scored, tested = [name for name in scored_on(result) if name in splits] or selecting, tested_on(result)
    settings = {"task.scored_on": _splits(scored, splits)}
    if tested:
        scored, splits_of_score = [], {name: part["split"] for name, part in tested.items()}
        settings = {"task.scored_on": _splits([*tested], splits_of_score)}
        settings["task.test.content"] = [part["content"] for part in tested.values()]
    if select_on == "held_out":
        settings["task.select_on"] = select_on
    elif scored != selecting:
        settings["task.select_on"] = _splits(selecting, splits)
    settings["task.metric"] = data.pop("metrics")[0]
    task = {name: value for name, value in data.items() if name not in UNREAD}
    return settings | dict(flat(task, "task.")) | dict(flat(transfer, "transfer."))


def _splits(names: Sequence[str], splits: Mapping[str, str]) -> list[str]:
    """Return splits as they are written, with their names where there are several."""
    return [splits[names[0]]] if len(names) == 1 else [f"{name} {splits[name]}" for name in names]


def flat(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of each leaf. Lists of mappings are flattened as well, lists of values are not."""
    for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
        parts = value if isinstance(value, list | tuple) else ()
        if isinstance(value, Mapping) or any(isinstance(part, Mapping) for part in parts):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_searched(part: str, name: str, value: Any) -> bool:
    """Whether a setting of the student belongs to a hyper-parameter search.

    These are options of the optimizer that do not end or divide training, selection, and the real numbers of loss
    terms, which are weights and temperatures.
    """
    is_own = name.count(".") == 1 and not name.startswith("schedule.")
    of_loss = part == "method" and isinstance(value, float) and is_own
    return of_loss or part == "select" or (part == "optim" and name not in NOT_SEARCHED)


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted((key, _hashable(part)) for key, part in value.items()))
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def shared_stages(runs: Sequence[Result]) -> dict[str, str]:
    """Return the stages before the student that all seeds share, each with its key.

    The scatter of these seeds is smaller than that of the method.
    """
    identities = [identity for run in runs if (identity := identity_of(run))]
    if len(identities) < 2:
        return {}
    seeds = {stage: {identity.seeds.get(f"{stage}.seed") for identity in identities} for stage in identities[0].stages}
    keys = {spec.get("stage"): key for key, spec in runs[0]["specs"].items()}
    return {stage: keys.get(stage, "") for stage, values in seeds.items() if len(values) == 1}


# --- Names of rows


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
    keys, facets, rows, choices = list[RowKey](), list[Facets](), dict[RowKey, Facets](), dict[Hashable, Any]()
    for result, place in zip(results, places or [None] * len(results), strict=True):
        identity = identity_of(result)
        key = RowKey(label(result), result["task"], place, None)
        if identity:
            own = {name: value for name, value in identity.grid.items() if name in split}
            identity = replace(identity, row=identity.row | own)
            settings, grid = frozenset(identity.row.items()), frozenset(identity.grid.items())
            of_run = choices.setdefault((key, settings, grid), tuple((result.get("choices") or {}).items()))
            key = key._replace(settings=settings, choices=of_run)
        keys.append(key)
        of_choices = {name: Facet(value, f"{name} {value}") for name, value in key.choices}
        facets.append(_facets(result, identity) | of_choices)
        if identity:
            rows.setdefault(key, facets[-1])
    names, of_runs = _names(rows), []
    for key, of_run in zip(keys, facets, strict=True):
        if key.settings is None:  # of a student without a source, new weights differ from unknown ones by ``init``
            matches = [
                row
                for row, of_row in rows.items()
                if row[:3] == key[:3]
                and all(of_run[name].words == of_row[name].words for name in {*OVERALL} & of_run.keys() & of_row.keys())
            ]
            key = matches[0] if len(matches) == 1 else key
        is_taken = key not in names and any(row.task == key.task and names[row] == key.method for row in rows)
        of_runs.append(names.get(key, f"{key.method}, settings unknown" if is_taken else key.method))
    return of_runs


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
        facets["num_layers"] = Facet(depth, quantity(depth, "layer"))
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
    values: dict[tuple[str, str], list[Hashable]] = {}
    for (name, value), text in words.items():
        values.setdefault((name, text), []).append(value)
    for (name, text), of_text in values.items():
        for number, value in enumerate(of_text if len(of_text) > 1 else (), start=1):
            words[name, value] = f"{text} (version {number})"
    return [{name: Facet(facet.value, words[name, facet.value]) for name, facet in one.items()} for one in facets]
