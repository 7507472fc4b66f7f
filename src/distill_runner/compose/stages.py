"""Stages with what they inherit and where their models come from: the one place that decides it."""

import re
from collections.abc import Mapping
from functools import reduce
from typing import Any

from distill_runner.common.errors import UserError, nearest

TEMPLATE, INHERITS, FRESH_FROM = "template", "inherits", "fresh_from"


def completed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The stages with what they inherit, and with the source of every model spelt out.

    A source of ``pretrained`` is that of the teacher, ``finetuned`` is the model that the teacher's stage yields. A
    model without a source has new weights, unless ``fresh_from`` names what it starts from instead.

    Args:
        settings: a resolved configuration.
    Raises:
        UserError: a stage inherits what there is not.
    """
    stages = inherited(settings)
    sources = {"pretrained": settings["teacher"]["source"], "finetuned": "stage:teacher"}
    for stage in stages.values():
        if isinstance(stage, dict) and isinstance(model := stage.get("model"), Mapping):
            source = model.get("source") or model.get(FRESH_FROM)
            own = {key: value for key, value in model.items() if key != FRESH_FROM}
            stage["model"] = {**own, "source": sources.get(str(source), source)}
    return stages


def inherited(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The stages with what they inherit, of the template or of another stage; interpolations are left as they are."""
    return {name: _with_base(name, settings, ()) for name in settings["stages"]}


def _with_base(name: str, settings: Mapping[str, Any], heirs: tuple[str, ...]) -> Any:
    """A stage with what it inherits. ``heirs`` inherit it in turn, so that it cannot inherit from them."""
    stage = settings["stages"][name]
    if not isinstance(stage, Mapping):
        return stage
    others = [other for other in settings["stages"] if other not in (name, *heirs)]
    if not (base := stage.get(INHERITS)):
        if "method" not in stage:
            raise UserError(f"stages.{name}", None, "there is no such stage", nearest(name, others))
        return stage
    if base not in (TEMPLATE, *others):
        problem = "there is nothing of this name to inherit"
        raise UserError(f"stages.{name}.{INHERITS}", base, problem, nearest(base, [TEMPLATE, *others]))
    own = {key: value for key, value in stage.items() if key != INHERITS}
    known = dict(settings[TEMPLATE] if base == TEMPLATE else _with_base(base, settings, (*heirs, name)))
    if isinstance(own.get("model"), Mapping) and "source" in own["model"]:
        del known["model"]
    return _merged(known, own, settings)


def _merged(base: Any, over: Any, settings: Mapping[str, Any]) -> Any:
    """``over`` where it says something, else ``base``, at every depth."""
    if not isinstance(over, Mapping):
        return over
    if isinstance(base, str) and (reference := re.fullmatch(r"\$\{([\w.]+)\}", base)):
        keys = reduce(lambda node, key: node[key], reference[1].split("."), settings)
        base = {key: f"${{{reference[1]}.{key}}}" for key in keys}
    if not isinstance(base, Mapping):
        return dict(over)
    return {**base, **{key: _merged(base.get(key), value, settings) for key, value in over.items()}}
