"""OmegaConf resolvers of the configuration: derived values, values of a recipe, and names of folders."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distill_runner.common.errors import UserError, nearest
from distill_runner.compose.composed import completed
from distill_runner.compose.folders import choices


def beta(*weights: Any) -> float:
    """Weight of the hard labels, 1 minus the other weights, never set by hand (ALP-KD, after Eq. 7).

    Raises:
        UserError: another weight is not a number, or the other weights sum to more than 1.
    """
    named = dict(zip(("loss.eta", "loss.lambda"), weights, strict=False))
    for name, weight in named.items():
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not isfinite(weight):
            raise UserError(name, weight, "must be a number")
    rest = round(1 - sum(weights), 9)
    if rest < 0:
        remedy = "Choose weights that sum to at most 1."
        value = " + ".join(f"{weight:g}" for weight in weights)
        raise UserError(" + ".join(named), value, "beta = 1 - the other weights would be negative", remedy)
    return rest


def choose(value: Any, *pairs: Any) -> Any:
    """Return the value that follows the name ``value`` in ``pairs``: name, value, name, value, ...

    If no name is equal to ``value``, return the default, an unpaired last item of ``pairs``; else ``value`` itself.
    """
    table = dict(zip(map(_spelt, pairs[::2]), pairs[1::2], strict=False))
    return table.get(_spelt(value), pairs[-1] if len(pairs) % 2 else value)


def count(items: Any, otherwise: Any) -> Any:
    """Return the number of items of a list; ``otherwise`` if ``items`` is null."""
    return otherwise if items is None else len(items)


def phase_epochs(steps: int, epochs: Any, warmup: Any) -> int:
    """Return the number of epochs of a phase with ``steps`` steps.

    Args:
        epochs, warmup: as in ``checkpoint_schedule.EpochsPerStep``.
    Raises:
        UserError: ``epochs`` or ``warmup`` is not a whole number, or ``epochs`` has not one number for each step.
    """
    each = [epochs] * steps if isinstance(epochs, int) else epochs
    if not isinstance(each, Sequence) or not all(isinstance(number, int) for number in each):
        raise UserError("route.epochs", epochs, "must be a whole number, or a list of them")
    if len(each) != steps:
        raise UserError("route.epochs", epochs, f"has {len(each)} numbers for {steps} steps")
    if min(each, default=1) < 1:
        raise UserError("route.epochs", epochs, "each step needs at least 1 epoch")
    if not isinstance(warmup, int):
        raise UserError("route.warmup", warmup, "must be a whole number")
    return sum(each) + warmup


def divide(value: Any, by: int) -> int:
    """Return ``value`` divided by ``by``.

    Raises:
        UserError: ``value`` is not a multiple of ``by``, or is 0.
    """
    if not isinstance(value, int) or value % by or not value:
        raise UserError(
            "student.width", value, f"must be a multiple of {by}", "Take such a width, or set student.heads."
        )
    return value // by


def multiply(value: Any, by: int) -> int:
    """Return the product of two whole numbers."""
    return int(value) * by


def named_by(dataset: Any) -> str:
    """Return the name of a task on a user's own data: that of the folder or file, in letters, digits and ``_.-``.

    The name of a configured task gets ``own_`` before it, since the published numbers of that task do not apply.
    """
    path = Path(str(dataset)).absolute()
    name = re.sub(r"[^\w.-]+", "_", path.stem if path.is_file() else path.name)
    return f"own_{name}" if name in choices("task") else name


EVERY = "every"


def recipe(key: str, default: Any, of: str | None = None, *, _root_: DictConfig) -> Any:
    """Return the value of ``key`` in the paper's recipe (``conf/recipe``), else ``default``.

    The order of precedence is: the method on the task, the method on ``every`` task, ``every`` method. ``every`` task
    means the recipe's own ``tasks``; other tasks keep their own numbers. A method that is made from another one names
    that one in ``method.recipe`` to keep its numbers.

    Args:
        of: entry to read instead of the method's: ``teacher``, or ``task`` for lengths and metrics. The entry of
            ``every`` method is then not read.
    Raises:
        UserError: ``task.name`` is not text, or ``method.recipe`` names no method.
    """
    of_recipe, task = _root_.recipe, _root_.task.name
    if not isinstance(task, str):
        raise UserError("task.name", task, "must be text")
    tasks = [task, EVERY] if task in of_recipe.get("tasks", []) else [task]
    kept = _root_.method.get("recipe")
    if kept is not None and kept not in (methods := choices("method")):
        remedy = nearest(kept, methods) if isinstance(kept, str) else ""
        raise UserError("method.recipe", kept, "there is no such method", remedy)
    for name in [of] if of else [kept or _root_.method.name, EVERY]:
        for where in tasks:
            chosen = ((of_recipe.get(name) or {}).get(where) or {}).get(key)
            if chosen is not None:
                return chosen
    return OmegaConf.create(default) if isinstance(default, list) else default  # --resolve takes no plain lists


def run_key(*, _root_: DictConfig, stages: Any = None) -> str:
    """Return the name of the run's folder: task, method, and a hash of the configuration of the run's stages.

    If the run ends with another stage than the student, the stage's name takes the place of the method.

    Args:
        stages: resolved stages of the configuration; None if they are not resolved yet.
    """
    try:
        read = ("stages", "template", "teacher")
        parts = {} if stages else {key: OmegaConf.to_container(_root_[key], resolve=True) for key in read}
        stages = stages or completed(parts)
    except (OmegaConfBaseException, UserError):  # the run itself reports the error, in a separate folder
        stages = OmegaConf.to_container(_root_, resolve=False)
    stage = OmegaConf.select(_root_, "stage")
    parts = {"stages": stages, "precision": OmegaConf.select(_root_, "runtime.precision"), "stage": stage}
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]
    what = OmegaConf.select(_root_, "method.name") if stage == "student" else stage
    names = (OmegaConf.select(_root_, "task.name"), what)
    return "-".join([*(str(name) for name in names if name), digest])


def of_plan(plan: Any) -> str:
    """Return what makes a plan's folder its own: it is removed afterwards, and the same run may be under way."""
    return f"-plan-{os.getpid()}" if plan is True else ""


READS = {"recipe": ("recipe", "task.name", "method.name", "method.recipe")}
"""Configuration keys that a resolver reads in addition to its arguments."""
PURE = ("beta", "choose", "count", "divide", "multiply", "named_by", "phase_epochs", "oc.env")
"""Resolvers that read nothing but their arguments."""


def _spelt(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def register() -> None:
    """Register the resolvers, and let ``stages`` take keys that are in no file, since stages may inherit them."""
    open_stages = OmegaConf.create({"stages": {}})
    OmegaConf.set_struct(open_stages.stages, False)
    ConfigStore.instance().store(name="open_stages", node=open_stages)
    for resolver in (beta, choose, count, divide, multiply, named_by, of_plan, phase_epochs, recipe, run_key):
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
