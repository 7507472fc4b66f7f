"""Launcher ``hydra/launcher=ray``: run points as tasks of a Ray cluster; if a node dies, its points are restarted."""

import logging
import os
import re
import socket
from collections.abc import Mapping, Sequence
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
POLL_SECONDS = 5.0
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
        hydra = (self.hydra_context, self.config, self.task_function, Singleton.get_state())
        variables = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED_VARIABLES)}
        shared = ray.put((hydra, (os.getcwd(), variables)))  # once for all tasks
        options = {
            "num_cpus": self.resources["CPU"],
            "num_gpus": self.resources["GPU"],
            "max_retries": self.max_retries,
        }
        run = ray.remote(**options)(_run)
        jobs = enumerate(job_overrides, start=initial_job_idx)
        tasks = [run.remote(shared, number, list(overrides)) for number, overrides in jobs]
        log.info("%d tasks for Ray on %d nodes", len(tasks), len(_nodes(ray)))
        try:
            _watch(ray, tasks)
        except KeyboardInterrupt:
            for running_task in tasks:
                ray.cancel(running_task, force=True)
            raise
        return [result for task in tasks if (result := _result(ray, task)) is not None]

    @cached_property
    def _cluster(self) -> Any:
        """The module ``ray``, connected to the cluster."""
        disable_ray_statistics()
        import ray

        try:
            _check_address(self.address or os.environ.get("RAY_ADDRESS", ""))
            ray.init(self.address, log_to_driver=False, logging_level=logging.WARNING)
        except (OSError, ValueError, RuntimeError) as error:
            remedy = "Give host:port of a cluster (ray start --head), or local for a cluster of this machine alone."
            raise UserError("hydra.launcher.address", self.address, first_line(error), remedy) from error
        nodes = _nodes(ray).values()
        if not any(all(node.get(name, 0) >= amount for name, amount in self.resources.items()) for node in nodes):
            log.warning("no node has %s: points wait until one joins", self.resources)
        return ray


def _check_address(address: str) -> None:
    """Check that an ``address`` of the form ``host:port`` accepts connections.

    Ray itself searches for an absent cluster for minutes.

    Raises:
        OSError: nothing accepts the connection.
    """
    if match := re.fullmatch(r"([\w.-]+):(\d+)", address):
        socket.create_connection((match[1], int(match[2])), CONNECT_SECONDS).close()


def _run(shared: tuple[Any, Any], number: int, overrides: list[str]) -> JobReturn:
    """Run one job in a Ray worker, in the same steps as Hydra's basic launcher."""
    (hydra_context, config, task_function, singletons), (folder, environment) = shared
    enter_job(folder, environment)
    setup_globals()
    Singleton.set_state(singletons)
    job = hydra_context.config_loader.load_sweep_config(config, overrides)
    with open_dict(job):
        job.hydra.job.id = job.hydra.job.num = number
    HydraConfig.instance().set_config(job)
    return run_job(
        hydra_context=hydra_context,
        task_function=task_function,
        config=job,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


def _watch(ray: Any, tasks: Sequence[Any]) -> None:
    """Wait until all ``tasks`` have finished; log how many have, and which nodes leave or join the cluster."""
    nodes, pending = _nodes(ray), list(tasks)
    while pending:
        finished, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_SECONDS)
        if finished:
            log.info("%d of %d tasks have ended", len(tasks) - len(pending), len(tasks))
        earlier_nodes, nodes = nodes, _nodes(ray)
        for node in earlier_nodes.keys() - nodes.keys():
            log.warning("node %s has left: its points run again on other nodes, %d remain", node[:8], len(nodes))
        for node in nodes.keys() - earlier_nodes.keys():
            log.info("node %s has joined: there are %d nodes", node[:8], len(nodes))


def _nodes(ray: Any) -> dict[str, Mapping[str, float]]:
    """Return the resources of each living node, by node id."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _result(ray: Any, task: Any) -> JobReturn | None:
    try:
        result: JobReturn = ray.get(task)
        return result
    except ray.exceptions.RayError as error:
        log.error("a point was given up: %s", first_line(error))
        return None
