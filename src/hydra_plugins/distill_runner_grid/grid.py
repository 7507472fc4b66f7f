"""Sweeper ``hydra/sweeper=grid``: run every combination of the parameters, and resume an earlier sweep."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from distill_runner.common import hub
from distill_runner.common.errors import UserError
from distill_runner.common.process import available_cpus


@dataclass
class GridSweeperConf:
    """Configuration of the grid sweeper; the keys ``sweep.*`` configure it further.

    Attributes:
        params: overrides of the sweep, by key. Overrides on the command line replace them.
    """

    _target_: str = "hydra_plugins.distill_runner_grid.grid.GridSweeper"
    params: dict[str, str] = field(default_factory=dict)


ConfigStore.instance().store(group="hydra/sweeper", name="grid", node=GridSweeperConf, provider="distill-run")


class GridSweeper(Sweeper):
    """Grid sweeper. A failed point does not stop the others; the sweep always ends with its table and an exit code."""

    hydra_context: HydraContext
    config: DictConfig
    launcher: Launcher

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the arguments for ``sweep``."""
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        from distill_runner.common.schema import validate_config
        from distill_runner.deploy import frontier_sweep
        from distill_runner.sweeping.plan import show_plan
        from distill_runner.sweeping.points import SweepConfig, expand
        from distill_runner.sweeping.sweep import finish, require_points, run_grid, submit_grid, submitter, sweep_folder

        hydra, plain = self.config.hydra, OmegaConf.to_container(self.config.sweep, resolve=True)
        settings = validate_config(SweepConfig, plain, "sweep.")
        num_workers = self._num_workers()
        parameters, frontier = [*(f"{key}={value}" for key, value in self.params.items()), *arguments], None
        if node := self.config.get("frontier"):
            frontier = validate_config(frontier_sweep.Frontier, OmegaConf.to_container(node, resolve=True), "frontier.")
            parameters.append(frontier_sweep.NO_TEST)
            if settings.shard or not settings.wait:
                problem = "compares all points, which sweep.shard and sweep.wait=false leave to other commands"
                raise UserError("sweep", "frontier", problem, "Leave these out.")
        students = frontier.students if frontier else ()
        root = Path(hydra.sweep.dir).absolute()  # before points are composed, so that ${now:...} is the same for all
        grid = expand(self.config, self.hydra_context.config_loader, parameters, settings.where, students)
        require_points(grid, settings.halving)
        if frontier:
            frontier_sweep.require_frontier(grid)
            frontier_sweep.add_labels_alone(grid)
        grid = settings.shard_of(grid)
        if self.config.plan:
            show_plan(grid, num_workers, settings.retry_failed, settings.halving)
            return
        name = hydra.runtime.choices.get("sweep") or "multirun"
        folder = sweep_folder(root.parent / "sweeps", name, grid.points)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        # Tracked points of a sweep are a group, unless they have one.
        group = [f"tracker.group={folder.name}"] if self.config.tracker.get("group", "") is None else []
        launch = partial(self._launch, group)
        with hub.shared_commits():
            if settings.wait:
                run_grid(grid, launch, settings.retry_failed, settings.halving)
            else:
                submit_grid(grid, submitter(self.launcher, group), settings.retry_failed)
            code = finish(grid, folder, name, settings.halving, settings.wait)
            if frontier:
                frontier_sweep.finish_frontiers(grid, frontier, launch, folder.parents[1] / "frontier")
        if code:
            sys.exit(code)

    def _launch(self, group: Sequence[str], jobs: Sequence[Sequence[str]]) -> Sequence[JobReturn]:
        from distill_runner.sweeping.sweep import SLURM_LAUNCHER, in_arrays

        returns: list[JobReturn] = []
        for part in in_arrays(jobs) if type(self.launcher).__name__ == SLURM_LAUNCHER else [jobs]:
            returns += self.launcher.launch([[*job, *group] for job in part], initial_job_idx=len(returns))
        return returns

    def _num_workers(self) -> int:
        """Return how many points run at once.

        joblib on this machine has the setting ``n_jobs``, submitit has ``array_parallelism``. A negative number means
        one point for each CPU.

        Raises:
            UserError: the setting is not a whole number, or 0.
        """
        launcher = self.config.hydra.launcher
        name = next((key for key in ("n_jobs", "array_parallelism") if launcher.get(key) is not None), None)
        jobs = launcher[name] if name else 1
        if not isinstance(jobs, int) or isinstance(jobs, bool) or jobs == 0:
            raise UserError(f"hydra.launcher.{name}", jobs, "must be 1 or more, or -1 for one worker per CPU")
        return jobs if jobs > 0 else available_cpus()
