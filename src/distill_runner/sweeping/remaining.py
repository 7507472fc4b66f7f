"""What remains to be done for the points of a grid: points to train, and stages that are not in the store."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distill_runner.common.errors import quantity
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store
from distill_runner.sweeping.points import Grid, GridPoint

log = logging.getLogger(__name__)


def summary(grid: Grid) -> str:
    """Return the number of points as text, with the numbers by status, merged and dropped."""
    states = [point.status for point in grid.points]
    notes = [f"{states.count(state)} {state}" for state in dict.fromkeys(states) if state != "not run"]
    notes += [f"{len(grid.merged)} merged with an equal point"] if grid.merged else []
    notes += [f"{len(grid.dropped)} dropped by sweep.where"] if grid.dropped else []
    return quantity(len(grid.points), "point") + (f" ({'; '.join(notes)})" if notes else "")


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
    state = point.status
    return state == "done" or (state == "failed" and not retry_failed)


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
    lookups: dict[tuple[Path, str], bool] = {}
    for point in points:
        for stage in _missing_upstream(point, point.stage, lookups) if point.stage else []:
            missing = by_key.setdefault(stage.key, Missing(stage, point))
            missing.users.append(point)
            if stage.config.keep_checkpoints and not missing.stage.config.keep_checkpoints:
                missing.stage, missing.builder = stage, point
    return list(by_key.values())


def _missing_upstream(point: GridPoint, stage: Stage, lookups: dict[tuple[Path, str], bool]) -> list[Stage]:
    """Return the missing stages that ``stage`` needs. The needs of a stage in the store are not followed.

    Args:
        lookups: whether a stage is in the store, by store and key, so that each is looked for once.
    """
    assert point.run is not None
    stages: dict[str, Stage] = {}
    for upstream in stage.upstream:
        name = (point.run.store.dir, upstream.key)
        if name not in lookups:
            lookups[name] = is_built(point, upstream)
        if not lookups[name] and upstream.key not in stages:
            needs = _missing_upstream(point, upstream, lookups)
            stages |= {missing.key: missing for missing in [*needs, upstream]}
    return list(stages.values())


def is_built(point: GridPoint, stage: Stage) -> bool:
    assert point.run is not None
    return Store(point.run.store.dir).has(stage.spec)


def ready_of(missing: Sequence[Missing]) -> list[Missing]:
    """Return the stages of ``missing`` that depend on no other stage of ``missing``."""
    keys = {one.stage.key for one in missing}
    return [one for one in missing if not keys & {upstream.key for upstream in one.stage.all_upstream}]


def log_shared(stages: Sequence[Missing]) -> None:
    names = ", ".join(missing.stage.name for missing in stages)
    log.info("first building the stages that several points share: %s", names)
