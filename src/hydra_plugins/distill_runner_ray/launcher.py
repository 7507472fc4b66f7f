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

log = logging.getLogger(__name__)

HANDED_ON = ("DISTILL_", "HF_", "PYTHONPATH", "WANDB_")
"""Prefixes of the environment variables that the launcher copies to the workers.

A worker otherwise has the environment of the ``ray start`` of its node.
"""
SECONDS_BETWEEN_LOOKS = 5.0
SECONDS_TO_ANSWER = 10.0


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
        self.needs = {"CPU": num_cpus, "GPU": num_gpus}
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
        place = (os.getcwd(), {name: value for name, value in os.environ.items() if name.startswith(HANDED_ON)})
        shared = ray.put((hydra, place))  # once for all tasks
        options = {"num_cpus": self.needs["CPU"], "num_gpus": self.needs["GPU"], "max_retries": self.max_retries}
        task = ray.remote(**options)(_run)
        numbered = enumerate(job_overrides, start=initial_job_idx)
        tasks = [task.remote(shared, number, list(overrides)) for number, overrides in numbered]
        log.info("%d tasks for Ray on %d nodes", len(tasks), len(_alive(ray)))
        try:
            _watch(ray, tasks)
        except KeyboardInterrupt:
            for one in tasks:
                ray.cancel(one, force=True)
            raise
        return [ended for one in tasks if (ended := _result(ray, one)) is not None]

    @cached_property
    def _cluster(self) -> Any:
        """The module ``ray``, connected to the cluster."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster started here would send usage statistics
        import ray

        try:
            _knock(self.address or os.environ.get("RAY_ADDRESS", ""))
            ray.init(self.address, log_to_driver=False, logging_level=logging.WARNING)
        except (OSError, ValueError, RuntimeError) as error:
            remedy = "Give host:port of a cluster (ray start --head), or local for a cluster of this machine alone."
            raise UserError("hydra.launcher.address", self.address, first_line(error), remedy) from error
        if not any(
            all(node.get(kind, 0) >= need for kind, need in self.needs.items()) for node in _alive(ray).values()
        ):
            log.warning("no node has %s: points wait until one joins", self.needs)
        return ray


def _knock(address: str) -> None:
    """Check that an ``address`` of the form ``host:port`` accepts connections.

    Ray itself searches for an absent cluster for minutes.

    Raises:
        OSError: nothing accepts the connection.
    """
    if found := re.fullmatch(r"([\w.-]+):(\d+)", address):
        socket.create_connection((found[1], int(found[2])), SECONDS_TO_ANSWER).close()


def _run(shared: tuple[Any, Any], number: int, overrides: list[str]) -> JobReturn:
    """Run one job in a Ray worker, in the same steps as Hydra's basic launcher."""
    (hydra_context, config, task_function, singletons), (folder, environment) = shared
    os.chdir(folder)
    os.environ.update(environment)
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
    """Wait until all ``tasks`` have ended; log how many have ended, and which nodes leave or join the cluster."""
    nodes, waiting = _alive(ray), list(tasks)
    while waiting:
        ended, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=SECONDS_BETWEEN_LOOKS)
        if ended:
            log.info("%d of %d tasks have ended", len(tasks) - len(waiting), len(tasks))
        before, nodes = nodes, _alive(ray)
        for gone in before.keys() - nodes.keys():
            log.warning("node %s has left: its points run again on other nodes, %d remain", gone[:8], len(nodes))
        for new in nodes.keys() - before.keys():
            log.info("node %s has joined: there are %d nodes", new[:8], len(nodes))


def _alive(ray: Any) -> dict[str, Mapping[str, float]]:
    """Return the resources of each living node, by node id."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _result(ray: Any, task: Any) -> JobReturn | None:
    try:
        found: JobReturn = ray.get(task)
        return found
    except ray.exceptions.RayError as error:
        log.error("a point was given up: %s", first_line(error))
        return None
