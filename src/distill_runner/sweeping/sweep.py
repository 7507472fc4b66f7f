"""Runs a sweep from its points to its table, even if points fail.

With ``sweep.wait=false`` the points are queued with Slurm; the same command later reports and resumes the sweep.
"""

import hashlib
import json
import logging
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.utils import JobReturn

from distill_runner.common.errors import UserError, quantity
from distill_runner.pipeline import status
from distill_runner.pipeline.planning import artifact_keys, missing_caches
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store, key_of
from distill_runner.report.collect import without_specs
from distill_runner.report.figures import write_pictures
from distill_runner.report.formats import write_report
from distill_runner.sweeping.halving import by_cell, halve, halving_report, require_epochs
from distill_runner.sweeping.points import Grid, GridPoint
from distill_runner.tracking import track_sweep
from distill_runner.training.devices import available_cpus

log = logging.getLogger(__name__)

Launch = Callable[[Sequence[Sequence[str]]], Sequence[JobReturn]]
"""Runs one job for each list of overrides, and returns when all have ended."""
Submit = Callable[[Sequence[Sequence[str]], str | None], Sequence[str]]
"""Queues an array with a job for each list of overrides, to start after the arrays that are named, if any (``1:2``);
returns the job ids."""
Job = TypeVar("Job")
DEFAULT_ARRAY_SIZE = 1001
JOBS = "jobs.json"
"""File of a sweep that is queued with Slurm: the job of each point."""


def run_grid(grid: Grid, launch: Launch, workers: int | None, retry_failed: bool, halving: int | None) -> None:
    """Build what several points share, then train every point that is not done.

    Points that failed are skipped unless ``retry_failed``.

    Args:
        workers: number of points that run at once on this machine; None if they run as jobs of a cluster.
        halving: fraction of the points, 1 / halving, that is kept at each rung; None keeps all.
    Raises:
        UserError: a point has ``runtime.targets_only``, which trains nothing, or no epochs to halve.
    """
    if any(point.run and point.run.runtime.targets_only for point in grid.points):
        problem = "caches outputs without training, but a sweep trains its points"
        raise UserError("runtime.targets_only", True, problem, "Leave it out, or first run a single point with it.")
    log.info("%s", summary(grid))
    if halving:
        require_epochs(grid.points)
    with _protected(grid.points):
        todo = _with_shared_stages(grid, launch, to_train(grid, retry_failed))
        if workers != 1:
            _fill_shared_targets(launch, todo, workers)
        if halving:
            todo = halve(by_cell(grid.points).values(), todo, partial(_launch, launch), halving)
        _launch(launch, [point.overrides for point in todo])


@contextmanager
def _protected(points: Sequence[GridPoint]) -> Iterator[None]:
    """Protect the stages that points need from deletion, also between two points."""
    keys: dict[Path, dict[str, None]] = {}
    for point in points:
        if point.run is not None and point.stage is not None:
            keys.setdefault(point.run.store.dir, {}).update(dict.fromkeys(artifact_keys(point.stage)))
    with ExitStack() as stack:
        for folder, keys_of_store in keys.items():
            store = Store(folder)
            user = f"a sweep of {quantity(len(points), 'point')} in {points[0].folder.parent}"
            stack.enter_context(store.protected(user))
            store.hold(keys_of_store)
        yield


def require_points(grid: Grid) -> None:
    """Check that the grid has a point, and that at least one point can run.

    Raises:
        UserError: the grid has no point. If no point can run, the error of the first point is raised.
    """
    if not grid.points:
        problem = "drops every point" if grid.dropped else "has no point"
        remedy = f"Points dropped: {len(grid.dropped)}." if grid.dropped else "Give values: distill-run -m seed=1,2"
        raise UserError("sweep.where" if grid.dropped else "sweep", None, problem, remedy)
    if all(point.error for point in grid.points):
        raise grid.points[0].error or AssertionError


def _launch(launch: Launch, jobs: Sequence[Sequence[str]]) -> None:
    """Run jobs. Points record their own errors; an error of the launcher itself is logged here."""
    try:
        for job in launch(jobs) if jobs else []:
            _ = job.return_value  # raises the exception of the job
    except UserError:
        raise
    except Exception:
        log.exception("the launcher failed")


def to_train(grid: Grid, retry_failed: bool) -> list[GridPoint]:
    """Return the points that are still to be trained. Points that cannot run are logged and recorded as failed."""
    todo = [point for point in grid.points if not has_ended(point, retry_failed)]
    for point in todo:
        if point.error:
            log.error("%s", point.error)
            point.fail(str(point.error))
    return [point for point in todo if not point.error]


def has_ended(point: GridPoint, retry_failed: bool) -> bool:
    """Return whether a sweep has nothing to train for the point: it is done, or it failed and is not to be retried."""
    state = point.result()["status"]
    return state == "done" or (state == "failed" and not retry_failed)


def _with_shared_stages(grid: Grid, launch: Launch, todo: list[GridPoint]) -> list[GridPoint]:
    """Build the missing stages that several points need, so that the points do not wait for each other.

    A stage that other missing stages need is built before them, in a separate round.

    Returns:
        The points of ``todo`` whose shared stages exist. Points whose stage failed are recorded as failed. If a stage
        was stopped, or could not be launched, the same sweep tries its points again.
    """
    while shared := [missing for missing in missing_stages(todo) if len(missing.users) > 1]:
        ready = ready_of(shared)
        _log_shared(ready)
        builders = [grid.point([*missing.builder.overrides, f"stage={missing.stage.name}"]) for missing in ready]
        _launch(launch, [builder.overrides for builder in builders])
        for missing, builder in zip(ready, builders, strict=True):
            if not is_built(missing.builder, missing.stage):
                result = builder.result()
                for point in missing.users if result["status"] == "failed" else ():
                    point.fail(f"its {missing.stage.name} failed: {result.get('error')}")
                log.error("stage %s is %s; %d points need it", missing.stage.name, result["status"], len(missing.users))
                todo = [point for point in todo if point not in missing.users]
    return todo


def _log_shared(stages: Sequence["Missing"]) -> None:
    names = ", ".join(missing.stage.name for missing in stages)
    log.info("first building the stages that several points share: %s", names)


def ready_of(missing: Sequence["Missing"]) -> list["Missing"]:
    """Return the stages of ``missing`` that depend on no other stage of ``missing``."""
    keys = {one.stage.key for one in missing}
    return [one for one in missing if not keys & {upstream.key for upstream in one.stage.all_upstream}]


def _fill_shared_targets(launch: Launch, points: Sequence[GridPoint], workers: int | None) -> None:
    """Cache the teachers' outputs that several points read, before these points would all wait for them.

    On this machine this uses the threads of all workers; a job of a cluster keeps its own. Teacher outputs are equal
    bit for bit on any number of threads; trained weights are not.
    """
    readers: dict[str, list[GridPoint]] = {}
    for point in points:
        if point.stage is not None and point.run is not None:
            for _, missing in missing_caches(point.stage, Store(point.run.store.dir), point.run.runtime.targets):
                for spec in missing:
                    readers.setdefault(key_of(spec), []).append(point)
    fillers = list(dict.fromkeys(points[0] for points in readers.values() if len(points) > 1))
    if fillers:
        log.info("first caching the teacher outputs that several points read")
    jobs, cpus = [[*point.overrides, "runtime.targets_only=true"] for point in fillers], available_cpus()
    for point, job in zip(fillers, jobs, strict=True):
        if workers is not None and point.run is not None:
            own = point.run.runtime.threads or max(1, cpus // workers)
            job.append(f"runtime.threads={min(cpus, own * max(1, workers // len(fillers)))}")
    _launch(launch, jobs)


@dataclass
class Missing:
    """A stage that is not in the store.

    Attributes:
        builder: point that builds the stage for all users; one that keeps the stage's checkpoints, if any does.
        users: points that need the stage.
    """

    stage: Stage
    builder: GridPoint
    users: list[GridPoint] = field(default_factory=list)


def missing_stages(points: Sequence[GridPoint]) -> list[Missing]:
    """Return the missing stages that ``points`` need, each after the missing stages that it needs itself."""
    by_key: dict[str, Missing] = {}
    for point in points:
        for stage in _missing_upstream(point, point.stage) if point.stage else []:
            missing = by_key.setdefault(stage.key, Missing(stage, point))
            missing.users.append(point)
            if stage.config.keep_checkpoints and not missing.stage.config.keep_checkpoints:
                missing.stage, missing.builder = stage, point
    return list(by_key.values())


def _missing_upstream(point: GridPoint, stage: Stage) -> list[Stage]:
    """Return the missing stages that ``stage`` needs. The needs of a stage in the store are not followed."""
    stages: dict[str, Stage] = {}
    for upstream in stage.upstream:
        if upstream.key not in stages and not is_built(point, upstream):
            stages |= {missing.key: missing for missing in (*_missing_upstream(point, upstream), upstream)}
    return list(stages.values())


def is_built(point: GridPoint, stage: Stage) -> bool:
    assert point.run is not None
    return Store(point.run.store.dir).has(stage.spec)


def summary(grid: Grid) -> str:
    """Return the number of points as text, with the numbers by status, merged and dropped."""
    states = [point.result()["status"] for point in grid.points]
    notes = [f"{states.count(state)} {state}" for state in dict.fromkeys(states) if state != "not run"]
    notes += [f"{len(grid.merged)} merged with an equal point"] if grid.merged else []
    notes += [f"{len(grid.dropped)} dropped by sweep.where"] if grid.dropped else []
    return quantity(len(grid.points), "point") + (f" ({'; '.join(notes)})" if notes else "")


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
    status.write_json(folder / "sweep.json", {"name": name, "points": [_entry(point) for point in grid.points]})
    pictures = write_pictures(results, folder)
    text = write_report(results, folder, name, pictures)
    print(text)
    for cell in by_cell(grid.points).values() if halving else []:
        print(f"\n{halving_report(cell, halving or 1)}")
    if run := next((point.run for point in grid.points if point.run), None):
        track_sweep(run.tracker, folder, folder.name, [without_specs(result) for result in results], text, pictures)
    log.info("tables: %s", folder)
    states = {result["status"] for result in results}
    return int(bool(states - {"done", "paused"}) if waited else "failed" in states)


def _entry(point: GridPoint) -> Mapping[str, Any]:
    return {"key": point.key, "folder": str(point.folder), "overrides": list(point.overrides)}


def submit_grid(grid: Grid, submit: Submit, folder: Path, retry_failed: bool) -> None:
    """Queue every point that is neither done nor queued nor running, after the stages that several points share.

    Each shared stage is a separate job. Points start when these jobs have ended. If such a job failed, each point tries
    to build the stage itself. Points that failed are skipped unless ``retry_failed``.

    Args:
        folder: folder of the sweep; its file ``jobs.json`` names the job of each point.
    """
    log.info("%s", summary(grid))
    recorded: dict[str, str] = (
        json.loads((folder / JOBS).read_text(encoding="utf-8")) if (folder / JOBS).exists() else {}
    )
    # The status of a point also names its job where another sweep, such as a smaller grid, has queued it.
    jobs_of = {point.key: {recorded.get(point.key), point.result().get("job")} for point in grid.points}
    alive = queued_jobs() if any(any(jobs) for jobs in jobs_of.values()) else set()
    todo = [
        point
        for point in to_train(grid, retry_failed)
        if not jobs_of[point.key] & alive and point.result()["status"] != "running"
    ]
    array = None
    shared = [missing for missing in missing_stages(todo) if len(missing.users) > 1]
    while shared:
        ready = ready_of(shared)
        _log_shared(ready)
        builders = [[*missing.builder.overrides, f"stage={missing.stage.name}"] for missing in ready]
        array = ":".join(submit(part, array)[0].partition("_")[0] for part in in_arrays(builders))
        shared = [missing for missing in shared if missing not in ready]
    for part in in_arrays(todo):
        jobs = submit([point.overrides for point in part], array)
        for point, job in zip(part, jobs, strict=True):
            _queue(point, job)
        recorded |= {point.key: job for point, job in zip(part, jobs, strict=True)}
        status.write_json(folder / JOBS, recorded)  # now, since Slurm may refuse the next array
    if todo:
        log.info("queued %d points; run the same command again to see their status", len(todo))


def queued_jobs() -> set[str]:
    """Return the ids of this user's waiting and running jobs, each job of an array separately.

    Raises:
        UserError: ``squeue`` is missing or fails.
    """
    try:
        output = subprocess.run(
            ["squeue", "--me", "-h", "-r", "-o", "%i"], capture_output=True, text=True, encoding="utf-8", check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or error
        raise UserError(
            "sweep.wait", False, f"squeue fails: {why}", "Run it on a machine with Slurm's commands."
        ) from error
    return set(output.stdout.split())


def submitter(launcher: Any, common: Sequence[str]) -> Submit:
    """Return a function that queues jobs as submitit's Slurm launcher does, but does not wait for them.

    Args:
        launcher: Hydra's launcher, which each job calls.
        common: overrides that are added to every job.
    Raises:
        UserError: ``launcher`` is not the Slurm launcher.
    """
    if getattr(launcher, "_EXECUTOR", None) != "slurm":
        remedy = "Take hydra/launcher=submitit_slurm, or leave out sweep.wait."
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


def _queue(point: GridPoint, job: str) -> None:
    if point.result()["status"] == "not run":  # the status of a paused or killed point says more
        status.write_status(point.folder, "queued", {**point.names, "job": job})


def in_arrays(jobs: Sequence[Job]) -> list[Sequence[Job]]:
    """Return ``jobs`` in parts that Slurm takes as arrays."""
    size = max_array_size()
    return [jobs[start : start + size] for start in range(0, len(jobs), size)]


def max_array_size() -> int:
    """Return how many jobs an array can have: Slurm's ``MaxArraySize``, or its default if Slurm does not say."""
    try:
        command = ["scontrol", "show", "config"]
        output = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        output = ""
    size = re.search(r"^MaxArraySize\s*=\s*(\d+)", output, re.MULTILINE)
    return int(size[1]) if size and int(size[1]) else DEFAULT_ARRAY_SIZE
