"""Sweeper ``hydra/sweeper=grid``: run every combination of the parameters, and resume an earlier sweep."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from distill_runner.common.errors import UserError
from distill_runner.compose.hydra_private import BasicSweeper


@dataclass
class GridSweeperConf:
    """Configuration of the grid sweeper; the keys ``sweep.*`` configure it further.

    Attributes:
        params: overrides of the sweep, by key. Overrides on the command line replace them.
    """

    _target_: str = "hydra_plugins.distill_runner_grid.grid.GridSweeper"
    params: dict[str, str] = field(default_factory=dict)


ConfigStore.instance().store(group="hydra/sweeper", name="grid", node=GridSweeperConf, provider="distill-run")


class GridSweeper(BasicSweeper):
    """Grid sweeper. A failed point does not stop the others; the sweep always ends with its table and an exit code."""

    def __init__(self, params: dict[str, str] | None = None) -> None:
        super().__init__(max_batch_size=None, params=params)

    def sweep(self, arguments: list[str]) -> None:
        from distill_runner.common import hub
        from distill_runner.common.schema import validate_config
        from distill_runner.sweeping.plan import show_plan
        from distill_runner.sweeping.points import SweepConfig, expand
        from distill_runner.sweeping.slurm_queue import submit_grid, submitter
        from distill_runner.sweeping.sweep import finish, require_points, run_grid, sweep_folder

        assert self.config is not None
        assert self.hydra_context is not None
        hydra, plain = self.config.hydra, OmegaConf.to_container(self.config.sweep, resolve=True)
        settings = validate_config(SweepConfig, plain, "sweep.")
        workers = self._local_workers()
        parameters, frontier = [*self._parse_config(), *arguments], None
        if node := self.config.get("frontier"):
            from distill_runner.deploy.frontier_sweep import NO_TEST, Frontier, finish_frontiers, require_frontier

            frontier = validate_config(Frontier, OmegaConf.to_container(node, resolve=True), "frontier.")
            parameters.append(NO_TEST)
        students = frontier.students if frontier else ()
        grid = expand(self.config, self.hydra_context.config_loader, parameters, settings.where, students)
        require_points(grid)
        if frontier:
            require_frontier(grid)
            if not settings.wait:
                problem = "queues the points, but a frontier waits for them"
                raise UserError("sweep.wait", False, problem, "Leave it out.")
            if settings.shard:
                problem = "trains a part of the points, but a frontier compares all of them"
                raise UserError("sweep.shard", settings.shard, problem, "Leave it out.")
        grid = settings.shard_of(grid)
        if self.config.plan:
            show_plan(grid, self._num_workers("n_jobs", "array_parallelism"), settings.retry_failed)
            return
        name = hydra.runtime.choices.get("sweep") or "multirun"
        folder = sweep_folder(Path(hydra.sweep.dir).absolute().parent / "sweeps", name, grid.points)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        launch = partial(self._launch, folder.name)
        with hub.shared_commits():
            if settings.wait:
                run_grid(grid, launch, workers, settings.retry_failed, settings.halving)
            else:
                submit = submitter(self.launcher, self._group_override(folder.name))
                submit_grid(grid, submit, folder, settings.retry_failed)
            code = finish(grid, folder, name, settings.halving, settings.wait)
            if frontier:
                finish_frontiers(grid, frontier, launch, folder.parents[1] / "frontier")
        if code:
            sys.exit(code)

    def _launch(self, group: str, jobs: Sequence[Sequence[str]]) -> Sequence[JobReturn]:
        from distill_runner.sweeping.slurm_queue import in_arrays

        assert self.launcher is not None
        is_slurm = getattr(self.launcher, "_EXECUTOR", None) == "slurm"
        returns: list[JobReturn] = []
        for part in in_arrays(jobs) if is_slurm else [jobs]:
            launched = [[*job, *self._group_override(group)] for job in part]
            returns += self.launcher.launch(launched, initial_job_idx=len(returns))
        return returns

    def _group_override(self, group: str) -> list[str]:
        """Return the override that sets ``tracker.group`` of tracked points to ``group``; empty if a group is set."""
        assert self.config is not None
        return [f"tracker.group={group}"] if self.config.tracker.get("group", group) is None else []

    def _local_workers(self) -> int | None:
        """Return how many points run at once on this machine; None if they run as jobs of a cluster."""
        assert self.config is not None
        hydra = self.config.hydra
        is_local = hydra.runtime.choices["hydra/launcher"] == "basic" or "n_jobs" in hydra.launcher
        return self._num_workers("n_jobs") if is_local else None

    def _num_workers(self, *names: str) -> int:
        """Return how many points run at once: the first of the launcher's settings ``names`` that is set, else 1.

        joblib on this machine has the setting ``n_jobs``, submitit has ``array_parallelism``. A negative number means
        one point for each CPU.

        Raises:
            UserError: the setting is not a whole number, or 0.
        """
        assert self.config is not None
        name = next((name for name in names if self.config.hydra.launcher.get(name) is not None), None)
        jobs = self.config.hydra.launcher[name] if name else 1
        if not isinstance(jobs, int) or isinstance(jobs, bool) or jobs == 0:
            raise UserError(f"hydra.launcher.{name}", jobs, "must be 1 or more, or -1 for one worker per CPU")
        if jobs > 0:
            return jobs
        from distill_runner.training.devices import available_cpus

        return available_cpus()
