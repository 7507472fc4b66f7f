"""Runs a sweep from its points to its table, even if points fail."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn

from distill_runner.common.errors import UserError
from distill_runner.pipeline import status
from distill_runner.pipeline.planning import fillable
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store, key_of
from distill_runner.report.figures import write_pictures
from distill_runner.report.write import write_report
from distill_runner.sweeping.halving import by_cell, halve, halving_report, require_epochs
from distill_runner.sweeping.points import Grid, GridPoint
from distill_runner.tracking import track_sweep

log = logging.getLogger(__name__)

Launch = Callable[[Sequence[Sequence[str]]], Sequence[JobReturn]]
"""Runs one job for each list of overrides, and returns when all have ended."""


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
    todo = _with_shared_stages(grid, launch, to_train(grid, retry_failed))
    if workers != 1:
        _fill_shared_targets(launch, todo, workers)
    if halving:
        todo = halve(by_cell(grid.points).values(), todo, partial(_launch, launch), halving)
    _launch(launch, [point.overrides for point in todo])


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
    ended = point.result()["status"]
    return ended == "done" or (ended == "failed" and not retry_failed)


def _with_shared_stages(grid: Grid, launch: Launch, todo: list[GridPoint]) -> list[GridPoint]:
    """Build the missing stages that several points need, so that the points do not wait for each other.

    A stage that other missing stages need is built before them, in a separate round.

    Returns:
        The points of ``todo`` whose shared stages exist. Points whose stage failed are recorded as failed. If a stage
        was stopped, or could not be launched, the same sweep tries its points again.
    """
    while shared := [missing for missing in missing_stages(todo) if len(missing.users) > 1]:
        ready = ready_of(shared)
        log.info(
            "first building the stages that several points share: %s",
            ", ".join(missing.stage.name for missing in ready),
        )
        builders = [grid.point([*missing.builder.overrides, f"stage={missing.stage.name}"]) for missing in ready]
        _launch(launch, [builder.overrides for builder in builders])
        for missing, builder in zip(ready, builders, strict=True):
            if not is_built(missing.builder, missing.stage):
                ended = builder.result()
                for point in missing.users if ended["status"] == "failed" else ():
                    point.fail(f"its {missing.stage.name} failed: {ended.get('error')}")
                log.error("stage %s is %s; %d points need it", missing.stage.name, ended["status"], len(missing.users))
                todo = [point for point in todo if point not in missing.users]
    return todo


def ready_of(missing: Sequence["Missing"]) -> list["Missing"]:
    """Return the stages of ``missing`` that depend on no other stage of ``missing``."""
    keys = {found.stage.key for found in missing}
    return [found for found in missing if not keys & {stage.key for stage in _all_before(found.stage)}]


def _fill_shared_targets(launch: Launch, points: Sequence[GridPoint], workers: int | None) -> None:
    """Cache the teachers' outputs that several points read, before these points would all wait for them.

    On this machine this uses the threads of all workers; a job of a cluster keeps its own. Teacher outputs are equal
    bit for bit on any number of threads; trained weights are not.
    """
    readers: dict[str, list[GridPoint]] = {}
    for point in points:
        if point.stage is not None and point.run is not None:
            for _, missing in fillable(point.stage, Store(point.run.store.dir), point.run.runtime.targets):
                for spec in missing:
                    readers.setdefault(key_of(spec), []).append(point)
    fillers = list(dict.fromkeys(reading[0] for reading in readers.values() if len(reading) > 1))
    if fillers:
        log.info("first caching the teacher outputs that several points read")
    jobs, cpus = [[*point.overrides, "runtime.targets_only=true"] for point in fillers], os.cpu_count() or 1
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
    found: dict[str, Missing] = {}
    for point in points:
        for stage in _missing_before(point, point.stage) if point.stage else []:
            missing = found.setdefault(stage.key, Missing(stage, point))
            missing.users.append(point)
            if stage.config.keep_checkpoints and not missing.stage.config.keep_checkpoints:
                missing.stage, missing.builder = stage, point
    return list(found.values())


def _missing_before(point: GridPoint, stage: Stage) -> list[Stage]:
    """Return the missing stages that ``stage`` needs. The needs of a stage in the store are not followed."""
    found: dict[str, Stage] = {}
    for upstream in stage.upstream:
        if upstream.key not in found and not is_built(point, upstream):
            found |= {before.key: before for before in _missing_before(point, upstream)} | {upstream.key: upstream}
    return list(found.values())


def _all_before(stage: Stage) -> Iterator[Stage]:
    for upstream in stage.upstream:
        yield upstream
        yield from _all_before(upstream)


def is_built(point: GridPoint, stage: Stage) -> bool:
    assert point.run is not None
    return Store(point.run.store.dir).has(stage.spec)


def summary(grid: Grid) -> str:
    """Return the number of points as text, with the numbers by status, merged and dropped."""
    ended = [point.result()["status"] for point in grid.points]
    notes = [f"{ended.count(status)} {status}" for status in dict.fromkeys(ended) if status != "not run"]
    notes += [f"{len(grid.merged)} merged with an equal point"] if grid.merged else []
    notes += [f"{len(grid.dropped)} dropped by sweep.where"] if grid.dropped else []
    return f"{len(grid.points)} points" + (f" ({'; '.join(notes)})" if notes else "")


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
        track_sweep(run.tracker, folder, folder.name, results, text, pictures)
    log.info("tables: %s", folder)
    ended = {result["status"] for result in results}
    return int(bool(ended - {"done", "paused"}) if waited else "failed" in ended)


def _entry(point: GridPoint) -> Mapping[str, Any]:
    return {"key": point.key, "folder": str(point.folder), "overrides": list(point.overrides)}
