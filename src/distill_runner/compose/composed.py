"""From what Hydra composed to the typed configuration of a run."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distill_runner.common.schema import typed
from distill_runner.compose.config import RunConfig
from distill_runner.compose.folders import config_dir
from distill_runner.compose.stages import completed

PARTS = ("stages", "template", "teacher", "runtime", "store", "tracker", "seed", "stage", "plan")
"""Keys of the configuration that a run is made of, beside names."""


def typed_run(
    config: DictConfig, overrides: Sequence[str] = (), resolved: Mapping[str, Any] | None = None
) -> RunConfig:
    """The run that ``config`` describes.

    Args:
        overrides: what was typed for it, for the command that repeats it.
        resolved: its ``PARTS``, where they are known already, the stages with all that they inherit.
    Raises:
        UserError: a value that the schema refuses.
    """
    if resolved is None:
        resolved = {key: _resolved(config[key]) for key in PARTS if key in config}
        resolved["stages"] = completed(resolved)
    return typed(
        RunConfig,
        {
            "teacher": {key: config.teacher[key] for key in ("name", "source", "fine_tuned")},
            "method": config.method.name,
            "command": shlex.join(["distill-run", *overrides, *config_dir()]),
            **{key: value for key, value in resolved.items() if key not in ("template", "teacher")},
        },
    )


def settings_of(config: DictConfig) -> dict[str, Any]:
    """The whole configuration as plain values, its stages with all that they inherit: for the record of a run."""
    settings: Any = OmegaConf.to_container(config, resolve=True)
    return {**settings, "stages": completed(settings)}


def _resolved(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
