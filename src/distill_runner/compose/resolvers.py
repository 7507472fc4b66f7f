"""Values that the configuration derives: OmegaConf resolvers, values of a recipe, and what stages inherit."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from math import isfinite
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distill_runner.common.errors import UserError, format_value, override, quantity, require_choice, suggestion
from distill_runner.common.files import without_secrets
from distill_runner.compose.folders import OwnConfiguration, all_folders, choices

TEMPLATE, INHERITS, FRESH_FROM = "template", "inherits", "fresh_from"


def beta(*weights: Any) -> float:
    """Weight of the hard labels, 1 minus the other weights, never set by hand (ALP-KD, after Eq. 7).

    Raises:
        UserError: another weight is not a number, or the other weights sum to more than 1.
    """
    weight_of = dict(zip(("loss.eta", "loss.lambda"), weights, strict=False))
    for name, weight in weight_of.items():
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not isfinite(weight):
            raise UserError(name, weight, "must be a number")
    rest = round(1 - sum(weights), 9)
    if rest < 0:
        remedy = "Choose weights that sum to at most 1."
        value = " + ".join(f"{weight:g}" for weight in weights)
        raise UserError(" + ".join(weight_of), value, "beta = 1 - the other weights would be negative", remedy)
    return rest


def equal_weight(*, _root_: DictConfig) -> float:
    """Return one over the number of the method's loss terms: 1/3 for ALP-KD, 1/2 for RKD."""
    return 1 / len(_root_.method.terms)


def choose(value: Any, *pairs: Any) -> Any:
    """Return the value that follows the name ``value`` in ``pairs``: name, value, name, value, ...

    If no name is equal to ``value``, return the default, an unpaired last item of ``pairs``; else ``value`` itself.
    """
    table = dict(zip(map(format_value, pairs[::2]), pairs[1::2], strict=False))
    return table.get(format_value(value), pairs[-1] if len(pairs) % 2 else value)


def count(items: Any, otherwise: Any) -> Any:
    """Return the number of items of a list; ``otherwise`` if ``items`` is null."""
    return otherwise if items is None else len(items)


def phase_epochs(steps: int, epochs: Any, warmup: Any) -> int:
    """Return the number of epochs of a phase with ``steps`` steps.

    Args:
        epochs, warmup: as in ``EpochsPerStep``, the schedule of checkpoints.
    Raises:
        UserError: ``epochs`` or ``warmup`` is not an integer, or ``epochs`` is a list of another length than ``steps``.
    """
    epochs_by_step = [epochs] * steps if isinstance(epochs, int) else epochs
    if not isinstance(epochs_by_step, Sequence) or not all(isinstance(number, int) for number in epochs_by_step):
        raise UserError("route.epochs", epochs, "must be a whole number, or a list of them")
    if len(epochs_by_step) != steps or min(epochs_by_step, default=1) < 1:
        raise UserError("route.epochs", epochs, f"must give each of the {quantity(steps, 'step')} at least 1 epoch")
    if not isinstance(warmup, int):
        raise UserError("route.warmup", warmup, "must be a whole number")
    return sum(epochs_by_step) + warmup


def divide(width: Any, divisor: int) -> int:
    """Return ``width`` divided by ``divisor``: the number of attention heads of a new student.

    Raises:
        UserError: ``width`` is not a multiple of ``divisor``, or is 0.
    """
    if not isinstance(width, int) or width % divisor or not width:
        problem = f"must be a multiple of {divisor}"
        raise UserError("student.width", width, problem, "Choose such a width, or set student.heads.")
    return width // divisor


def multiply(value: Any, factor: int) -> int:
    """Return the product of two integers."""
    return int(value) * factor


def single_stage(result: str) -> None:
    """Check that pre-training is a single stage, which ``method=pretrain`` trains as its student.

    Raises:
        UserError: pre-training has several stages.
    """
    if result != "stage:pretrain":
        problem = f"takes several stages, up to {result.removeprefix('stage:')}, and this method trains only one"
        remedy = "The encoder alone: " + override("method", "pf", "stage", result.removeprefix("stage:"))
        raise UserError("pretraining.result", result, problem, remedy)


def own_task_name(dataset: Any) -> str:
    """Return the name of a task on a user's own data: the name of its folder or file, in letters, digits and ``_.-``.

    A name that equals that of a configured task gets the prefix ``own_``: that task's published numbers do not apply.
    """
    path = Path(str(dataset)).absolute()
    name = re.sub(r"[^\w.-]+", "_", path.stem if path.is_file() else path.name).lstrip(".") or "data"
    return f"own_{name}" if any((folder / "task" / f"{name}.yaml").is_file() for folder in all_folders()) else name


DEFAULT_ENTRY = "every"
"""Entry of a recipe for all of the recipe's tasks, or for all methods."""


def recipe(key: str, default: Any, entry: str | None = None, *, _root_: DictConfig) -> Any:
    """Return the value of ``key`` in the paper's recipe (``conf/recipe``), else ``default``.

    The order of precedence is: the method on the task, the method on ``every`` task, ``every`` method. ``every`` task
    means the recipe's own ``tasks``; other tasks keep their own numbers. A method that is made from another one names
    that one in ``method.recipe`` to keep its numbers.

    Args:
        entry: entry to read instead of the method's: ``teacher``, or ``task`` for lengths and metrics. The entry of
            ``every`` method is then not read.
    Raises:
        UserError: ``task.name`` is not text, or ``method.recipe`` names no method.
    """
    numbers, task = _root_.recipe, _root_.task.name
    if not isinstance(task, str):
        raise UserError("task.name", task, "must be text")
    tasks = [task, DEFAULT_ENTRY] if task in (numbers.get("tasks") or []) else [task]
    parent = _root_.method.get("recipe")
    if parent is not None and parent not in (methods := choices("method")):
        remedy = suggestion(parent, methods) if isinstance(parent, str) else ""
        raise UserError("method.recipe", parent, "there is no such method", remedy)
    for method in [entry] if entry else [parent or _root_.method.name, DEFAULT_ENTRY]:
        for task in tasks:
            value = ((numbers.get(method) or {}).get(task) or {}).get(key)
            if value is not None:
                return value
    return OmegaConf.create(default) if isinstance(default, list) else default  # --resolve takes no plain lists


def run_key(plan: Any = False, *, _root_: DictConfig) -> str:
    """Return the name of the run's folder: task, method, and a hash of the configuration of the run's stages.

    Test splits do not change the name: a finished run gets its test score in the same folder.
    If the run ends with another stage than the student, the stage's name takes the place of the method.

    Args:
        plan: whether the run is only planned. Its folder is removed afterwards, so it must not be that of the run.
    """
    try:
        parts = {key: OmegaConf.to_container(_root_[key], resolve=True) for key in ("stages", TEMPLATE, "teacher")}
        stages: Any = complete_stages(parts)
    except (OmegaConfBaseException, UserError):  # the run itself reports the error, in a separate folder
        stages = OmegaConf.to_container(_root_, resolve=False)
    keys = ("stage", "runtime.precision", "task.name", "method.name")
    stage, precision, task, method = (OmegaConf.select(_root_, key) for key in keys)
    for name, part in stages.items():
        if isinstance(part, Mapping) and isinstance(part.get("task"), Mapping):
            stages[name] = {**part, "task": {**part["task"], "test": None}}
    parts = {"stages": stages, "precision": precision, "stage": stage}
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]
    own = (task, method if stage == "student" else stage)
    # A long name, or one with a slash, is refused later; until then, it must not name a folder elsewhere.
    names = [re.sub(r"[/\\*\0-\x1f]|^\.+", "_", without_secrets(str(name))[:100]) for name in own if name]
    return "-".join([*names, digest]) + (f"-plan-{os.getpid()}" if plan is True else "")


def variable(name: str, default: Any) -> Any:
    """Return an environment variable, or ``default`` if it is not set or empty."""
    return os.environ.get(name) or default


_ARITHMETIC = (beta, count, divide, equal_weight, multiply, phase_epochs)
RESOLVERS = (*_ARITHMETIC, choose, own_task_name, recipe, run_key, single_stage, variable)


def register() -> None:
    """Register the resolvers and the user's configuration folder, and let some options take keys that are in no file.

    These are ``stages``, which may inherit options, and ``task.test``, whose keys are names of the user's choice.
    """
    open_options = OmegaConf.create({"stages": {}, "task": {"test": {}}})
    for node in (open_options.stages, open_options.task.test):
        OmegaConf.set_struct(node, False)
    Plugins.instance().register(OwnConfiguration)
    ConfigStore.instance().store(name="open_options", node=open_options)
    for resolver in RESOLVERS:
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)


def complete_stages(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stages with all that they inherit, and with the source of every model filled in.

    The source ``pretrained`` stands for the teacher's source, and ``finetuned`` for the model of the teacher's stage. A
    model without a source has new weights, unless ``fresh_from`` names a source.

    Args:
        settings: resolved configuration.
    Raises:
        UserError: a stage inherits from a name that does not exist.
    """
    stages = inherit_stages(settings)
    sources = {"pretrained": settings["teacher"]["source"], "finetuned": "stage:teacher"}
    for name, stage in stages.items():
        if isinstance(stage, dict) and isinstance(model := stage.get("model"), Mapping):
            source = model.get("source") or model.get(FRESH_FROM)
            own = {key: value for key, value in model.items() if key != FRESH_FROM}
            stages[name] = {**stage, "model": {**own, "source": sources.get(str(source), source)}}
    return stages


def inherit_stages(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stages with all that they inherit from the template or another stage; interpolations are kept."""
    return {name: _with_base(name, settings, ()) for name in settings["stages"]}


def _with_base(name: str, settings: Mapping[str, Any], heirs: tuple[str, ...]) -> Any:
    """Return a stage with all that it inherits. ``heirs`` inherit from this stage, so it cannot inherit from them."""
    stage = settings["stages"][name]
    if not isinstance(stage, Mapping):
        return stage
    others = [other for other in settings["stages"] if other not in (name, *heirs)]
    if not (base := stage.get(INHERITS)):
        if "method" not in stage:
            raise UserError(f"stages.{name}", None, "there is no such stage", suggestion(name, others))
        return stage
    problem = "there is no stage of this name to inherit from"
    require_choice(f"stages.{name}.{INHERITS}", base, [TEMPLATE, *others], problem)
    own = {key: value for key, value in stage.items() if key != INHERITS}
    parent = dict(settings[TEMPLATE] if base == TEMPLATE else _with_base(base, settings, (*heirs, name)))
    if isinstance(own.get("model"), Mapping) and "source" in own["model"]:
        del parent["model"]
    return _merge(parent, own, settings)


def _merge(base: Any, override: Any, settings: Mapping[str, Any]) -> Any:
    """Merge two values at every depth: ``override`` where it has a value, else ``base``."""
    if not isinstance(override, Mapping):
        return override
    if isinstance(base, str) and (reference := re.fullmatch(r"\$\{([\w.]+)\}", base)):
        keys = reduce(lambda node, key: node[key], reference[1].split("."), settings)
        base = {key: f"${{{reference[1]}.{key}}}" for key in keys} if isinstance(keys, Mapping) else None
    if not isinstance(base, Mapping):
        return dict(override)
    return {**base, **{key: _merge(base.get(key), value, settings) for key, value in override.items()}}
