"""From what Hydra composed to the typed configuration of a run."""

import shlex
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distill_runner.common.schema import typed
from distill_runner.compose.config import RunConfig
from distill_runner.compose.stages import completed


def typed_run(config: DictConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that ``config`` describes.

    Args:
        overrides: what was typed for it, for the command that repeats it.
    Raises:
        UserError: a value that the schema refuses.
    """
    keys = ("runtime", "store", "tracker", "seed", "stage", "plan")
    parts = {key: _resolved(config[key]) for key in ("stages", "template", "teacher") if key in config}
    return typed(
        RunConfig,
        {
            "teacher": {key: config.teacher[key] for key in ("name", "source", "fine_tuned")},
            "method": config.method.name,
            "command": shlex.join(["distill-run", *overrides]),
            "stages": completed(parts),
            **{key: _resolved(config[key]) for key in keys},
        },
    )


def settings_of(config: DictConfig) -> dict[str, Any]:
    """The whole configuration as plain values, its stages with all that they inherit: for the record of a run."""
    settings: Any = OmegaConf.to_container(config, resolve=True)
    return {**settings, "stages": completed(settings)}


def _resolved(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
