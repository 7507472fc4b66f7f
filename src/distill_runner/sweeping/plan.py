"""``plan=true``: what a run or a sweep would build, and the time and disk space that this would take.

Seconds are estimated from steps measured on this machine, bytes from the shapes of arrays. On a CPU the seconds are CPU
time, so that other processes do not change the estimate; the store keeps them for the next plan.
"""

from __future__ import annotations

import json
import logging
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import disk_usage
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from distill_runner.common.errors import quantity
from distill_runner.common.terminal import duration, rounded
from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import Progress
from distill_runner.models.build import build
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest, Features
from distill_runner.pipeline.build import Pipeline, decide_cached, no_report
from distill_runner.pipeline.code_version import code_version
from distill_runner.pipeline.planning import position_warnings, stage_summary, stages_to_build
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import SCHEMA, Store, key_of
from distill_runner.pipeline.targets import cache_bytes, cached_share, usable_cache
from distill_runner.sweeping.points import Grid, GridPoint
from distill_runner.sweeping.remaining import has_ended, is_built, missing_stages, summary
from distill_runner.training.config import Runtime
from distill_runner.training.devices import Device
from distill_runner.training.teachers import LiveTargets, NoTeacher, TeacherTargets
from distill_runner.training.train import Training

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

MAX_LINES = 20
"""Maximum number of lines printed of a list."""
SECONDS = 4.0
"""Seconds after which a measurement ends; the warm-up before it ends after a quarter of them.

A stage has two measurements, so a plan of teacher and student measures for 20 seconds, besides a call in progress.
"""
PROBE_SECONDS = 0.2
"""Seconds for which a plan measures the part of a CPU that this process gets."""
FREE = 0.8
"""Part of a CPU from which a machine counts as free."""
START_SECONDS = 2.0
"""Seconds of a run outside its training: loading the model, the first batches, writing the result."""
SPEED = "speed.json"
UPDATES = 4
"""Number of different updates that are measured, after one pass over all of them as a warm-up."""
REPEATS = 5
"""Number of times that each of these updates is measured."""


def show_plan(grid: Grid, num_workers: int, retry_failed: bool) -> None:
    """Print the points of a grid with their status, the stages to build, and their cost.

    Args:
        num_workers: number of points that run at the same time.
        retry_failed: whether points that failed are trained again.
    """
    points, combinations = grid.points, [*(point.overrides for point in grid.points), *grid.dropped]
    counts = Counter(override for overrides in combinations for override in set(overrides))
    varying = {override for override, count in counts.items() if count < len(combinations)}

    def name(overrides: Sequence[str]) -> str:
        return " ".join(override for override in overrides if override in varying) or "the only point"

    print(summary(grid))
    possible = [point for point in points if point.error is None]
    _show("", [f"  {point.status:8} {name(point.overrides)}" for point in possible])
    refused = [f"  {name(point.overrides)}\n    {point.error}" for point in points if point.error is not None]
    _show("cannot run, the others can:" if possible else "cannot run:", refused)
    _show("dropped by sweep.where:", [f"  {name(overrides)}" for overrides in grid.dropped])
    same = [f"  {name(point.overrides)}  =  {name(first.overrides)}" for point, first in grid.merged]
    _show("the same as another point:", same)
    todo = [point for point in points if point.stage and not has_ended(point, retry_failed)]
    _show("", [*dict.fromkeys(line for point in todo if point.stage for line in position_warnings(point.stage))])
    if todo:
        _show_cost(todo, num_workers)


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
    all_costs = [*costs.values()]
    seconds = sum(rounded(cost.seconds) for cost in all_costs)
    return f"time: {duration(seconds)} ({parts}){_now(seconds, pipeline)}; {_disk(all_costs, pipeline)}"


def _now(seconds: float, pipeline: Pipeline) -> str:
    """Return how long it would take beside the processes that are running now; empty on a free machine or a GPU."""
    if not seconds or pipeline.device.torch.type != "cpu" or (part := cpu_part()) > FREE:
        return ""
    return f" on a free machine, about {duration(seconds / part)} with the {part:.0%} of a CPU that it would get now"


def cpu_part() -> float:
    """Return the part of a CPU that this process gets, between 0 and 1."""
    started, cpu_started = time.perf_counter(), time.thread_time()
    while (seconds := time.perf_counter() - started) < PROBE_SECONDS:
        pass
    return (time.thread_time() - cpu_started) / seconds


def _disk(costs: Sequence[Cost], pipeline: Pipeline) -> str:
    free = disk_usage(pipeline.store.folder).free
    return f"disk: {sum(cost.bytes for cost in costs) / 1e9:.1f} GB needed, {free / 1e9:.0f} GB free"


def _show(head: str, lines: Sequence[str]) -> None:
    if lines:
        more = [f"  ... and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
        print("\n".join([*filter(None, [head]), *lines[:MAX_LINES], *more]))


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
        print(f"  {stage.name:8} {stage.key}  {duration(cost.seconds)}  {stage_summary(stage)}")
    students = [estimator.cost(point.stage) for point in todo if point.stage and not is_built(point, point.stage)]
    average = f", {duration(_seconds(students) / len(students))} each" if students else ""
    stored = f"; {len(todo) - len(students)} more are in the store" if len(todo) > len(students) else ""
    print(f"  student  {quantity(len(students), 'point')}{average}{stored}")
    rounds = [*costs.values(), students]  # each round waits for the previous one
    print(_disk([cost for costs_of_round in rounds for cost in costs_of_round], pipeline))
    one, several = (sum(_seconds(costs_of_round, workers) for costs_of_round in rounds) for workers in (1, num_workers))
    with_several = f", {duration(several)} with {num_workers} workers" if num_workers > 1 else ""
    print(f"time: {duration(one)} with one worker{with_several}{_now(several, pipeline)}")


def _seconds(costs: Sequence[Cost], num_workers: int = 1) -> float:
    return sum(cost.seconds for cost in costs) / max(1, min(num_workers, len(costs)))


@dataclass(frozen=True)
class Cost:
    """Cost of building a stage, including the teacher's outputs that it caches.

    Attributes:
        bytes: disk space, including the checkpoints that the stage keeps.
    """

    seconds: float
    bytes: int


@dataclass(frozen=True)
class _Speed:
    """Measured speed of a model of one shape, trained by one method on one dataset.

    Attributes:
        update: seconds of one update.
        prediction: seconds of the prediction for one example.
        model_bytes: size of the model's parameters in float32.
    """

    update: float
    prediction: float
    model_bytes: int


class Estimator:
    """Estimates the cost of stages. Stages with the same shape, method and dataset are measured once.

    Args:
        pipeline: its store receives the tokenized data, which training needs anyway.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.speeds: dict[str, _Speed] = {}
        self.costs: dict[str, Cost] = {}
        """Cost of training a stage, by the key of its spec without the seed."""
        self.counted_outputs = set[str]()
        """Keys of teacher outputs that an earlier stage's cost includes; stages share these outputs."""

    def cost(self, stage: Stage) -> Cost:
        """Return the cost of ``stage``, with the teacher's outputs unless they were in an earlier stage's cost."""
        key = key_of({**stage.spec, "seed": None})  # a seed changes neither the cost nor the outputs read
        if key in self.costs:
            return self.costs[key]
        own, outputs = self._training(stage), self._outputs(stage)
        self.costs[key] = own
        return Cost(own.seconds + outputs.seconds, own.bytes + outputs.bytes)

    def _training(self, stage: Stage) -> Cost:
        if stage.config.prediction_source is not None:
            return Cost(0, 0)
        data = self.pipeline.inputs.data(stage)
        optim, speed = stage.config.optim, self._speed(stage)
        per_epoch = -(-len(data) // optim.batch_size)
        num_steps = optim.num_steps(per_epoch)
        num_epochs = max(1, -(-num_steps // per_epoch))  # a model that is not trained is evaluated once
        seconds = num_steps * speed.update + num_epochs * data.num_evaluated * speed.prediction
        num_bytes = speed.model_bytes * (num_epochs if stage.config.keep_checkpoints else 1)
        return Cost(START_SECONDS + seconds, num_bytes)

    def _outputs(self, stage: Stage) -> Cost:
        if stage.teacher is None or not decide_cached(stage, self.pipeline)[0]:
            return Cost(0, 0)
        specs = [usable_cache(stage, checkpoint, self.pipeline.store) for checkpoint in stage.teacher_checkpoints]
        new = {key_of(spec) for spec in specs if not self.pipeline.store.has(spec)} - self.counted_outputs
        self.counted_outputs |= new
        split, share = self.pipeline.inputs.split(stage, stage.train_split).teacher_inputs, cached_share(stage)
        models = stage.teacher.members if stage.teacher.config.prediction_source else (stage.teacher,)
        seconds = share * len(split) * len(new) * sum(self._speed(model).prediction for model in models)
        size = cache_bytes(stage.teacher_needs, stage.teacher.shape, split, len(new), stage.teacher_outputs, share)
        return Cost(seconds, size)

    def _speed(self, stage: Stage) -> _Speed:
        stage = _without_schedule(stage)
        optim, teacher = stage.config.optim, stage.teacher.shape if stage.teacher else None
        method = _what_takes_time(stage.config.method.spec(stage.outputs))
        key = str(
            (stage.data_spec, stage.shape, teacher, optim.batch_size, optim.accumulation, optim.bucketing, method)
        )
        if key not in self.speeds:
            self.speeds[key] = self._stored_speed(stage, key)
        return self.speeds[key]

    def _stored_speed(self, stage: Stage, key: str) -> _Speed:
        """Return the speed in the store; measure it if no earlier plan did so on such a machine."""

        def build(folder: Path) -> None:
            log.info("measuring a few updates like those of stage %s on %s", stage.name, self.pipeline.device.torch)
            (folder / SPEED).write_text(json.dumps(asdict(self._measure(stage))), encoding="utf-8")

        conditions = {**_conditions(self.pipeline.device), "compile": self.pipeline.runtime.compile}
        spec = {"kind": "speed", "schema": SCHEMA, "measured": key, "conditions": conditions}
        return _Speed(**json.loads((self.pipeline.store.get(spec, build) / SPEED).read_text(encoding="utf-8")))

    def _measure(self, stage: Stage) -> _Speed:
        """Measure with random weights in student and teacher, since weights do not affect the time."""
        model, device = self._random(stage), self.pipeline.device.torch
        with TemporaryDirectory() as folder:
            training = Training(
                model,
                stage.build_method(),
                self.pipeline.inputs.data(stage),
                self._teacher(stage),
                optim=stage.config.optim.model_copy(update={"epochs": 1, "max_steps": UPDATES}),
                seed=0,
                device=self.pipeline.device,
                runtime=self.pipeline.runtime,
                folder=Path(folder),
                report=no_report(stage.name),
            )
            updates = list(training.rest_of_epoch())
            update = _mean_seconds(training.step, updates, device) if training.method.weights else 0.0
        model.eval()
        batches = [batch for update in updates for batch in update.batches]
        prediction = _mean_seconds(lambda batch: self._predict(model, batch), batches, device)
        return _Speed(update, prediction / batches[0].size, 4 * training.num_params)

    def _predict(self, model: PreTrainedModel, batch: Batch) -> None:
        with torch.inference_mode(), self.pipeline.device.autocast():
            extract(model, batch, FeatureRequest(logits=True))

    def _teacher(self, stage: Stage) -> TeacherTargets:
        if stage.teacher is None:
            return NoTeacher()
        split = self.pipeline.inputs.split(stage, stage.train_split)
        if stage.teacher.config.prediction_source is not None:
            return _ZeroLogits(stage.teacher.shape.num_labels)
        live = LiveTargets(self._random(stage.teacher), split, stage.teacher_needs, self.pipeline.device)
        return _MemoizedTeacher(live) if decide_cached(stage, self.pipeline)[0] else live

    def _random(self, stage: Stage) -> PreTrainedModel:
        model = stage.root.config.model
        shape = {"num_layers": stage.shape.num_layers, "layers": "random", "head": "new"}
        vocab_size = self.pipeline.inputs.vocab_size(stage.root)
        return build(model.model_copy(update=shape), stage.head, vocab_size)


def _without_schedule(stage: Stage) -> Stage:
    """Return ``stage`` without its layer schedule; the cost without the schedule is an upper bound."""
    method = stage.config.method.model_copy(update={"schedule": None})
    return replace(stage, config=stage.config.model_copy(update={"method": method}))


def _what_takes_time(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's spec without seeds and floats (weights, temperatures), which do not affect the time."""
    return {
        key: _what_takes_time(value) if isinstance(value, Mapping) else value
        for key, value in method.items()
        if not isinstance(value, float) and key != "seed"
    }


class _MemoizedTeacher:
    """Teacher that computes its outputs for a batch once and then reuses them, as fast as from a cache."""

    def __init__(self, teacher: LiveTargets) -> None:
        self.teacher = teacher
        self.outputs: dict[bytes, Features] = {}

    def __call__(self, batch: Batch, progress: Progress, needs: FeatureRequest) -> Features:
        name = batch.index.cpu().numpy().tobytes()
        if name not in self.outputs:
            self.outputs[name] = self.teacher(batch, progress, needs)
        return self.outputs[name]


class _ZeroLogits:
    """Zero logits for ``num_labels`` classes, in place of a teacher that is known only by its predictions."""

    def __init__(self, num_labels: int) -> None:
        self.num_labels = num_labels

    def __call__(self, batch: Batch, progress: Progress, needs: FeatureRequest) -> Features:
        return Features(torch.zeros(batch.num_outputs, self.num_labels))


def _conditions(device: Device) -> dict[str, Any]:
    """Return what a measured speed depends on, beside what is computed."""
    cpu = torch.cpu.get_capabilities().get("cpu_name") or platform.processor()
    return {
        "device": torch.cuda.get_device_name(device.torch) if device.torch.type == "cuda" else cpu,
        "precision": device.precision,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "code": code_version(),
    }


def _mean_seconds(call: Callable[[Any], None], arguments: list[Any], device: torch.device) -> float:
    """Return the mean over ``arguments`` of the median seconds of ``call``, or over as many as the time allows.

    On a CPU these are seconds of this thread, which does not count while other processes have the CPU.
    """

    def seconds_of(argument: Any) -> float:
        started, cpu_started = time.perf_counter(), time.thread_time()
        call(argument)
        if device.type != "cuda":
            return time.thread_time() - cpu_started
        torch.cuda.synchronize(device)
        return time.perf_counter() - started

    measured: list[list[float]] = [[] for _ in arguments]
    for limit, repeats in ((SECONDS / 4, 1), (SECONDS, REPEATS)):  # the first pass only warms up
        measured, started = [[] for _ in arguments], time.perf_counter()
        for argument, seconds in [*zip(arguments, measured, strict=True)] * repeats:
            seconds.append(seconds_of(argument))
            if time.perf_counter() - started > limit:
                break
    return mean(median(seconds) for seconds in measured if seconds)
