"""From the nodes of ``conf/method`` to a ``Method``: terms by import path, their arguments checked like the rest."""

import inspect
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from math import isfinite
from typing import Any

from pydantic import create_model

from distill_runner.common.errors import UserError, nearest, within
from distill_runner.common.schema import Schema, typed
from distill_runner.methods.base import LossTerm, Method
from distill_runner.methods.layer_schedule import LayerSchedule, ScheduledMethod
from distill_runner.methods.outputs import Outputs

Node = Mapping[str, Any]
SCHEDULE = "method.schedule"
"""Key of the schedule among the terms of a spec; no term can be called so, since torch allows no dot in a name."""


def make_method(node: Node) -> Method:
    """Build a method: terms by their ``_target_``, with their weights, under a schedule of layers if there is one.

    Raises:
        UserError: a term that does not exist or is no ``LossTerm``, arguments that it does not take, a weight below 0.
    """
    terms, weights = node.get("terms", {}), node.get("weights", {})
    if set(terms) != set(weights):
        raise UserError(".method.weights", list(weights), f"must name the terms {', '.join(terms)}")
    for name, weight in weights.items():
        if not isinstance(weight, int | float) or not isfinite(weight):
            raise UserError(f".method.weights.{name}", weight, "must be a number")
    made = {name: _term(name, terms[name]) for name in terms if weights[name]}
    if schedule := node.get("schedule"):
        return ScheduledMethod(made, weights, typed(LayerSchedule, schedule, ".method.schedule."))
    return Method(made, weights)


def method_spec(node: Node, outputs: Outputs) -> dict[str, Any]:
    """What determines a method: its terms of non-zero weight, their versions, its schedule; not what it is called.

    Args:
        outputs: of the heads, for which some arguments may have no meaning.
    """
    schedule = {SCHEDULE: typed(LayerSchedule, given).model_dump()} if (given := node.get("schedule")) else {}
    return schedule | {
        name: _term_spec(name, node["terms"][name], outputs) | {"weight": float(weight)}
        for name, weight in sorted(node["weights"].items())
        if weight
    }


def _term_spec(name: str, node: Node, outputs: Outputs) -> dict[str, Any]:
    term = _term_class(name, node)
    # Defaults are left out: an argument that is new, or spelt out, makes no other term.
    given = _given(name, node).model_dump(
        mode="json", exclude=set(term.ignored_arguments(outputs)), exclude_defaults=True
    )
    return {**given, "_target_": node["_target_"], "version": term.version}


def _term(name: str, node: Node) -> LossTerm:
    kind, given = _term_class(name, node), _given(name, node)
    with within(f".method.terms.{name}"):
        return kind(**{key: getattr(given, key) for key in given.model_fields_set})


def _given(name: str, node: Node) -> Schema:
    """The arguments of a term's constructor."""
    given = {key: value for key, value in node.items() if key != "_target_"}
    return typed(_arguments(_term_class(name, node)), given, f".method.terms.{name}.")


def _term_class(name: str, node: Node) -> type[LossTerm]:
    """The class, imported. Nothing but a ``LossTerm`` is ever called."""
    key, target = f".method.terms.{name}._target_", str(node.get("_target_"))
    module, _, attribute = target.rpartition(".")
    try:
        found = vars(import_module(module))
    except (ImportError, ValueError, TypeError):
        found = {}
    if attribute not in found:
        known = [name for name, value in found.items() if _is_term(value)]
        raise UserError(
            key, target, "there is no such class", nearest(attribute, known) or "Give the path of a LossTerm."
        )
    kind: type[LossTerm] = found[attribute]
    if not _is_term(kind):
        raise UserError(
            key, target, "is no LossTerm", "Only subclasses of distill_runner.methods.base.LossTerm are built."
        )
    return kind


def _is_term(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, LossTerm) and not inspect.isabstract(kind)


@cache
def _arguments(kind: type[LossTerm]) -> type[Schema]:
    """The constructor's signature as a schema."""
    fields: dict[str, Any] = {
        name: (parameter.annotation, ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in inspect.signature(kind, eval_str=True).parameters.items()
    }
    return create_model(kind.__name__, __base__=Schema, **fields)
