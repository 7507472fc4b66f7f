"""Tasks of ``conf/task`` as a run has them that leaves everything else as it is."""

from typing import Any

from omegaconf import OmegaConf

from distill_runner.compose import resolvers
from distill_runner.compose.folders import config_folder


def shipped_task(name: str, settings: Any = None) -> dict[str, Any]:
    """The fields of a task.

    Args:
        settings: what Hydra has made of its file; as it stands by default.
    """
    resolvers.register()
    described = OmegaConf.load(config_folder() / "task" / f"{name}.yaml") if settings is None else settings
    around = {"recipe": {}, "method": {"name": "nkd"}, "select_on": "validation"}
    fields: Any = OmegaConf.to_container(OmegaConf.create({"task": described, **around}), resolve=True)
    return {str(key): value for key, value in fields["task"].items()}
