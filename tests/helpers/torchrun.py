"""Functions in several processes, which ``torchrun`` starts by its Python interface."""

import multiprocessing
from collections.abc import Callable
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from distill_runner.training.processes import ProcessGroup, join_launched


def in_processes(size: int, function: Callable[[ProcessGroup], Any]) -> list[Any]:
    """Return what ``function`` returns in each of ``size`` processes; a single one is this process.

    Raises:
        ChildFailedError: a process has ended with an error, or was killed.
    """
    if size == 1:
        return [function(ProcessGroup())]
    multiprocessing.get_context("forkserver").set_forkserver_preload(["distill_runner.pipeline.build"])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="forkserver",
        max_restarts=0,
        monitor_interval=0.1,
    )
    values = elastic_launch(config, _joined)(function)
    return [values[rank] for rank in range(size)]


def _joined(function: Callable[[ProcessGroup], Any]) -> Any:
    return function(join_launched())
