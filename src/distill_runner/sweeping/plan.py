"""``plan=true``: print what a run or a sweep would build, and the time and disk space that this would take."""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from shutil import disk_usage

import torch

from distill_runner.common.terminal import duration
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.planning import describe, missing
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store
from distill_runner.sweeping.estimate import Cost, Estimator
from distill_runner.sweeping.points import Grid, GridPoint
from distill_runner.sweeping.sweep import has_ended, is_built, missing_stages, summary
from distill_runner.training.config import Runtime

log = logging.getLogger(__name__)

SHOWN = 20
"""Maximum number of lines printed of a list."""


def show_plan(grid: Grid, num_workers: int, retry_failed: bool) -> None:
    """Print the points of a grid with their status, the stages to build, and their cost.

    Args:
        num_workers: number of points that run at the same time.
        retry_failed: whether points that failed are trained again.
    """
    points, every = grid.points, [*(point.overrides for point in grid.points), *grid.dropped]
    times = Counter(override for overrides in every for override in set(overrides))
    varying = {override for override, count in times.items() if count < len(every)}

    def named(overrides: Sequence[str]) -> str:
        return " ".join(override for override in overrides if override in varying) or "the only point"

    print(summary(grid))
    possible = [point for point in points if point.error is None]
    _show("", [f"  {point.result()['status']:8} {named(point.overrides)}" for point in possible])
    refused = [f"  {named(point.overrides)}\n    {point.error}" for point in points if point.error is not None]
    _show("cannot run, the others can:" if possible else "cannot run:", refused)
    _show("dropped by sweep.where:", [f"  {named(overrides)}" for overrides in grid.dropped])
    same = [f"  {named(point.overrides)}  =  {named(first.overrides)}" for point, first in grid.merged]
    _show("the same as another point:", same)
    todo = [point for point in points if point.stage and not has_ended(point, retry_failed)]
    if todo:
        _show_cost(todo, num_workers)


def cost_of_run(stage: Stage, store: Path, runtime: Runtime) -> str:
    """Return the estimated time and disk space of a single run, as one line of text.

    The estimate is measured on the first GPU even if other processes use it: a plan does not wait for a free GPU.
    """
    device = "cuda:0" if runtime.device in ("auto", "cuda") and torch.cuda.is_available() else runtime.device
    pipeline = Pipeline(Store(store), runtime.model_copy(update={"device": device, "num_processes": 1}))
    stages = missing(stage, pipeline.store)
    for part in stages:
        if part.data.is_corpus and not pipeline.store.has(part.data.split_spec("train")):
            return f"time: unknown until the text of stage {part.name} is tokenised, which a plan does not do"
    estimator = Estimator(pipeline)
    log.info("measuring a few updates of each stage on %s", pipeline.device.torch)
    costs = {part.name: estimator.cost(part) for part in stages}
    parts = ", ".join(f"{name} {duration(cost.seconds)}" for name, cost in costs.items()) or "nothing to build"
    whole = [*costs.values()]
    return f"time: {duration(_seconds(whole))} ({parts}); {_disk(whole, pipeline)}"


def _disk(costs: Sequence[Cost], pipeline: Pipeline) -> str:
    free = disk_usage(pipeline.store.folder).free
    return f"disk: {sum(cost.bytes for cost in costs) / 1e9:.1f} GB needed, {free / 1e9:.0f} GB free"


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
    for stage in (before.stage for before in missing_stages(todo)):
        cost = estimator.cost(stage)
        costs.setdefault(stage.name, []).append(cost)
        print(f"  {stage.name:8} {stage.key}  {duration(cost.seconds)}  {describe(stage)}")
    left = [point.stage for point in todo if point.stage and not is_built(point, point.stage)]
    students, stored = [estimator.cost(stage) for stage in left], len(todo) - len(left)
    each = f", {duration(_seconds(students) / len(left))} each" if left else ""
    print(f"  student  {len(left)} points{each}" + (f"; {stored} more are in the store" if stored else ""))
    rounds = [*costs.values(), students]  # each round waits for the previous one
    print(_disk([cost for built in rounds for cost in built], pipeline))
    alone, shared = (sum(_seconds(built, workers) for built in rounds) for workers in (1, num_workers))
    print(f"time: {duration(alone)} with one worker, {duration(shared)} with {num_workers} workers")


def _seconds(costs: Sequence[Cost], num_workers: int = 1) -> float:
    return sum(cost.seconds for cost in costs) / max(1, min(num_workers, len(costs)))
