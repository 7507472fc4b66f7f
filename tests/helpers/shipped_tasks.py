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
    with initialize_config_dir(str(config_folder() / "task"), version_base="1.3"):
        settings = compose(name, [override.replace("task.", "") for override in overrides])
    others = {"recipe": {}, "method": {"name": "nkd"}, "select_on": "validation"}
    fields: Any = OmegaConf.to_container(OmegaConf.create({"task": settings, **others}), resolve=True)
    return {str(key): value for key, value in fields["task"].items()}
