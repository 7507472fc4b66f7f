"""From the configuration that Hydra composed to the typed configuration of a run.

This is the only module that decides what stages inherit, and where their models come from.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from distill_runner.common.errors import UserError, nearest
from distill_runner.compose.folders import config_dir

if TYPE_CHECKING:
    from distill_runner.compose.config import RunConfig

PARTS = ("stages", "template", "teacher", "runtime", "store", "tracker", "seed", "stage", "plan")
"""Top-level keys of the configuration that a run is made of, in addition to names."""
TEMPLATE, INHERITS, FRESH_FROM = "template", "inherits", "fresh_from"


def typed_run(
    config: DictConfig, overrides: Sequence[str] = (), resolved: Mapping[str, Any] | None = None
) -> "RunConfig":
    """Return the typed configuration of the run that ``config`` describes.

    Args:
        overrides: overrides as typed, for the command that repeats the run.
        resolved: resolved ``PARTS`` of ``config``, with all that the stages inherit; None if they are not known yet.
    Raises:
        UserError: the schema refuses a value.
    """
    from distill_runner.common.schema import typed  # imports pydantic, which help and completion do not need
    from distill_runner.compose.config import RunConfig

    if resolved is None:
        resolved = {key: _resolved(config[key]) for key in PARTS if key in config}
        resolved["stages"] = completed(resolved)
    return typed(
        RunConfig,
        {
            "teacher": {key: config.teacher[key] for key in ("name", "source", "fine_tuned")},
            "method": config.method.name,
            "command": command(overrides),
            **{key: value for key, value in resolved.items() if key not in ("template", "teacher")},
        },
    )


def command(overrides: Sequence[str]) -> str:
    """Return the command that repeats a run with these overrides."""
    return shlex.join(["distill-run", *overrides, *config_dir()])


def settings_of(config: DictConfig) -> dict[str, Any]:
    """Return the whole configuration as plain values, with all that the stages inherit, to be stored with a run."""
    settings: Any = OmegaConf.to_container(config, resolve=True)
    return {**settings, "stages": completed(settings)}


def _resolved(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def completed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stages with all that they inherit, and with the source of every model spelt out.

    The source ``pretrained`` stands for the teacher's source, and ``finetuned`` for the model of the teacher's stage. A
    model without a source has new weights, unless ``fresh_from`` names a source.

    Args:
        settings: resolved configuration.
    Raises:
        UserError: a stage inherits from a name that does not exist.
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
            raise UserError(f"stages.{name}", None, "there is no such stage", nearest(name, others))
        return stage
    if base not in (TEMPLATE, *others):
        problem = "there is no stage of this name to inherit from"
        raise UserError(f"stages.{name}.{INHERITS}", base, problem, nearest(base, [TEMPLATE, *others]))
    own = {key: value for key, value in stage.items() if key != INHERITS}
    known = dict(settings[TEMPLATE] if base == TEMPLATE else _with_base(base, settings, (*heirs, name)))
    if isinstance(own.get("model"), Mapping) and "source" in own["model"]:
        del known["model"]
    return _merged(known, own, settings)


def _merged(base: Any, over: Any, settings: Mapping[str, Any]) -> Any:
    """Merge two values: ``over`` where it has a value, else ``base``, at every depth."""
    if not isinstance(over, Mapping):
        return over
    if isinstance(base, str) and (reference := re.fullmatch(r"\$\{([\w.]+)\}", base)):
        keys = reduce(lambda node, key: node[key], reference[1].split("."), settings)
        base = {key: f"${{{reference[1]}.{key}}}" for key in keys}
    if not isinstance(base, Mapping):
        return dict(over)
    return {**base, **{key: _merged(base.get(key), value, settings) for key, value in over.items()}}
