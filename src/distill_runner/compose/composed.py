"""From what Hydra composed to the typed configuration of a run."""

import shlex
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distill_runner.common.schema import typed
from distill_runner.compose.config import RunConfig


def typed_run(config: DictConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that ``config`` describes.

    Args:
        overrides: what was typed for it, for the command that repeats it.
    Raises:
        UserError: a value that the schema refuses.
    """
    keys = ("stages", "runtime", "store", "tracker", "seed", "stage", "plan")
    return typed(
        RunConfig,
        {
            "teacher": {key: config.teacher[key] for key in ("name", "source", "fine_tuned")},
            "method": config.method.name,
            "command": shlex.join(["distill-run", *overrides]),
            **{key: _resolved(config[key]) for key in keys},
        },
    )


def _resolved(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
