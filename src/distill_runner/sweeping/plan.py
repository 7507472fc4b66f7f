"""``plan=true`` of a sweep: its points, what is there and what is to be built, and what that will cost."""

from collections import Counter
from collections.abc import Sequence
from shutil import disk_usage

from distill_runner.common.terminal import duration
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.store import Store
from distill_runner.sweeping.estimate import Cost, Estimator
from distill_runner.sweeping.points import Grid, GridPoint
from distill_runner.sweeping.sweep import missing_stages, summary

SHOWN = 20
"""Lines of a long list."""


def show_plan(grid: Grid, num_workers: int) -> None:
    """Print it.

    Args:
        num_workers: that take points at the same time.
    """
    points, every = grid.points, [*(point.overrides for point in grid.points), *grid.dropped]
    times = Counter(override for overrides in every for override in set(overrides))
    varying = {override for override, count in times.items() if count < len(every)}

    def named(overrides: Sequence[str]) -> str:
        return " ".join(override for override in overrides if override in varying) or "the only point"

    print(summary(grid))
    _show("", [f"  {point.result()['status']:8} {named(point.overrides)}" for point in points])
    _show("dropped by sweep.where:", [f"  {named(overrides)}" for overrides in grid.dropped])
    same = [f"  {named(point.overrides)}  =  {named(first.overrides)}" for point, first in grid.merged]
    _show("the same as another point:", same)
    todo = [point for point in points if point.stage and point.result()["status"] not in ("done", "failed")]
    if todo:
        _show_cost(todo, num_workers)


def _show(head: str, lines: Sequence[str]) -> None:
    if lines:
        more = [f"  ... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        print("\n".join([*filter(None, [head]), *lines[:SHOWN], *more]))


def _show_cost(todo: Sequence[GridPoint], num_workers: int) -> None:
    run = todo[0].run
    assert run is not None
    pipeline = Pipeline(Store(run.store.dir), run.runtime)
    estimator = Estimator(pipeline)
    costs: dict[str, list[Cost]] = {}
    print("to build:")
    for stage in (missing.stage for missing in missing_stages(todo)):
        cost = estimator.cost(stage)
        costs.setdefault(stage.name, []).append(cost)
        print(f"  {stage.name:8} {stage.key}  {duration(cost.seconds)}  {stage.describe()}")
    students = [estimator.cost(point.stage) for point in todo if point.stage]
    print(f"  student  of {len(todo)} points, {duration(_seconds(students) / len(todo))} each")
    rounds = [*costs.values(), students]  # each waits for the one before
    num_bytes = sum(cost.bytes for built in rounds for cost in built)
    free = disk_usage(pipeline.store.folder).free
    print(f"disk: {num_bytes / 1e9:.1f} GB of {free / 1e9:.0f} GB that are free")
    alone, shared = (sum(_seconds(built, workers) for built in rounds) for workers in (1, num_workers))
    print(f"time: {duration(alone)} of one worker, {duration(shared)} of {num_workers}")


def _seconds(costs: Sequence[Cost], num_workers: int = 1) -> float:
    return sum(cost.seconds for cost in costs) / max(1, min(num_workers, len(costs)))
