"""What a stage will cost: seconds from steps that are really taken on this machine, bytes from its shapes."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import Progress
from distill_runner.models.build import build
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest, Features
from distill_runner.pipeline.build import Pipeline, discard
from distill_runner.pipeline.caches import serving
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import key_of
from distill_runner.pipeline.targets import is_cached
from distill_runner.training.parts import Learner, Machine, Procedure, Record
from distill_runner.training.teachers import LiveTargets, NoTeacher, TeacherTargets, cache_bytes
from distill_runner.training.train import Training

SECONDS = 2.0
"""Of measuring, after as many to warm up, at most."""
START_SECONDS = 2.0
"""Of a run beside its training: the model's loading, the first batches, the writing of the result."""
UPDATES = 4
"""Different updates that are measured, again and again."""


@dataclass(frozen=True)
class Cost:
    """Of building a stage, its teacher's targets included; bytes also of the checkpoints that it keeps."""

    seconds: float
    bytes: int


@dataclass(frozen=True)
class _Speed:
    """Of a model of one shape and method on one data set: seconds of an update, and of a prediction."""

    update: float
    prediction: float
    model_bytes: int


class Estimator:
    """Costs of stages. Stages of one shape and method on one data set are measured once.

    Args:
        pipeline: whose store gets the tokenised data; training will need them anyway.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.speeds: dict[str, _Speed] = {}
        self.known: dict[str, Cost] = {}
        """Of the training of stages, but for their seed."""
        self.counted = set[str]()
        """Keys of the teachers' outputs that are in a cost already: stages share them."""

    def cost(self, stage: Stage) -> Cost:
        """With the teacher's outputs that it reads, unless an earlier stage has them cached."""
        alike = key_of({**stage.spec, "seed": None})  # which costs as much, and reads the same of the same teacher
        if alike in self.known:
            return self.known[alike]
        own, outputs = self._training(stage), self._outputs(stage)
        self.known[alike] = own
        return Cost(own.seconds + outputs.seconds, own.bytes + outputs.bytes)

    def _training(self, stage: Stage) -> Cost:
        data = self.pipeline.inputs.data(stage)
        optim, speed = stage.config.optim, self._speed(stage)
        per_epoch = -(-len(data) // optim.batch_size)
        num_steps = optim.num_steps(per_epoch)
        num_epochs = max(1, -(-num_steps // per_epoch))  # a model that is not trained is judged once
        seconds = num_steps * speed.update + num_epochs * data.num_evaluated * speed.prediction
        num_bytes = speed.model_bytes * (num_epochs if stage.config.keep_checkpoints else 1)
        return Cost(START_SECONDS + seconds, num_bytes)

    def _outputs(self, stage: Stage) -> Cost:
        if stage.teacher is None or not is_cached(stage, self.pipeline)[0]:
            return Cost(0, 0)
        specs = [serving(stage, checkpoint, self.pipeline.store) for checkpoint in stage.followed]
        new = {key_of(spec) for spec in specs if not self.pipeline.store.has(spec)} - self.counted
        self.counted |= new
        # Of the whole split, whatever share of it is used.
        split = self.pipeline.inputs.split(stage, stage.data.train_split).taught
        judges = stage.teacher.members if stage.teacher.config.given else (stage.teacher,)
        seconds = len(split) * len(new) * sum(self._speed(judge).prediction for judge in judges)
        return Cost(seconds, cache_bytes(stage.needs[1], stage.teacher.shape, split, len(new)))

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
        """With random weights in student and teacher, which do not matter for time."""
        model = self._random(stage)
        with TemporaryDirectory() as folder:
            training = Training(
                Learner(model, stage.method(), self.pipeline.inputs.data(stage), self._teacher(stage)),
                Procedure(stage.config.optim.model_copy(update={"epochs": 1, "max_steps": None}), seed=0),
                Machine(self.pipeline.device, self.pipeline.runtime),
                Record(Path(folder), discard(stage.name)),
            )
            updates = list(islice(training.rest_of_epoch(), UPDATES))
            update = _mean_seconds(training.step, updates) if training.method.weights else 0.0
        model.eval()
        batches = [batch for update in updates for batch in update.batches]
        prediction = _mean_seconds(lambda batch: self._predict(model, batch), batches)
        return _Speed(update, prediction / batches[0].size, 4 * training.num_params)

    def _predict(self, model: PreTrainedModel, batch: Batch) -> None:
        with torch.inference_mode(), self.pipeline.device.autocast():
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
    """Without a schedule of layers: its epochs cost this much at most."""
    method = stage.config.method.model_copy(update={"schedule": None})
    return replace(stage, config=stage.config.model_copy(update={"method": method}))


def _without_fractions(method: Mapping[str, Any]) -> dict[str, Any]:
    """Of a method's spec what its time depends on: not weights or temperatures, which are all its floats."""
    return {
        key: _without_fractions(value) if isinstance(value, Mapping) else value
        for key, value in method.items()
        if not isinstance(value, float)
    }


class _Remembered:
    """What a teacher said of a batch before, as fast as from a cache."""

    def __init__(self, teacher: LiveTargets) -> None:
        self.teacher = teacher
        self.said: dict[bytes, Features] = {}

    def __call__(self, batch: Batch, progress: Progress, needs: FeatureRequest) -> Features:
        name = batch.index.cpu().numpy().tobytes()
        if name not in self.said:
            self.said[name] = self.teacher(batch, progress, needs)
        return self.said[name]


class _Predictions:
    """Of nobody, for as many classes."""

    def __init__(self, num_labels: int) -> None:
        self.num_labels = num_labels

    def __call__(self, batch: Batch, progress: Progress, needs: FeatureRequest) -> Features:
        return Features(torch.zeros(batch.num_outputs, self.num_labels))


def _mean_seconds(call: Callable[[Any], None], arguments: list[Any]) -> float:
    started = time.perf_counter()
    for argument in arguments:
        call(argument)
        if time.perf_counter() - started > SECONDS:
            break
    started, times, again = time.perf_counter(), 0, cycle(arguments)
    while time.perf_counter() - started < SECONDS:
        call(next(again))
        times += 1
    return (time.perf_counter() - started) / times
