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
    """The stages with what they inherit; interpolations, where there are some, are left as they are."""
    found = {}
    for name, stage in settings["stages"].items():
        found[name] = stage
        if isinstance(stage, Mapping) and "method" not in stage:
            known = [other for other in settings["stages"] if other != name]
            raise UserError(f"stages.{name}", None, "there is no such stage", nearest(name, known))
        if isinstance(stage, Mapping) and (base := stage.get(INHERITS)):
            if base != TEMPLATE:
                problem = "there is nothing of this name to inherit"
                raise UserError(f"stages.{name}.{INHERITS}", base, problem, f"Known: {TEMPLATE}.")
            own = {key: value for key, value in stage.items() if key != INHERITS}
            template = dict(settings[TEMPLATE])
            if isinstance(own.get("model"), Mapping) and "source" in own["model"]:
                del template["model"]
            found[name] = _merged(template, own, settings)
    return found


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
