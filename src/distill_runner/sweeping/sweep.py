"""Runs a sweep from its points to its table, even if points fail."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn

from distill_runner.common.errors import UserError
from distill_runner.pipeline import status
from distill_runner.pipeline.planning import missing_caches, needed_specs
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store, key_of
from distill_runner.report.collect import without_specs
from distill_runner.report.figures import write_pictures
from distill_runner.report.formats import write_report
from distill_runner.sweeping.halving import by_cell, halve, halving_report, require_epochs
from distill_runner.sweeping.points import Grid, GridPoint
from distill_runner.sweeping.remaining import is_built, log_shared, missing_stages, ready_of, summary, to_train
from distill_runner.tracking import track_sweep
from distill_runner.training.devices import available_cpus

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
    with _protected(grid.points):
        todo = _with_shared_stages(grid, launch, to_train(grid, retry_failed))
        if workers != 1:
            _fill_shared_targets(launch, todo, workers)
        if halving:
            todo = halve(by_cell(grid.points).values(), todo, partial(_launch, launch), halving)
        _launch(launch, [point.overrides for point in todo])


@contextmanager
def _protected(points: Sequence[GridPoint]) -> Iterator[None]:
    """Protect what points start from, such as their teachers, from deletion, also between two points."""
    stores: dict[Path, dict[str, Stage]] = {}
    for point in points:
        if point.run is not None and point.stage is not None:
            stages = {stage.key: stage for stage in point.stage.all_upstream}
            stores.setdefault(point.run.store.dir, {}).update(stages)
    with ExitStack() as stack:
        for folder, stages in stores.items():
            store = Store(folder)
            stack.enter_context(store.protected())
            for stage in stages.values():
                store.protect(*needed_specs(stage))
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


def _with_shared_stages(grid: Grid, launch: Launch, todo: list[GridPoint]) -> list[GridPoint]:
    """Build the missing stages that several points need, so that the points do not wait for each other.

    A stage that other missing stages need is built before them, in a separate round.

    Returns:
        The points of ``todo`` whose shared stages exist. Points whose stage failed are recorded as failed. If a stage
        was stopped, or could not be launched, the same sweep tries its points again.
    """
    while shared := [missing for missing in missing_stages(todo) if len(missing.users) > 1]:
        ready = ready_of(shared)
        log_shared(ready)
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
