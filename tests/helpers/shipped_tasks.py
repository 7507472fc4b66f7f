"""Tasks of ``conf/task`` as a run has them that leaves everything else as it is."""

from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from distill_runner.compose import resolvers
from distill_runner.compose.folders import config_folder


def shipped_task(name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of a task, with overrides of the command line."""
    resolvers.register()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", [f"task={name}", *overrides])
    fields: Any = OmegaConf.to_container(config.task, resolve=True)
    return {str(key): value for key, value in fields.items()}
