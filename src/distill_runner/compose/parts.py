"""The resolved parts of a configuration that a run is made of."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distill_runner.compose.resolvers import complete_stages

PARTS = ("stages", "template", "teacher", "runtime", "store", "tracker", "seed", "stage", "plan")
"""Top-level keys of the configuration that a run is made of."""
NAMES = ("task.name", "method.name")
"""Keys of the names of a run; the task may have none."""


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
