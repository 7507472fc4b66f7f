"""Which runs are seeds of one row, and what a row is called.

The identity of a run is the specification of its stages, as the store keeps them, without the seeds of the student.
Runs of equal identity are seeds of one row, and runs of different identity never are. Rows are named by what differs.
"""

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distill_runner.common.errors import format_value
from distill_runner.report.collect import (
    Result,
    data_of,
    is_scored,
    label,
    scored_on,
    stage_of,
    tested_on,
    upstream_keys,
)

if TYPE_CHECKING:
    from distill_runner.pipeline.stages import Stage

Spec = Mapping[str, Any]
Specs = Mapping[str, Spec]
"""Specs of stages by key."""
Settings = dict[str, Any]
"""Settings by dotted name, such as ``optim.lr`` or ``distil.relations.heads``."""

TEACHER = "teacher"
BUDGET = ("optim.epochs", "optim.max_steps")
"""Options of the optimizer that end training. Runs of different budgets are never points of one grid."""
PARTS = ("model", "data", "share", "teacher", "teacher_outputs", "route", "views", "precision", "method", "select")
"""Parts of a stage's spec in the order in which a reader wants to know them; all others follow."""
UNREAD = {"probabilities", "logits", "test", "by_split", "split_off"}
"""Options of a task that affect neither training nor the score. ``train`` holds the effect of the last one."""


@dataclass(frozen=True)
class Identity:
    """What determines a run.

    Attributes:
        row: settings that separate rows.
        grid: settings of a hyper-parameter search: optimizer, weights and temperatures of the loss, and selection, of
            the student and of the stages that its weights come from.
        seeds: seeds of these stages.
        stages: names of these stages, nearest first, without the student.
        origins: what the weights of the student and of its first teacher come from, by ``source`` and ``teacher``.
    """

    row: Settings = field(default_factory=dict)
    grid: Settings = field(default_factory=dict)
    seeds: Settings = field(default_factory=dict)
    stages: tuple[str, ...] = ()
    origins: Settings = field(default_factory=dict)


def recorded_identity(stage: "Stage", conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a result that hold its identity: specs of the stage and of all stages upstream, by key.

    Args:
        conditions: ``training_conditions`` of the student. With ``compile``, dropout draws other numbers on a GPU;
            several processes normalize separate parts of a batch of images. Other options only change the rounding.
    """
    specs = {part.key: part.spec for part in (stage, *stage.all_upstream)}
    unread = set() if stage.shape.reads_images else {"num_processes"}
    return {"key": stage.key, "specs": specs, "conditions": {k: v for k, v in conditions.items() if k not in unread}}


def identity_of(result: Result) -> Identity | None:
    """Return the identity of a run; None if its result does not hold the specs of all its stages."""
    specs, student = result.get("specs") or {}, result.get("key")
    names = _stage_names(student, specs) if student else {}
    if not student or not names:
        return None
    own = _own_stages(student, specs)
    stages = tuple(names[key] for key in own[1:])
    identity = Identity(stages=stages, origins=_origins(names, own, specs))
    for key, stage in names.items():
        prefix = "" if key == student else f"{stage}."
        for part, name, value in _stage_settings(specs[key], names, result if key == student else {}):
            settings = identity.row
            if key in own:
                settings = identity.seeds if part == "seed" else settings
                settings = identity.grid if _is_searched(part, name, value) else settings
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
    """Return the keys of the student and of the stages that its weights come from, up to the first teacher's stage."""
    chain = [student]
    while source := specs[chain[-1]].get("model", {}).get("upstream"):
        chain.append(source)
    queue = [teacher for key in chain if (teacher := specs[key].get("teacher"))]
    queue += [key for key in chain if specs[key].get("stage") == TEACHER]
    teachers = set[str]()
    while queue:
        if (key := queue.pop()) not in teachers:
            teachers.add(key)
            queue += upstream_keys(specs[key])
    return [key for key in chain if key not in teachers]


def _origins(names: Mapping[str, str], own: Sequence[str], specs: Specs) -> Settings:
    def weights(key: str) -> Any:
        model, members = specs[key].get("model", {}), specs[key].get("members")
        if upstream := model.get("upstream"):
            return weights(upstream)
        return tuple(map(weights, members)) if members else _hashable(model.get("content") or model.get("architecture"))

    origins = {"source": names[own[1]] if len(own) > 1 else weights(own[0])}
    teacher = next((key for stage in own if (key := specs[stage].get("teacher"))), None)
    while teacher and (assisted := specs[teacher].get("teacher")):
        teacher = assisted
    return origins | ({"teacher": (specs[teacher]["kind"], weights(teacher))} if teacher else {})


def _stage_settings(spec: Spec, names: Mapping[str, str], result: Result) -> Iterator[tuple[str, str, Any]]:
    """Yield part, name and value of the settings of a stage that have an effect, those of ``PARTS`` first."""
    model = spec.get("model", {})
    unread = {"stage"}
    if (spec.get("optim") or {}).get("epochs") == 0 or spec.get("method") == {}:  # the model is not trained
        unread |= {"optim", "select", "share"} | ({"seed"} if model.get("head") == "keep" else set())
    for part in [*(part for part in PARTS if part in spec), *(part for part in spec if part not in PARTS)]:
        value = spec[part]
        if part in unread or value in (None, []):
            continue
        settings: Iterable[tuple[str, Any]] = flat({part: value})
        if part == "teacher":
            settings = [("teacher_stage", names[value])]
        elif part == "members":
            settings = [(part, [names[key] for key in value])]
        elif part == "data":
            settings = _data_settings(spec, result)
        elif part == "model":
            of_source = {"source": names[model["upstream"]]} if "upstream" in model else {}
            new_weights = not model.keys() & {"upstream", "content"}  # which are copied from no layers
            skipped = {"upstream", "layers"} if new_weights else {"upstream"}
            settings = flat(of_source | {key: model[key] for key in model if key not in skipped}, "model.")
        elif part == "method":
            settings = ((name.removeprefix("method."), leaf) for name, leaf in flat(value))
        yield from ((part, *setting) for setting in settings)


def _data_settings(spec: Spec, result: Result) -> Iterator[tuple[str, Any]]:
    """Yield the settings of the examples that a stage learns from and is scored on.

    Args:
        result: of the student. It names the splits of its score, where a spec of an older version does not.
    """
    data = dict(spec["data"])
    if "metrics" not in data:
        yield from flat(data, "corpus.")
        return
    transfer, splits, select_on = data.pop("transfer", {}), data.pop("validation"), data.pop("select_on", None)
    selecting = [select_on] if select_on in splits else [*splits] if select_on == "mean" else [next(iter(splits))]
    recorded = data.pop("scored_on", None) or data_of(result).get("scored_on", ())
    selecting = [name for name in recorded if name in splits] or selecting
    scored, tested = [name for name in scored_on(result) if name in splits] or selecting, tested_on(result)
    if tested:
        scored, splits_of_score = [], {name: part["split"] for name, part in tested.items()}
        yield "task.scored_on", _splits([*tested], splits_of_score)
        yield "task.test.content", [part["content"] for part in tested.values()]
    else:
        yield "task.scored_on", _splits(scored, splits)
    if select_on == "held_out":
        yield "task.select_on", select_on
    elif scored != selecting:
        yield "task.select_on", _splits(selecting, splits)
    yield "task.metric", data.pop("metrics")[0]
    unread = UNREAD - {"probabilities", "logits"} if spec["kind"] == "labels" else UNREAD
    yield from flat({name: value for name, value in data.items() if name not in unread}, "task.")
    yield from flat(transfer, "transfer.")


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

    These are options of the optimizer that do not end training, selection, and the real numbers of loss terms, which
    are weights and temperatures.
    """
    of_loss = part == "method" and isinstance(value, float) and name.count(".") == 1
    return of_loss or part == "select" or (part == "optim" and name not in BUDGET)


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted((key, _hashable(part)) for key, part in value.items()))
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def differences(first: Result, second: Result) -> list[str]:
    """Return the settings in which two runs differ, in words; no seeds of the student.

    Loss terms and stages that only one of the runs has are left out: they are what a comparison of methods compares.
    """
    facets: list[Facets] = []
    parts: list[tuple[set[str], set[str]]] = []
    for result in (first, second):
        if (identity := identity_of(result)) is None:
            return [f"settings that are not known, since the result of {label(result)} is of an older version"]
        facets.append(_facets(result, replace(identity, row=identity.row | identity.grid)))
        specs, student = result["specs"], result["key"]
        parts.append(({*specs[student]["method"]}, {*_stage_names(student, specs).values()}))
    (terms, stages), (other_terms, other_stages) = parts
    one, other = _unambiguous(facets)
    skipped = (terms ^ other_terms) | (stages ^ other_stages)
    names = [name for name in _merged_order((one, other)) if name.partition(".")[0] not in skipped]
    names.sort(key=lambda name: name.partition(".")[0] in stages | other_stages)  # the student's own come first
    texts = []
    for name in names:
        absent = Facet(None, f"no {name}")
        a, b = one.get(name, absent), other.get(name, absent)
        if a != b:
            texts.append(f"{a.words} / {b.words.removeprefix(f'{name} ')}")
    return texts


def shared_stages(runs: Sequence[Result]) -> list[str]:
    """Return the stages before the student that all seeds share: their scatter is smaller than that of the method."""
    identities = [identity for run in runs if (identity := identity_of(run))]
    if len(identities) < 2:
        return []
    seeds = {stage: {identity.seeds.get(f"{stage}.seed") for identity in identities} for stage in identities[0].stages}
    return [stage for stage, values in seeds.items() if len(values) == 1]


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
    "budget": "{}",
    "teacher.seed": "teacher seed {}",
}
"""Facets that are named where they differ between rows on one task, and the words for each.

All other settings are named, under their own names, where they differ between the rows of one method on one task.
"""


@dataclass(frozen=True)
class Facet:
    """A property of a run: ``value`` separates runs, ``words`` name it."""

    value: Hashable
    words: str


Facets = dict[str, Facet]


@dataclass(frozen=True)
class RowKey:
    """What all runs of a row have in common; ``settings`` are those of their identity.

    For a result of an older version, whose settings are not known, it is the key of the run, so that its row is its
    own. For an unfinished run whose settings are not known, it is None.
    """

    method: str
    task: str
    place: Hashable
    settings: Hashable


def row_names(results: Sequence[Result], places: Sequence[Hashable] | None = None) -> list[str]:
    """Return the name of the row of each result: the method's label, and what differs between rows.

    A run that failed before its settings were known joins the row that it may belong to, if there is only one.

    Args:
        places: place of each result, such as its tick on an axis, if places already separate the results. Facets that
            follow from the place are left out of the names.
    """
    identities = [identity_of(result) for result in results]
    keys = [
        RowKey(label(result), result["task"], place, _settings_key(result, identity))
        for result, identity, place in zip(results, identities, places or [None] * len(results), strict=True)
    ]
    facets = list(map(_facets, results, identities))
    rows: dict[RowKey, Facets] = {}
    for key, of_run, identity in zip(keys, facets, identities, strict=True):
        if identity is not None:
            rows.setdefault(key, of_run)
    names, of_runs = _names(rows), []
    for key, of_run in zip(keys, facets, strict=True):
        if key.settings is None:
            matches = [row for row in rows if _is_compatible(key, of_run, row, rows[row])]
            key = matches[0] if len(matches) == 1 else key
        unknown = key.method if key.settings is None else f"{key.method}, run {key.settings}"
        is_taken = key not in names and any(row.task == key.task and names[row] == unknown for row in rows)
        of_runs.append(names.get(key, f"{unknown}, settings unknown" if is_taken else unknown))
    return of_runs


def _settings_key(result: Result, identity: Identity | None) -> Hashable:
    if identity is not None:
        return frozenset(identity.row.items())
    return result.get("key") or result.get("folder") if is_scored(result) else None


def _is_compatible(key: RowKey, facets: Facets, other: RowKey, other_facets: Facets) -> bool:
    """Whether a run whose settings are not known agrees with a row in all facets known of both.

    A student with new weights has no source, which reads like an unknown one. So the initialization must agree too.
    """
    same = (key.method, key.task, key.place) == (other.method, other.task, other.place)
    shared = facets.keys() & other_facets.keys() & {*OVERALL}
    return same and all(facets[name].words == other_facets[name].words for name in shared)


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
            order = _merged_order([OVERALL, *of_method.values()])
            data_first = sorted(order, key=lambda name: name == "budget")  # which often follows from the data
            separating = shared | {*_separating(of_method, data_first)}
            in_order = [name for name in dict.fromkeys((*OVERALL, *OF_TASK, *order)) if name in separating]
            for row, facets in of_method.items():
                names[row] = ", ".join([method, *(facets[name].words for name in in_order if name in facets)])
    return names


def _merged_order(sequences: Iterable[Iterable[str]]) -> list[str]:
    """Return all names, each behind the name that it follows in the first sequence that has it."""
    order: list[str] = []
    for names in sequences:
        place = 0
        for name in names:
            if name not in order:
                order.insert(place, name)
            place = order.index(name) + 1
    return order


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
        stage = stage_of(source)
        words = f"after {stage}" if stage else f"from {source}"
        facets["source"] = Facet(identity.origins.get("source", source), words)
    for name, words in (("num_layers", "{} layers"), ("width", "width {}"), ("init", "init {}")):
        if student.get(name) is not None:
            facets[name] = Facet(student[name], words.format(student[name]))
    if teacher := result.get("teacher"):
        facets["teacher"] = Facet(identity.origins.get("teacher", teacher), f"teacher {teacher}")
    for name in ("config", "revision"):
        if name in data:
            facets[name] = Facet(data[name], OF_TASK[name].format(format_value(data[name])))
    if budget := _budget(*map(identity.row.get, BUDGET)):
        facets["budget"] = Facet(budget, budget)
    for name, value in identity.row.items():
        if name not in BUDGET:
            text = result.get("dataset") if name == "task.content" else _as_words(name, value)
            facets[name] = Facet(value, OF_TASK.get(name, f"{name} {{}}").format(text))
    return facets


def _budget(epochs: int | None, steps: int | None) -> str | None:
    """Return what ends training, in words; None if it is not known. Without ``steps`` they have no limit."""
    if epochs is None:
        return None if steps is None else f"{steps} steps"
    return f"{epochs} epochs" if steps is None else f"{epochs} epochs, at most {steps} steps"


def _as_words(name: str, value: Any) -> str:
    if name.rpartition(".")[2] == "content":  # a hash
        return str(value).rpartition(":")[2][:8]
    is_splits = name in ("task.scored_on", "task.select_on") and isinstance(value, tuple)
    return " and ".join(value) if is_splits else format_value(value)


def _unambiguous(facets: Sequence[Facets]) -> list[Facets]:
    """Give facets of equal value the same words, and add a hash to words that stand for several values."""
    words: dict[tuple[str, Hashable], str] = {}
    for of_run in facets:
        for name, facet in of_run.items():
            words.setdefault((name, facet.value), facet.words)
    counts = Counter((name, text) for (name, _), text in words.items())

    def clear(name: str, value: Hashable) -> Facet:
        text = words[name, value]
        digest = hashlib.sha256(repr(value).encode()).hexdigest()[:6]
        return Facet(value, f"{text} ({digest})" if counts[name, text] > 1 else text)

    return [{name: clear(name, facet.value) for name, facet in of_run.items()} for of_run in facets]
