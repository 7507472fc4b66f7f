"""Building what stages describe: each artifact once, in the order in which they need each other."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill_runner.common.errors import within
from distill_runner.common.seeds import seed_all, stage_seed, undisturbed
from distill_runner.common.terminal import quiet
from distill_runner.models.build import build
from distill_runner.models.config import ModelConfig
from distill_runner.models.sources import require_weights
from distill_runner.pipeline.caches import serving
from distill_runner.pipeline.inputs import Inputs
from distill_runner.pipeline.planning import fillable
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store, link_tree, remove
from distill_runner.training.config import Runtime
from distill_runner.training.data import Data
from distill_runner.training.devices import Device
from distill_runner.training.meter import Log
from distill_runner.training.processes import ProcessGroup, together
from distill_runner.training.teachers import (
    CachedTargets,
    CheckpointTargets,
    LiveTargets,
    MeanTargets,
    NoTeacher,
    TeacherTargets,
    cache_bytes,
    choose,
)
from distill_runner.training.train import CHECKPOINT, EPOCH, PREDICTIONS, Training, fit

log = logging.getLogger(__name__)

YIELD = "stage"
"""Folder within a stage's checkpoints of all that the stage yields."""

Report = Callable[[str], Log]
"""Gives the sink for the numbers of a stage, by its name."""


def discard(_stage: str) -> Log:
    """Nobody asks for the numbers."""
    return lambda values, step, epoch: None


class Pipeline:
    """Builds stages into a store. A GPU is taken when there is something to compute, and not before.

    Args:
        report: where the numbers of a stage's training go, by the stage's name.
    """

    def __init__(self, store: Store, runtime: Runtime, report: Report = discard) -> None:
        self.store, self.runtime, self.report = store, runtime, report
        self.inputs = Inputs(store, lambda: self.device)

    @cached_property
    def devices(self) -> list[Device]:
        """One for each process."""
        of = self.runtime
        return Device.several(of.device, of.precision, of.workers_per_gpu, of.num_processes)

    @property
    def device(self) -> Device:
        return self.devices[0]

    def prepare(self, stage: Stage) -> None:
        """Read what training will read, in all stages to build: what is missing is told before anything is trained."""
        if self.store.has(stage.spec):
            return
        for upstream in stage.upstream:
            self.prepare(upstream)
        if stage.config.given is not None:
            if stage.config.task is not None and not stage.members:
                stage.config.task.given_logits(stage.config.task.train)
            return
        with within(f"stages.{stage.name}"):
            if stage.source is None and stage.config.model.source:
                require_weights(stage.config.model.source)
            self.inputs.data(stage)

    def build(self, stage: Stage, pause_after: int | None = None) -> Path:
        """The folder of the stage's artifact, built with all that it needs if it is not there.

        Raises:
            Paused: after ``pause_after`` epochs of this stage.
        """
        with within(f"stages.{stage.name}"):
            return self.store.get(stage.spec, lambda folder: self._yield(stage, folder, pause_after))

    def fill_targets(self, stage: Stage) -> None:
        """Cache what the stage, and those that it needs, read of teachers that are there. Nothing is trained."""
        readers = [reader for reader, _ in fillable(stage, self.store, self.runtime.targets)]
        for reader in readers:
            self._targets(reader)
        if not readers:
            log.info("there is nothing to cache: it is there, or cannot be, or the teacher is not there yet")

    def checkpoints(self, stage: Stage) -> Path:
        """The folder of the stage's model after each of its epochs, and in ``YIELD`` of all that the stage yields.

        A stage that was built without is trained again: to the same end on a CPU, to a similar one elsewhere.
        """

        def train(folder: Path) -> None:
            if not (folder / YIELD / CHECKPOINT).exists():
                remove(folder / YIELD)  # of a build that was cut off at its end: shares files with the epochs
            (folder / YIELD).mkdir(exist_ok=True)
            self._fit(stage, folder / YIELD, keep=folder)

        return self.store.get(stage.checkpoints_spec, train)

    def _yield(self, stage: Stage, folder: Path, pause_after: int | None) -> None:
        if stage.config.given is not None:
            self._judge(stage, folder)
            return
        kept = self.checkpoints(stage) if stage.config.keep_checkpoints else self.store.find(stage.checkpoints_spec)
        if kept is not None:
            link_tree(kept / YIELD, folder)
        else:
            self._fit(stage, folder, pause_after=pause_after)

    def _judge(self, stage: Stage, folder: Path) -> None:
        """What is kept of a stage of predictions: those of an ensemble for the validation splits, and their scores."""
        task, metrics = stage.config.task, dict[str, float]()
        assert task is not None
        for number, (name, split_name) in enumerate(task.validation.items()):
            of = [np.load(self.build(member) / PREDICTIONS.format(name)) for member in stage.members]
            if not of:
                break
            outputs = self._mean(stage)([torch.from_numpy(one) for one in of]).numpy()
            np.save(folder / PREDICTIONS.format(name), outputs)
            scores = task.score(outputs, self.inputs.split(stage.members[0], split_name))
            metrics |= {f"{name}/{metric}" if number else metric: value for metric, value in scores.items()}
        (folder / "metrics.json").write_text(json.dumps({"metrics": metrics}, indent=1))

    @staticmethod
    def _mean(stage: Stage) -> Callable[[Sequence[Tensor]], Tensor]:
        assert stage.config.given is not None
        return partial(stage.outputs.mean, weights=stage.config.given.shares)

    def _fit(self, stage: Stage, folder: Path, keep: Path | None = None, pause_after: int | None = None) -> None:
        if stage.teacher and stage.route and not self.store.has(stage.teacher.spec):
            self.checkpoints(stage.teacher)  # first, so that what the teacher yields comes from the same training
        for upstream in stage.upstream:
            self.build(upstream)
        log.info("stage %s: building %s", stage.name, stage.key)
        data, targets = self.inputs.data(stage), self._targets(stage)
        # All that is read lies in the store by now, where other processes find it.
        started = time.monotonic()
        job = partial(_take_part, stage, self.store.folder, self.runtime, self.devices, folder, pause_after)
        with together([device.torch for device in self.devices], job) as group:
            training = self._training(stage, data, targets, folder, keep, pause_after, group)
            history = fit(training)
        if keep is not None:
            link_tree(keep / EPOCH.format(history.best), folder / "model")
        if (tokenizer := self.inputs.tokenizer(stage)) is not None:  # another than above, never set to truncate
            tokenizer.save_pretrained(folder / "model")
        if stage.config.task is not None:
            stage.config.task.save_reader(folder / "model")
        judged, outputs = data.judge(lambda: self.device.place(self._kept(stage, folder)))
        for name, predictions in outputs.items():
            np.save(folder / PREDICTIONS.format(name), predictions)
        metrics = asdict(history) | {
            "examples_per_second": history.examples_per_second,
            "wall_seconds": time.monotonic() - started,
            "metrics": judged | history.epochs[history.best - 1],
            "num_params": training.num_params,
            "shape": asdict(stage.shape),
        }
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=1))
        remove(folder / CHECKPOINT)

    def _training(
        self,
        stage: Stage,
        data: Data,
        targets: TeacherTargets,
        folder: Path,
        keep: Path | None,
        pause_after: int | None,
        group: ProcessGroup,
    ) -> Training:
        return Training(
            self._initial(stage),
            stage.method(),
            data,
            targets,
            stage.config.optim,
            select_best=stage.config.select == "best",
            pause_after=pause_after,
            seed=stage_seed(stage.config.seed, stage.name),
            device=self.device,
            runtime=self.runtime,
            folder=folder,
            report=self.report(stage.name),
            keep=keep,
            group=group,
        )

    def _untrained(self, stage: Stage) -> Any:
        """The stage's model as it is before its first epoch."""
        with undisturbed():
            return self._initial(stage)

    def _initial(self, stage: Stage) -> Any:
        # Nothing before may leave a trace in the random numbers below: it may have come from the store.
        vocab_size = self.inputs.vocab_size(stage)
        seed_all(stage_seed(stage.config.seed, stage.name))
        model = stage.config.model
        if stage.source is not None:
            model = model.model_copy(update={"source": str(self.build(stage.source) / "model")})
        return build(model, stage.head, vocab_size)

    @staticmethod
    def _kept(stage: Stage, folder: Path) -> Any:
        return build(ModelConfig(source=str(folder / "model"), head="keep"), stage.head)

    def is_cached(self, stage: Stage) -> tuple[bool, str]:
        """Whether the outputs of the stage's teacher are read from a cache, and why."""
        if why := stage.why_live(self.runtime.targets):
            return False, why
        assert stage.teacher is not None
        if stage.teacher.config.given is not None and not stage.teacher.members:
            return True, "columns of the data"
        split = self.inputs.split(stage, stage.train_split).taught
        size = cache_bytes(stage.needs[1], stage.teacher.shape, split, len(stage.followed))
        there = all(self.store.has(serving(stage, checkpoint, self.store)) for checkpoint in stage.followed)
        return choose(self.runtime.targets, size, self.store.folder, there)

    def _targets(self, stage: Stage) -> TeacherTargets:
        """Cached or live, whichever fits; both give the same numbers."""
        if stage.teacher is None:
            return NoTeacher()
        teacher, (_, needs) = stage.teacher, stage.needs
        cached, why = self.is_cached(stage)
        log.info("stage %s: teacher targets %s", stage.name, why)

        @cache
        def weights() -> Path:
            return self.checkpoints(teacher) if stage.route else self.build(teacher)

        def alone(model: Stage, folder: Path | None) -> LiveTargets:
            split = self.inputs.split(stage.read_by(model), stage.train_split)
            kept = ModelConfig(source=str(folder), head="keep")
            return LiveTargets(build(kept, stage.head) if folder else self._untrained(model), split, needs, self.device)

        def live(checkpoint: int | None) -> LiveTargets | MeanTargets:
            if teacher.members:
                members = [alone(member, self.build(member) / "model") for member in teacher.members]
                return MeanTargets(members, self._mean(teacher))
            if checkpoint == 0:
                return alone(teacher, None)
            return alone(teacher, weights() / ("model" if checkpoint is None else EPOCH.format(checkpoint)))

        def write(folder: Path, checkpoint: int | None) -> None:
            if teacher.config.given is not None and not teacher.members:
                assert stage.config.task is not None
                np.save(folder / "logits.npy", stage.config.task.given_logits(stage.train_split))
            else:
                CachedTargets.write(folder, live(checkpoint))

        def from_cache(checkpoint: int | None) -> CachedTargets:
            spec = serving(stage, checkpoint, self.store)
            folder = self.store.get(spec, partial(write, checkpoint=checkpoint))
            return CachedTargets(folder, self.device, needs)

        of: Callable[[int | None], TeacherTargets]
        if cached:
            of = {checkpoint: from_cache(checkpoint) for checkpoint in stage.followed}.__getitem__
        else:
            weights()  # now, not between two steps of training
            of = live
        return CheckpointTargets(stage.route, of) if stage.route else of(None)


def _take_part(
    stage: Stage,
    store: Path,
    runtime: Runtime,
    devices: list[Device],
    folder: Path,
    pause_after: int | None,
    group: ProcessGroup,
) -> None:
    """What a further process does for the training of a stage: the same as the first one, in silence."""
    quiet()
    here = runtime.model_copy(update={"device": str(devices[group.rank].torch), "num_processes": 1})
    pipeline = Pipeline(Store(store), here)
    data, targets = pipeline.inputs.data(stage), pipeline._targets(stage)
    fit(pipeline._training(stage, data, targets, folder, None, pause_after, group))
