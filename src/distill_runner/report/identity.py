"""Which runs are seeds of one row of a table.

The identity of a run is the specification of its stages, as the store keeps them, without the seeds of the student.
Runs of equal identity are seeds of one row, and runs of different identity never are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distill_runner.report.collect import Result, scored_on, tested_on, upstream_keys

if TYPE_CHECKING:
    from distill_runner.pipeline.stages import Stage

Spec = Mapping[str, Any]
Specs = Mapping[str, Spec]
"""Specs of stages by key."""
Settings = dict[str, Any]
"""Settings by dotted name, such as ``optim.lr`` or ``distil.relations.heads``."""

TEACHER = "teacher"
"""Name of the stage, and of the method in published tables, of a teacher itself."""
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
    unread = set() if stage.shape.reads_images or stage.config.method.compares_examples else {"num_processes"}
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
        result: of the student, which names the splits of its score; empty for other stages.
    """
    data = dict(spec["data"])
    if "metrics" not in data:
        return dict(flat(data, "corpus."))
    transfer, splits, selecting = data.pop("transfer", {}), data.pop("validation"), data.pop("scored_on")
    scored, tested = [name for name in scored_on(result) if name in splits] or selecting, tested_on(result)
    settings = {"task.scored_on": _splits(scored, splits)}
    if tested:
        scored, splits_of_score = [], {name: part["split"] for name, part in tested.items()}
        settings = {"task.scored_on": _splits([*tested], splits_of_score)}
        settings["task.test.content"] = [part["content"] for part in tested.values()]
    if "select_on" in data:  # held-out examples, else the spec names no option
        settings["task.select_on"] = data.pop("select_on")
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
