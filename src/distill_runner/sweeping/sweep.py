"""Runs a sweep from its points to its table, even if points fail, or submits its points to Slurm's queue."""

import hashlib
import logging
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.utils import JobReturn

from distill_runner.common.errors import UserError, override
from distill_runner.pipeline import status
from distill_runner.pipeline.planning import needed_specs
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store
from distill_runner.report.collect import without_specs
from distill_runner.report.figures import write_pictures
from distill_runner.report.formats import write_report
from distill_runner.sweeping.halving import by_cell, halve, halving_report, require_epochs
from distill_runner.sweeping.points import Grid, GridPoint
from distill_runner.tracking.trackers import track_sweep

log = logging.getLogger(__name__)

Launch = Callable[[Sequence[Sequence[str]]], Sequence[JobReturn]]
"""Runs one job for each list of overrides, and returns when all have ended."""
Submit = Callable[[Sequence[Sequence[str]], str | None], Sequence[str]]
"""Queues an array with a job for each list of overrides, to start after the arrays that are named, if any (``1:2``);
returns the job ids."""
Item = TypeVar("Item")
ARRAY_SIZE = 1000
"""Jobs of an array; Slurm refuses more than 1,001 unless its ``MaxArraySize`` is set."""
SLURM_LAUNCHER = "SlurmLauncher"
"""Class of Hydra's launcher that submits to Slurm."""
JOB = "slurm_job"
"""File in a point's folder that names its last job."""


def run_grid(grid: Grid, launch: Launch, retry_failed: bool, halving: int | None) -> None:
    """Build what several points share, then train every point that is not done.

    Points that failed are skipped unless ``retry_failed``.

    Args:
        halving: fraction of the points, 1 / halving, that is kept at each rung; None keeps all.
    """
    log.info("%s", grid)
    with ExitStack() as stack:
        stores: dict[Path, Store] = {}
        for point in grid.points:  # protects what they start from also between two points
            if point.run is not None and point.stage is not None:
                if (folder := point.run.store.dir) not in stores:
                    stores[folder] = Store(folder)
                    stack.enter_context(stores[folder].protected())
                for stage in point.stage.all_upstream:
                    stores[folder].protect(*needed_specs(stage))
        todo = _with_shared_stages(grid, launch, grid.to_train(retry_failed))
        if halving:
            todo = halve(by_cell(grid.points), todo, partial(_launch, launch), halving)
        _launch(launch, [point.overrides for point in todo])


def require_points(grid: Grid, halving: int | None) -> None:
    """Check that the grid has a point, that at least one point can run, and that halving has epochs to compare.

    Raises:
        UserError: ``sweep.where`` drops all. If no point can run, the error of the first point is raised.
    """
    if not grid.points:
        raise UserError("sweep.where", None, "drops every point", f"Points dropped: {len(grid.dropped)}.")
    if all(point.error for point in grid.points):
        raise grid.points[0].error or AssertionError
    if halving:
        require_epochs(grid.points)


def _launch(launch: Launch, jobs: Sequence[Sequence[str]]) -> None:
    """Run jobs. Points record their own errors; an error of the launcher itself is logged here."""
    try:
        for job in launch(jobs) if jobs else []:
            _ = job.return_value  # raises the exception of the job
    except UserError:
        raise
    except Exception:
        log.exception("the launcher failed")


@dataclass
class Missing:
    """A stage that is not in the store.

    Attributes:
        users: points that need it.
        builder: the point that builds it; one that keeps the checkpoints of the stage, if any does.
    """

    stage: Stage
    builder: GridPoint
    users: list[GridPoint] = field(default_factory=list)


def missing_stages(points: Sequence[GridPoint]) -> list[Missing]:
    """Return the missing stages that ``points`` need, each after the missing stages that it needs itself."""
    missing: dict[str, Missing] = {}

    def visit(point: GridPoint, stage: Stage) -> None:
        for upstream in stage.upstream:
            if point.has(upstream):
                continue  # what it needs is not needed any more
            visit(point, upstream)
            needed = missing.setdefault(upstream.key, Missing(upstream, point))
            if point not in needed.users:
                needed.users.append(point)
            if upstream.config.keep_checkpoints and not needed.stage.config.keep_checkpoints:
                needed.stage, needed.builder = upstream, point

    for point in points:
        if point.stage is not None:
            visit(point, point.stage)
    return list(missing.values())


def shared_rounds(todo: Sequence[GridPoint]) -> Iterator[list[Missing]]:
    """Yield the missing stages that several points need, in rounds; a stage needs only those of earlier rounds."""
    shared = [missing for missing in missing_stages(todo) if len(missing.users) > 1]
    while shared:
        keys = {missing.stage.key for missing in shared}
        ready = [one for one in shared if not keys & {upstream.key for upstream in one.stage.all_upstream}]
        log.info("first building the stages that several points share: %s", ", ".join(one.stage.name for one in ready))
        yield ready
        shared = [missing for missing in shared if missing not in ready]


def _with_shared_stages(grid: Grid, launch: Launch, todo: list[GridPoint]) -> list[GridPoint]:
    """Build the missing stages that several points need, so that the points do not wait for each other.

    Returns:
        The points of ``todo`` whose shared stages exist. Points whose stage failed are recorded as failed. If a stage
        was stopped, or could not be launched, the same sweep tries its points again.
    """
    for ready in shared_rounds(todo):
        ready = [missing for missing in ready if {*missing.users} & {*todo}]
        builders = [grid.point([*missing.builder.overrides, f"stage={missing.stage.name}"]) for missing in ready]
        _launch(launch, [builder.overrides for builder in builders])
        for missing, builder in zip(ready, builders, strict=True):
            if not missing.builder.has(missing.stage):
                result = builder.result()
                for point in missing.users if result["status"] == "failed" else ():
                    point.fail(f"its {missing.stage.name} failed: {result.get('error')}")
                log.error("stage %s is %s; %d points need it", missing.stage.name, result["status"], len(missing.users))
                todo = [point for point in todo if point not in missing.users]
    return todo


# Points in Slurm's queue: ``sweep.wait=false`` submits them; the same command later reports and resumes the sweep


def submit_grid(grid: Grid, submit: Submit, retry_failed: bool) -> None:
    """Queue every point that is neither done nor queued nor running, after the stages that several points share.

    Each shared stage is a separate job. Points start when these jobs have ended. If such a job failed, each point tries
    to build the stage itself. Points that failed are skipped unless ``retry_failed``.
    """
    log.info("%s", grid)
    files = {point: point.folder / JOB for point in grid.points}
    recorded = {point: file.read_text(encoding="utf-8") for point, file in files.items() if file.is_file()}
    alive = queued_jobs() if recorded else set()
    todo = [
        point
        for point in grid.to_train(retry_failed)
        if recorded.get(point) not in alive and point.result()["status"] != "running"
    ]
    array = None
    for ready in shared_rounds(todo):
        builders = [[*missing.builder.overrides, f"stage={missing.stage.name}"] for missing in ready]
        array = ":".join(submit(part, array)[0].partition("_")[0] for part in in_arrays(builders))
    for part in in_arrays(todo):
        for point, job in zip(part, submit([point.overrides for point in part], array), strict=True):
            if point.result()["status"] == "not run":  # the status of a paused or killed point says more
                status.write_status(point.folder, "queued", point.names)
            files[point].write_text(job, encoding="utf-8")
    if todo:
        log.info("queued %d points; run the same command again to see their status", len(todo))


def queued_jobs() -> set[str]:
    """Return the ids of this user's waiting and running jobs, each job of an array separately.

    Raises:
        UserError: ``squeue`` is missing or fails.
    """
    try:
        command = ["squeue", "--me", "-h", "-r", "-o", "%i"]
        output = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        problem = f"squeue fails: {getattr(error, 'stderr', None) or error}"
        raise UserError("sweep.wait", False, problem, "Run it on a machine with Slurm's commands.") from error
    return set(output.split())


def submitter(launcher: Any, common: Sequence[str]) -> Submit:
    """Return a function that queues jobs as submitit's Slurm launcher does, but does not wait for them.

    Args:
        launcher: Hydra's launcher, which each job calls.
        common: overrides that are added to every job.
    Raises:
        UserError: ``launcher`` is not the Slurm launcher.
    """
    if type(launcher).__name__ != SLURM_LAUNCHER:
        remedy = "Take " + override("hydra/launcher", "submitit_slurm") + ", or leave out sweep.wait."
        raise UserError("sweep.wait", False, "needs Slurm's queue", remedy)
    import submitit
    from hydra.core.singleton import Singleton
    from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf

    def submit(jobs: Sequence[Sequence[str]], dependency: str | None) -> list[str]:
        settings = {key: value for key, value in launcher.params.items() if value is not None}
        folder, retries = settings.pop("submitit_folder"), settings.pop("max_num_timeout")
        if dependency:
            extra = settings.get("additional_parameters", {})
            settings["additional_parameters"] = {**extra, "dependency": f"afterany:{dependency}"}
        executor = submitit.AutoExecutor(cluster="slurm", folder=folder, slurm_max_num_timeout=retries)
        shared = BaseQueueConf.__dataclass_fields__
        executor.update_parameters(**{key if key in shared else f"slurm_{key}": settings[key] for key in settings})
        number = range(len(jobs))
        places, ids = ["hydra.sweep.dir"] * len(jobs), [f"job_id_for_{index}" for index in number]
        state = [Singleton.get_state()] * len(jobs)
        queued = executor.map_array(launcher, [[*job, *common] for job in jobs], places, number, ids, state)
        return [job.job_id for job in queued]

    return submit


def in_arrays(jobs: Sequence[Item]) -> list[Sequence[Item]]:
    """Return ``jobs`` in parts that Slurm takes as arrays."""
    return [jobs[start : start + ARRAY_SIZE] for start in range(0, len(jobs), ARRAY_SIZE)]


# The end of a sweep


def sweep_folder(root: Path, name: str, points: Sequence[GridPoint]) -> Path:
    """Return the folder of a sweep's tables; equal points give the same folder."""
    digest = hashlib.sha256("".join(point.key for point in points).encode()).hexdigest()[:8]
    return root / f"{name.replace('/', '-')}-{digest}"


def finish(grid: Grid, folder: Path, name: str, halving: int | None, waited: bool = True) -> int:
    """Print and save the table of all points.

    Args:
        waited: whether the sweep waited for its points.
    Returns:
        Exit code: 1 if a point failed or, with ``waited``, if a point is neither done nor paused; else 0.
    """
    results = [point.result() for point in grid.points]
    entries = [{"key": point.key, "folder": str(point.folder), "overrides": point.overrides} for point in grid.points]
    status.write_json(folder / "sweep.json", {"name": name, "points": entries})
    pictures = write_pictures(results, folder)
    text = write_report(results, folder, name, pictures)
    print(text)
    for cell in by_cell(grid.points) if halving else []:
        print(f"\n{halving_report(cell, halving or 1)}")
    if run := next((point.run for point in grid.points if point.run), None):
        track_sweep(run.tracker, folder, folder.name, [without_specs(result) for result in results], text, pictures)
    log.info("tables: %s", folder)
    states = {result["status"] for result in results}
    return int(bool(states - {"done", "paused"}) if waited else "failed" in states)
