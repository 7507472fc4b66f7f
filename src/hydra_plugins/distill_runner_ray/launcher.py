"""Launcher ``hydra/launcher=ray``: run points as tasks of a Ray cluster; if a node dies, its points are restarted."""

import logging
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from distill_runner.common.errors import UserError, first_line
from distill_runner.common.library_switches import disable_ray_statistics
from distill_runner.common.process import enter_job

log = logging.getLogger(__name__)

FORWARDED_VARIABLES = ("DISTILL_", "HF_", "MLFLOW_", "PYTHONPATH", "TRACKIO_", "WANDB_")
"""Prefixes of the environment variables that the launcher copies to the workers.

A worker otherwise has the environment of the ``ray start`` of its node.
"""
CONNECT_SECONDS = 10.0


@dataclass
class RayLauncherConf:
    """Configuration of the Ray launcher; see docs/clusters.md.

    Args:
        address: address of the cluster as in ``ray.init``: ``host:port``; ``auto`` for the cluster of this machine;
            ``local`` for a new cluster of this machine only. None tries RAY_ADDRESS, then ``auto``, then ``local``.
        num_cpus: CPUs of a point, and its number of threads unless ``runtime.threads`` is set.
        num_gpus: GPUs of a point; with a fraction, points share a GPU.
        max_retries: how often a point is restarted after its node or worker has died.
    """

    _target_: str = "hydra_plugins.distill_runner_ray.launcher.RayLauncher"
    address: str | None = None
    num_cpus: int = 1
    num_gpus: float = 0
    max_retries: int = 100


ConfigStore.instance().store(group="hydra/launcher", name="ray", node=RayLauncherConf, provider="distill-run")


class RayLauncher(Launcher):
    """Launcher that runs each job as a Ray task. ``RayLauncherConf`` describes the arguments."""

    def __init__(self, address: str | None, num_cpus: int, num_gpus: float, max_retries: int) -> None:
        self.address = address
        self.resources = {"CPU": num_cpus, "GPU": num_gpus}
        self.max_retries = max_retries

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the arguments for ``launch``.

        Raises:
            UserError: Ray is not installed.
        """
        if find_spec("ray") is None:
            raise UserError("hydra/launcher", "ray", "Ray is not installed", "pip install 'distill-run[ray]'")
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run one Ray task for each list of overrides and wait for all of them.

        Returns:
            The results of the tasks in their order, without those that Ray has given up; these are logged.
        Raises:
            UserError: no cluster can be reached at the address.
        """
        ray = self._cluster
        variables = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED_VARIABLES)}
        hydra = (self.hydra_context, self.config, self.task_function, Singleton.get_state())
        shared = ray.put((*hydra, os.getcwd(), variables))  # once for all tasks
        num_cpus, num_gpus = self.resources.values()
        run = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=self.max_retries)(_run)
        tasks = [run.remote(shared, number, [*job]) for number, job in enumerate(job_overrides, start=initial_job_idx)]
        log.info("%d tasks for Ray on %d nodes", len(tasks), len(ray.nodes()))
        pending, results = tasks, list[JobReturn]()
        try:
            while pending:
                _, pending = ray.wait(pending)
                log.info("%d of %d tasks have ended", len(tasks) - len(pending), len(tasks))
        except KeyboardInterrupt:
            for task in tasks:
                ray.cancel(task, force=True)
            raise
        for task in tasks:
            try:
                results.append(ray.get(task))
            except ray.exceptions.RayError as error:
                log.error("a point was given up: %s", first_line(error))
        return results

    @cached_property
    def _cluster(self) -> Any:
        """The module ``ray``, connected to the cluster."""
        disable_ray_statistics()
        import ray

        try:
            address = self.address or os.environ.get("RAY_ADDRESS", "")
            if match := re.fullmatch(r"([\w.-]+):(\d+)", address):  # Ray searches for an absent cluster for minutes
                socket.create_connection((match[1], int(match[2])), CONNECT_SECONDS).close()
            ray.init(self.address, log_to_driver=False, logging_level=logging.WARNING)
        except (OSError, ValueError, RuntimeError) as error:
            remedy = "Give host:port of a cluster (ray start --head), or local for a cluster of this machine alone."
            raise UserError("hydra.launcher.address", self.address, first_line(error), remedy) from error
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(all(node.get(name, 0) >= amount for name, amount in self.resources.items()) for node in nodes):
            log.warning("no node has %s: points wait until one joins", self.resources)
        return ray


def _run(shared: tuple[Any, ...], number: int, overrides: list[str]) -> JobReturn:
    """Run one job in a Ray worker, in the same steps as Hydra's basic launcher."""
    hydra_context, config, task_function, singletons, folder, environment = shared
    enter_job(folder, environment)
    setup_globals()
    Singleton.set_state(singletons)
    job = hydra_context.config_loader.load_sweep_config(config, overrides)
    with open_dict(job):
        job.hydra.job.id = job.hydra.job.num = number
    HydraConfig.instance().set_config(job)
    return run_job(task_function, job, "hydra.sweep.dir", "hydra.sweep.subdir", hydra_context)
