"""The resolved parts of a configuration that a run is made of, and a check of their values without torch.

The typed configuration needs the loss terms, which are torch modules, and their import takes seconds. What has a schema
of its own is checked before: the optimizers, the models, the hardware and the tracker.
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distill_runner.common.errors import error_context
from distill_runner.common.schema import Schema, validate_config
from distill_runner.compose.resolvers import complete_stages
from distill_runner.models.config import ModelConfig
from distill_runner.tracking.tracker import TrackerConfig
from distill_runner.training.config import Optim, Runtime

PARTS = ("stages", "template", "teacher", "runtime", "store", "tracker", "seed", "stage", "plan")
"""Top-level keys of the configuration that a run is made of."""
NAMES = ("task.name", "method.name")
"""Keys of the names of a run; the task may have none."""
SCHEMAS: dict[str, type[Schema]] = {"runtime": Runtime, "tracker": TrackerConfig}
STAGE_SCHEMAS: dict[str, type[Schema]] = {"model": ModelConfig, "optim": Optim}


def resolved_parts(config: DictConfig) -> dict[str, Any]:
    """Return the resolved ``PARTS`` and ``NAMES`` of ``config``, with all that the stages inherit.

    Raises:
        UserError: a stage inherits from a name that does not exist.
    """
    return with_complete_stages(own_parts(config))


def own_parts(config: DictConfig) -> dict[str, Any]:
    """Return the resolved ``PARTS`` and ``NAMES`` of ``config``, without what the stages inherit."""
    parts = {key: plain(config[key]) for key in PARTS if key in config}
    for name in NAMES:
        group, key = name.split(".")
        parts[group] = {key: OmegaConf.select(config, name)}
    return parts


def with_complete_stages(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``parts`` with all that the stages inherit."""
    return {**parts, "stages": complete_stages(parts)}


def plain(node: Any) -> Any:
    """Return a node of a configuration as plain resolved values."""
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def resolved_settings(config: DictConfig) -> dict[str, Any]:
    """Return the whole configuration as plain values, with all that the stages inherit, to be stored with a run."""
    settings: Any = OmegaConf.to_container(config, resolve=True)
    if (beta := derived_beta(config)) is not None:
        settings["loss"]["beta"] = beta
    return {**settings, "stages": complete_stages(settings)}


def derived_beta(config: DictConfig) -> float | None:
    """Return the weight of the hard labels that the method derives from the other weights; None if it derives none."""
    raw: Any = OmegaConf.to_container(config.method.get("weights") or OmegaConf.create(), resolve=False)
    names = [name for name, weight in raw.items() if str(weight).startswith("${beta:")]
    return config.method.weights[names[0]] if names and "loss" in config else None


def check_values(parts: Mapping[str, Any]) -> None:
    """Check the values that have a schema without torch; ``typed_run`` checks all of them.

    Args:
        parts: values of ``resolved_parts``.
    Raises:
        UserError: a schema refuses a value.
    """
    if not isinstance((parts.get("teacher") or {}).get("fine_tuned", False), bool):
        return  # the head that it selects would be refused instead of it
    for name, stage in parts["stages"].items():
        if isinstance(stage, Mapping):
            with error_context(f"stages.{name}"):
                _check(STAGE_SCHEMAS, stage, ".")
    _check(SCHEMAS, parts, "")


def _check(schemas: Mapping[str, type[Schema]], values: Mapping[str, Any], prefix: str) -> None:
    for key, schema in schemas.items():
        if isinstance(values.get(key), Mapping):
            validate_config(schema, values[key], f"{prefix}{key}.")
