"""``plan=true``: what a run or a sweep would build, and the time and disk space that this would take.

The time of a stage is that of such a stage in the store, which differs in seeds and numbers such as a learning rate. If
there is none, it is estimated from a few updates of one stage: time is proportional to tokens and to the matrices that
they are multiplied with. On a CPU, measured seconds are CPU time, so that other processes do not change the estimate.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from shutil import disk_usage
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from distill_runner.common.errors import quantity
from distill_runner.common.terminal import duration, rounded, show
from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import Progress
from distill_runner.models.build import build
from distill_runner.models.features import FeatureRequest, Features
from distill_runner.pipeline.build import Pipeline, no_log, training_conditions
from distill_runner.pipeline.planning import position_warnings, stage_summary, stages_to_build
from distill_runner.pipeline.stages import METRICS_FILE, Stage
from distill_runner.pipeline.store import Store, key_of
from distill_runner.pipeline.targets import cache_bytes, cache_decision, cached_share, targets_spec
from distill_runner.sweeping.points import Grid, GridPoint
from distill_runner.sweeping.sweep import missing_stages
from distill_runner.training.config import Runtime
from distill_runner.training.teachers import LiveTargets, NoTeacher, TeacherTargets
from distill_runner.training.train import Training

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

MAX_LINES = 20
"""Maximum number of lines printed of a list."""
SECONDS = 4.0
"""Seconds after which the measurement ends, besides the update in progress."""
UPDATES = 8
"""Maximum number of measured updates, after one that only warms up."""
START_SECONDS = 2.0
"""Seconds of a run outside its training: loading the model, the first batches, writing the result."""
FORWARD = 1 / 3
"""Part of the time of an update that a forward pass alone takes."""


def show_plan(grid: Grid, num_workers: int, retry_failed: bool, halving: int | None) -> None:
    """Print the points of a grid with their status, the stages to build, and their cost.

    Args:
        num_workers: number of points that run at the same time.
        retry_failed: whether points that failed are trained again.
        halving: as in ``sweep.halving``.
    """
    points, merged = grid.points, [point for point, _ in grid.merged]
    combinations = [*(point.overrides for point in (*points, *merged)), *grid.dropped]
    counts = Counter(override for overrides in combinations for override in set(overrides))
    varying = {override for override, count in counts.items() if count < len(combinations)}

    def name(overrides: Sequence[str]) -> str:
        return " ".join(override for override in overrides if override in varying) or "the only point"

    def show_lines(head: str, lines: Sequence[str]) -> None:
        if lines:
            more = [f"  ... and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
            show("\n".join([*filter(None, [head]), *lines[:MAX_LINES], *more]))

    print(grid)
    possible = [point for point in points if point.error is None]
    show_lines("", [f"  {point.result()['status']:8} {name(point.overrides)}" for point in possible])
    refused = [f"  {name(point.overrides)}\n    {point.error}" for point in points if point.error is not None]
    show_lines("cannot run, the others can:" if possible else "cannot run:", refused)
    show_lines("dropped by sweep.where:", [f"  {name(overrides)}" for overrides in grid.dropped])
    same = [f"  {name(point.overrides)}  =  {name(first.overrides)}" for point, first in grid.merged]
    show_lines("the same as another point:", same)
    todo = [point for point in points if point.stage and not point.has_ended(retry_failed)]
    show_lines("", [*dict.fromkeys(line for point in todo if point.stage for line in position_warnings(point.stage))])
    if todo:
        _show_cost(todo, num_workers)
        if halving:
            show("sweep.halving trains only a part of these epochs")


def _show_cost(todo: Sequence[GridPoint], num_workers: int) -> None:
    run = todo[0].run
    assert run is not None
    estimator = Estimator(Pipeline(Store(run.store.dir), run.runtime))
    costs: dict[str, list[Cost]] = {}
    print("to build:")
    for stage in (missing.stage for missing in missing_stages(todo)):
        cost = estimator.cost(stage)
        costs.setdefault(stage.name, []).append(cost)
        show(f"  {stage.name:8} {stage.key}  {duration(cost.seconds)}  {stage_summary(stage)}")
    students = [estimator.cost(point.stage) for point in todo if point.stage and not point.has(point.stage)]
    average = f", {duration(fmean(cost.seconds for cost in students))} each" if students else ""
    stored = f"; {len(todo) - len(students)} more are in the store" if len(todo) > len(students) else ""
    show(f"  student  {quantity(len(students), 'point')}{average}{stored}")
    rounds = [*costs.values(), students]  # each round waits for the previous one
    show(estimator.disk([cost for costs_of_round in rounds for cost in costs_of_round]))

    def seconds(workers: int) -> str:
        return duration(sum(sum(cost.seconds for cost in part) / max(1, min(workers, len(part))) for part in rounds))

    with_several = f", {seconds(num_workers)} with {num_workers} workers" if num_workers > 1 else ""
    show(f"time: {seconds(1)} with one worker{with_several}")


def cost_of_run(stage: Stage, store: Path, runtime: Runtime) -> str:
    """Return the estimated time and disk space of a single run, as one line of text.

    The estimate is measured on the first GPU even if other processes use it: a plan does not wait for a free GPU.
    """
    device = "cuda:0" if runtime.device in ("auto", "cuda") and torch.cuda.is_available() else runtime.device
    pipeline = Pipeline(Store(store), runtime.model_copy(update={"device": device}))
    stages = stages_to_build(stage, pipeline.store)
    for part in stages:
        if part.is_corpus and not pipeline.store.has(part.split_spec("train")):
            return f"time: unknown until the text of stage {part.name} is tokenized, which a plan does not do"
    estimator = Estimator(pipeline)
    costs = {part.name: estimator.cost(part) for part in stages}
    parts = ", ".join(f"{name} {duration(cost.seconds)}" for name, cost in costs.items()) or "nothing to build"
    seconds = sum(rounded(cost.seconds) for cost in costs.values())
    return f"time: {duration(seconds)} ({parts}); {estimator.disk([*costs.values()])}"


@dataclass(frozen=True)
class Cost:
    """Cost of building a stage, including the teacher's outputs that it caches.

    Attributes:
        bytes: disk space, including the checkpoints that the stage keeps.
    """

    seconds: float
    bytes: int


class Estimator:
    """Estimates the cost of stages.

    Args:
        pipeline: its store receives the tokenized data, which training needs anyway.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.seconds_per_product: float | None = None
        """Measured seconds of an update, divided by its tokens and by the ``num_products`` of the model."""
        self.counted_outputs = set[str]()
        """Keys of teacher outputs that an earlier stage's cost includes; stages share these outputs."""

    def cost(self, stage: Stage) -> Cost:
        """Return the cost of ``stage``, with the teacher's outputs unless they were in an earlier stage's cost."""
        if stage.config.prediction_source is not None:
            return Cost(0, 0)
        inputs, mode = self.pipeline.inputs, self.pipeline.runtime.targets
        data, optim = inputs.data(stage), stage.config.optim
        num_epochs = max(1, optim.num_epochs(len(data)))  # a model that is not trained is evaluated once
        matrices = stage.shape.num_products
        cached = stage.teacher is not None and cache_decision(stage, inputs, mode)[0]
        live = FORWARD * self._teacher_products(stage) if not cached else 0.0
        trained = matrices + live if stage.config.method.terms else 0.0
        evaluated = num_epochs * sum(map(len, data.evaluated))
        work = optim.num_steps(len(data)) * optim.batch_size * trained + evaluated * FORWARD * matrices
        seconds = self.seconds_in_store.get(_without_numbers(stage.spec))
        if seconds is None:
            seconds = self._seconds(work * float(data.lengths.mean()), stage)
        seconds += START_SECONDS
        size = 4 * (matrices + stage.shape.vocab_size * stage.shape.width)
        size *= num_epochs if stage.config.keep_checkpoints else 1
        return self._with_outputs(stage, seconds, size) if cached else Cost(seconds, size)

    def _with_outputs(self, stage: Stage, seconds: float, size: int) -> Cost:
        specs = [targets_spec(stage, checkpoint) for checkpoint in stage.teacher_checkpoints]
        new = {key_of(spec) for spec in specs if not self.pipeline.store.has(spec)} - self.counted_outputs
        self.counted_outputs |= new
        split, share = self.pipeline.inputs.split(stage, stage.train_split).teacher_inputs, cached_share(stage)
        tokens = share * len(split) * len(new) * float(split.lengths.mean())
        seconds += self._seconds(tokens * FORWARD * self._teacher_products(stage), stage) if new else 0
        return Cost(seconds, size + cache_bytes(stage, split, len(new), share))

    def _teacher_products(self, stage: Stage) -> float:
        if stage.teacher is None or stage.teacher.has_columns:
            return 0
        return sum(model.shape.num_products for model in stage.teacher.members or (stage.teacher,))

    def disk(self, costs: Sequence[Cost]) -> str:
        free = disk_usage(self.pipeline.store.folder).free
        return f"disk: {sum(cost.bytes for cost in costs) / 1e9:.1f} GB needed, {free / 1e9:.0f} GB free"

    @cached_property
    def seconds_in_store(self) -> Mapping[str, float]:
        """Mean wall-clock seconds of the stages in the store, by their specs without seeds and numbers."""
        seconds: dict[str, list[float]] = {}
        for spec in self.pipeline.store.specs("stage"):
            with suppress(OSError, ValueError, LookupError):  # not complete
                metrics = json.loads((self.pipeline.store.path(spec) / METRICS_FILE).read_text(encoding="utf-8"))
                if metrics["conditions"] == training_conditions():
                    seconds.setdefault(_without_numbers(spec), []).append(metrics["wall_seconds"])
        return {key: fmean(values) for key, values in seconds.items()}

    def _seconds(self, work: float, stage: Stage) -> float:
        """Return the time of ``work``, tokens times ``num_products``; the first trained ``stage`` is measured."""
        if work and self.seconds_per_product is None and stage.config.method.terms:
            self.seconds_per_product = self._measure(stage)
        return work * (self.seconds_per_product or 0.0)

    def _measure(self, stage: Stage) -> float:
        """Measure with random weights in student and teacher, since weights do not affect the time."""
        log.info("measuring a few updates like those of stage %s on %s", stage.name, self.pipeline.device.torch)
        all_layers = stage.config.method.model_copy(update={"schedule": None})
        optim = stage.config.optim.model_copy(update={"epochs": 1, "max_steps": 1 + UPDATES})
        device, model, teacher = self.pipeline.device, self._random(stage), self._teacher(stage)
        clock = time.perf_counter if device.torch.type == "cuda" else time.thread_time
        seconds = list[float]()
        with TemporaryDirectory() as folder:
            training = Training(
                model,
                replace(stage, config=stage.config.model_copy(update={"method": all_layers})).build_method(),
                self.pipeline.inputs.data(stage),
                teacher,
                optim=optim,
                seed=0,
                device=device,
                runtime=self.pipeline.runtime,
                folder=Path(folder),
                log_metrics=no_log(stage.name),
            )
            for update in training.rest_of_epoch():
                started = clock()
                training.take_update(update)
                if device.torch.type == "cuda":
                    torch.cuda.synchronize(device.torch)
                seconds.append(clock() - started)
                if len(seconds) > 1 and sum(seconds[1:]) > SECONDS:
                    break
            tokens = optim.batch_size * float(training.data.lengths.mean())
        of_teacher = FORWARD * self._teacher_products(stage) if isinstance(teacher, LiveTargets) else 0.0
        return fmean(seconds[1:] or seconds) / (tokens * (stage.shape.num_products + of_teacher))

    def _random(self, stage: Stage) -> PreTrainedModel:
        model, vocab_size = stage.root.config.model, self.pipeline.inputs.vocab_size(stage.root)
        shape: dict[str, Any] = {"num_layers": stage.shape.num_layers, "layers": "random", "head": "new"}
        if not stage.shape.num_layers:  # a table of tokens
            table = {"model_type": stage.shape.model_type, "hidden_dim": stage.shape.width}
            shape = {"num_layers": None, "source": None, "layers": "first", "architecture": table}
            vocab_size = stage.shape.vocab_size
        return build(model.model_copy(update=shape), stage.head, vocab_size)

    def _teacher(self, stage: Stage) -> TeacherTargets:
        """Return a live teacher, or zeros in place of one that is known by its predictions."""
        teacher = stage.teacher
        if teacher is None:
            return NoTeacher()
        if teacher.config.prediction_source is not None:
            return _ZeroLogits(teacher.shape.num_labels)
        split = self.pipeline.inputs.split(stage, stage.train_split)
        return LiveTargets(self._random(teacher), split, stage.teacher_needs, self.pipeline.device)


class _ZeroLogits(TeacherTargets):
    """Zero logits for ``num_labels`` classes, in place of a teacher that is known only by its predictions."""

    def __init__(self, num_labels: int) -> None:
        self.num_labels = num_labels

    def prepare(self, batch: Batch, progress: Progress | None, needs: FeatureRequest | None) -> Features:
        return Features(torch.zeros(batch.num_outputs, self.num_labels))


def _without_numbers(spec: Any) -> str:
    """Return a stage's spec as text, without the seed and floats (weights, rates), which do not change the time."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(part) for key, part in value.items() if key != "seed" and not isinstance(part, float)}
        return [plain(part) for part in value] if isinstance(value, list | tuple) else value

    return json.dumps(plain(spec), sort_keys=True, default=str)
