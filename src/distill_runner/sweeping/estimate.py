"""Estimated cost of a stage: seconds from steps measured on this machine, bytes from the shapes of its arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import Progress
from distill_runner.models.build import build
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest, Features
from distill_runner.pipeline.build import Pipeline, discard
from distill_runner.pipeline.caches import cached_share, serving
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import key_of
from distill_runner.pipeline.targets import is_cached
from distill_runner.training.cache_choice import cache_bytes
from distill_runner.training.parts import Learner, Machine, Procedure, Record
from distill_runner.training.teachers import LiveTargets, NoTeacher, TeacherTargets
from distill_runner.training.train import Training

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SECONDS = 1.0
"""Seconds after which a measurement ends, and the warm-up before it, even if calls are left."""
START_SECONDS = 2.0
"""Seconds of a run outside its training: loading the model, the first batches, writing the result."""
UPDATES = 4
"""Number of different updates that are measured, after one pass over all of them as a warm-up."""
REPEATS = 5
"""Number of times that each of these updates is measured."""


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
    """Measured speed of a model of one shape, trained by one method on one data set.

    Attributes:
        update: seconds of one update.
        prediction: seconds of the prediction for one example.
        model_bytes: size of the model's parameters in float32.
    """

    update: float
    prediction: float
    model_bytes: int


class Estimator:
    """Estimates the cost of stages. Stages with the same shape, method and data set are measured once.

    Args:
        pipeline: its store receives the tokenised data, which training needs anyway.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.speeds: dict[str, _Speed] = {}
        self.known: dict[str, Cost] = {}
        """Cost of training a stage, by the key of its spec without the seed."""
        self.counted = set[str]()
        """Keys of teacher outputs that an earlier stage's cost includes; stages share these outputs."""

    def cost(self, stage: Stage) -> Cost:
        """Return the cost of ``stage``, including the teacher's outputs unless an earlier stage counted them."""
        alike = key_of({**stage.spec, "seed": None})  # a seed changes neither the cost nor the outputs read
        if alike in self.known:
            return self.known[alike]
        own, outputs = self._training(stage), self._outputs(stage)
        self.known[alike] = own
        return Cost(own.seconds + outputs.seconds, own.bytes + outputs.bytes)

    def _training(self, stage: Stage) -> Cost:
        if stage.config.given is not None:
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
        if stage.teacher is None or not is_cached(stage, self.pipeline)[0]:
            return Cost(0, 0)
        specs = [serving(stage, checkpoint, self.pipeline.store) for checkpoint in stage.followed]
        new = {key_of(spec) for spec in specs if not self.pipeline.store.has(spec)} - self.counted
        self.counted |= new
        split, share = self.pipeline.inputs.split(stage, stage.data.train_split).taught, cached_share(stage)
        judges = stage.teacher.members if stage.teacher.config.given else (stage.teacher,)
        seconds = share * len(split) * len(new) * sum(self._speed(judge).prediction for judge in judges)
        size = cache_bytes(stage.needs[1], stage.teacher.shape, split, len(new), stage.teacher_outputs, share)
        return Cost(seconds, size)

    def _speed(self, stage: Stage) -> _Speed:
        stage = _unscheduled(stage)
        optim, teacher = stage.config.optim, stage.teacher.shape if stage.teacher else None
        method = _without_fractions(stage.config.method.spec(stage.outputs))
        kind = str(
            (stage.data.spec, stage.shape, teacher, optim.batch_size, optim.accumulation, optim.bucketing, method)
        )
        if kind not in self.speeds:
            self.speeds[kind] = self._measure(stage)
        return self.speeds[kind]

    def _measure(self, stage: Stage) -> _Speed:
        """Measure with random weights in student and teacher, since weights do not affect the time."""
        model = self._random(stage)
        with TemporaryDirectory() as folder:
            training = Training(
                Learner(model, stage.method(), self.pipeline.inputs.data(stage), self._teacher(stage)),
                Procedure(stage.config.optim.model_copy(update={"epochs": 1, "max_steps": UPDATES}), seed=0),
                Machine(self.pipeline.device, self.pipeline.runtime),
                Record(Path(folder), discard(stage.name)),
            )
            updates = list(training.rest_of_epoch())
            update = _mean_seconds(training.step, updates) if training.method.weights else 0.0
        model.eval()
        batches = [batch for update in updates for batch in update.batches]
        prediction = _mean_seconds(lambda batch: self._predict(model, batch), batches)
        return _Speed(update, prediction / batches[0].size, 4 * training.num_params)

    def _predict(self, model: PreTrainedModel, batch: Batch) -> None:
        with torch.inference_mode(), self.pipeline.device.forward(model):
            extract(model, batch, FeatureRequest(logits=True))

    def _teacher(self, stage: Stage) -> TeacherTargets:
        if stage.teacher is None:
            return NoTeacher()
        split = self.pipeline.inputs.split(stage, stage.data.train_split)
        if stage.teacher.config.given is not None:
            return _Predictions(stage.teacher.shape.num_labels)
        live = LiveTargets(self._random(stage.teacher), split, stage.needs[1], self.pipeline.device)
        return _Remembered(live) if is_cached(stage, self.pipeline)[0] else live

    def _random(self, stage: Stage) -> PreTrainedModel:
        model = stage.root.config.model
        shape = {"num_layers": stage.shape.num_layers, "layers": "random", "head": "new"}
        vocab_size = self.pipeline.inputs.vocab_size(stage.root)
        return build(model.model_copy(update=shape), stage.head, vocab_size)


def _unscheduled(stage: Stage) -> Stage:
    """Return ``stage`` without its layer schedule; the cost without the schedule is an upper bound."""
    method = stage.config.method.model_copy(update={"schedule": None})
    return replace(stage, config=stage.config.model_copy(update={"method": method}))


def _without_fractions(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's spec without its floats, which are weights and temperatures and do not affect the time."""
    return {
        key: _without_fractions(value) if isinstance(value, Mapping) else value
        for key, value in method.items()
        if not isinstance(value, float)
    }


class _Remembered:
    """Teacher that computes its outputs for a batch once and then reuses them, as fast as from a cache."""

    def __init__(self, teacher: LiveTargets) -> None:
        self.teacher = teacher
        self.said: dict[bytes, Features] = {}

    def __call__(self, batch: Batch, progress: Progress, needs: FeatureRequest) -> Features:
        name = batch.index.cpu().numpy().tobytes()
        if name not in self.said:
            self.said[name] = self.teacher(batch, progress, needs)
        return self.said[name]


class _Predictions:
    """Zero logits for ``num_labels`` classes, in place of a teacher that is known only by its predictions."""

    def __init__(self, num_labels: int) -> None:
        self.num_labels = num_labels

    def __call__(self, batch: Batch, progress: Progress, needs: FeatureRequest) -> Features:
        return Features(torch.zeros(batch.num_outputs, self.num_labels))


def _mean_seconds(call: Callable[[Any], None], arguments: list[Any]) -> float:
    for repeats in (1, REPEATS):  # the first pass only warms up
        started, calls = time.perf_counter(), 0
        for argument in arguments * repeats:
            call(argument)
            calls += 1
            if time.perf_counter() - started > SECONDS:
                break
    return (time.perf_counter() - started) / calls
