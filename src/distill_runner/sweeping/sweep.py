"""A sweep from its points to its table, whatever happens on the way."""

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
from distill_runner.sweeping.halving import by_cell, halve, halving_report
from distill_runner.sweeping.points import Grid, GridPoint
from distill_runner.tracking import track_sweep

log = logging.getLogger(__name__)

Launch = Callable[[Sequence[Sequence[str]]], Sequence[JobReturn]]
"""Runs one job for each list of overrides, and comes back when all have ended."""


def run_grid(grid: Grid, launch: Launch, workers: int, retry_failed: bool, halving: int | None) -> None:
    """Bring every point to its end that is not there yet, what several of them share first.

    Points that are done are left alone, and so are those that failed, unless ``retry_failed``.

    Args:
        workers: points that run at once on this machine.
        halving: the share of points, 1 / halving, that is kept at each rung; None keeps all.
    Raises:
        UserError: no point is to be trained.
    """
    if any(point.run and point.run.runtime.targets_only for point in grid.points):
        problem = "trains no point, and a sweep is there to train them"
        raise UserError("runtime.targets_only", True, problem, "Leave it out, or run a point alone with it before.")
    log.info("%s", summary(grid))
    todo = _with_shared_stages(grid, launch, to_train(grid, retry_failed))
    if workers > 1:
        _fill_shared_targets(launch, todo, workers)
    if halving:
        todo = halve(by_cell(grid.points).values(), todo, partial(_launch, launch), halving)
    _launch(launch, [point.overrides for point in todo])


def require_points(grid: Grid) -> None:
    """See to it that there is a point, and that one can run.

    Raises:
        UserError: there is none, or what keeps the first one from running.
    """
    if not grid.points:
        problem = "drops every point" if grid.dropped else "has no point"
        remedy = f"It dropped {len(grid.dropped)}." if grid.dropped else "Give values: distill-run -m seed=1,2"
        raise UserError("sweep.where" if grid.dropped else "sweep", None, problem, remedy)
    if all(point.error for point in grid.points):
        raise grid.points[0].error or AssertionError


def _launch(launch: Launch, jobs: Sequence[Sequence[str]]) -> None:
    """Points tell by themselves what became of them; what keeps a launcher from starting them is told here."""
    try:
        for job in launch(jobs) if jobs else []:
            _ = job.return_value  # raises what the job did
    except UserError:
        raise
    except Exception:
        log.exception("the launcher has given up")


def to_train(grid: Grid, retry_failed: bool) -> list[GridPoint]:
    """The points that have not come to their end; those that cannot run are told, and have failed."""
    todo = [point for point in grid.points if not _has_ended(point, retry_failed)]
    for point in todo:
        if point.error:
            log.error("%s", point.error)
            point.fail(str(point.error))
    return [point for point in todo if not point.error]


def _has_ended(point: GridPoint, retry_failed: bool) -> bool:
    ended = point.result()["status"]
    return ended == "done" or (ended == "failed" and not retry_failed)


def _with_shared_stages(grid: Grid, launch: Launch, todo: list[GridPoint]) -> list[GridPoint]:
    """Build what several points need and is not there, so that they do not wait for each other.

    What others of it need is built before, in a round of its own.

    Returns:
        the points that have what they need; the others have failed.
    """
    while shared := [missing for missing in missing_stages(todo) if len(missing.users) > 1]:
        ready = ready_of(shared)
        log.info("first what several points share: %s", ", ".join(missing.stage.name for missing in ready))
        builders = [grid.point([*missing.builder.overrides, f"stage={missing.stage.name}"]) for missing in ready]
        _launch(launch, [builder.overrides for builder in builders])
        for missing, builder in zip(ready, builders, strict=True):
            if not is_built(missing.builder, missing.stage):
                for point in missing.users:
                    point.fail(f"its {missing.stage.name} failed: {builder.result().get('error')}")
                todo = [point for point in todo if point not in missing.users]
    return todo


def ready_of(missing: Sequence["Missing"]) -> list["Missing"]:
    """Those that need none of the others."""
    keys = {found.stage.key for found in missing}
    return [found for found in missing if not keys & {stage.key for stage in _all_before(found.stage)}]


def _fill_shared_targets(launch: Launch, points: Sequence[GridPoint], workers: int) -> None:
    """Cache the teachers' outputs that several points read, on the threads of workers that would wait for them.

    They are the same on any number of threads, bit for bit; what is trained is not.
    """
    readers: dict[str, list[GridPoint]] = {}
    for point in points:
        if point.stage is not None and point.run is not None:
            for _, missing in fillable(point.stage, Store(point.run.store.dir), point.run.runtime.targets):
                for spec in missing:
                    readers.setdefault(key_of(spec), []).append(point)
    fillers = list(dict.fromkeys(reading[0] for reading in readers.values() if len(reading) > 1))
    if fillers:
        log.info("first the teachers' outputs that several points read")
    jobs, cpus = [], os.cpu_count() or 1
    for point in fillers:
        assert point.run is not None
        own = point.run.runtime.threads or max(1, cpus // workers)
        threads = min(cpus, own * max(1, workers // len(fillers)))
        jobs.append([*point.overrides, "runtime.targets_only=true", f"runtime.threads={threads}"])
    _launch(launch, jobs)


@dataclass
class Missing:
    """A stage that is not in the store.

    Attributes:
        builder: the point that builds it for all: one that keeps its checkpoints, if any does.
        users: the points that need it.
    """

    stage: Stage
    builder: GridPoint
    users: list[GridPoint] = field(default_factory=list)


def missing_stages(points: Sequence[GridPoint]) -> list[Missing]:
    """What is before the points and not there, each stage behind those that it needs itself."""
    found: dict[str, Missing] = {}
    for point in points:
        for stage in _missing_before(point, point.stage) if point.stage else []:
            missing = found.setdefault(stage.key, Missing(stage, point))
            missing.users.append(point)
            if stage.config.keep_checkpoints and not missing.stage.config.keep_checkpoints:
                missing.stage, missing.builder = stage, point
    return list(found.values())


def _missing_before(point: GridPoint, stage: Stage) -> list[Stage]:
    """One that is there needs nothing more."""
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
    """How many points there are, and why not more."""
    ended = [point.result()["status"] for point in grid.points]
    notes = [f"{ended.count(status)} {status}" for status in dict.fromkeys(ended) if status != "not run"]
    notes += [f"{len(grid.merged)} more that mean the same as one of them"] if grid.merged else []
    notes += [f"{len(grid.dropped)} dropped by sweep.where"] if grid.dropped else []
    return f"{len(grid.points)} points" + (f" ({'; '.join(notes)})" if notes else "")


def sweep_folder(root: Path, name: str, points: Sequence[GridPoint]) -> Path:
    """Where a sweep's tables lie: the same for the same points."""
    digest = hashlib.sha256("".join(point.key for point in points).encode()).hexdigest()[:8]
    return root / f"{name.replace('/', '-')}-{digest}"


def finish(grid: Grid, folder: Path, name: str, halving: int | None, waited: bool = True) -> int:
    """Print and save the table of all points.

    Returns:
        the exit code: 1 if a point failed or, where they were waited for, has not come to its end.
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
