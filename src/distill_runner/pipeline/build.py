"""Build the artifacts of stages, each once, in the order of their dependencies."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill_runner.common.errors import UserError, within
from distill_runner.common.seeds import stage_seed, undisturbed
from distill_runner.common.terminal import quiet
from distill_runner.models.build import require_cuttable
from distill_runner.models.sources import require_weights
from distill_runner.pipeline.ensembles import judge_mean
from distill_runner.pipeline.inputs import Inputs
from distill_runner.pipeline.models import initial_model, kept_model
from distill_runner.pipeline.planning import fillable
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.status import write_json
from distill_runner.pipeline.store import Store, link_tree, remove
from distill_runner.pipeline.targets import teacher_targets
from distill_runner.training.config import Runtime
from distill_runner.training.data import Data
from distill_runner.training.devices import Device
from distill_runner.training.meter import Log
from distill_runner.training.parts import Learner, Machine, Procedure, Record
from distill_runner.training.processes import ProcessGroup, together
from distill_runner.training.teachers import TeacherTargets
from distill_runner.training.train import CHECKPOINT, EPOCH, PREDICTIONS, Training, fit

log = logging.getLogger(__name__)

METRICS = "metrics.json"
"""The last file of a trained stage: its scores and sizes."""
YIELD = "stage"
"""Folder in the artifact of a stage's checkpoints that holds everything the stage itself yields."""

Report = Callable[[str], Log]
"""Function from the name of a stage to the function that receives the stage's logged numbers."""


def discard(_stage: str) -> Log:
    """Return a log function that ignores the numbers."""
    return lambda values, step, epoch: None


class Pipeline:
    """Builder of stages into a store. A GPU is claimed only when there is something to compute.

    Args:
        report: gives the function that receives the numbers of a stage's training, by the stage's name.
    """

    def __init__(self, store: Store, runtime: Runtime, report: Report = discard) -> None:
        self.store, self.runtime, self.report = store, runtime, report
        self.inputs = Inputs(store, lambda: self.device)

    @cached_property
    def devices(self) -> list[Device]:
        """Device of each process."""
        of = self.runtime
        devices = Device.several(of.device, of.precision, of.workers_per_gpu, of.num_processes)
        return [replace(device, compile=of.compile) for device in devices]

    @property
    def device(self) -> Device:
        return self.devices[0]

    def prepare(self, stage: Stage) -> None:
        """Read the inputs of all stages to build, so that missing inputs are reported before anything is trained."""
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
                require_cuttable(stage.config.model)
            self._check_max_steps(stage, len(self.inputs.data(stage)))

    @staticmethod
    def _check_max_steps(stage: Stage, num_examples: int) -> None:
        """Tell that ``optim.max_steps`` ends the training before its epochs, which schedules and routes count in."""
        optim = stage.config.optim
        if optim.max_steps is None or optim.epochs == 0:
            return
        trained = optim.num_epochs(num_examples)
        if optim.epochs is not None and trained < optim.epochs:
            told = "stage %s: optim.max_steps=%d ends the training in epoch %d of %d"
            log.warning(told, stage.name, optim.max_steps, trained, optim.epochs)
        with torch.device("meta"):
            method = stage.method()
        try:
            method.check_epochs(trained)
        except UserError as error:
            problem = f"ends the training in epoch {trained}, but {error.problem}"
            raise UserError(".optim.max_steps", optim.max_steps, problem, "Raise it, or leave it out.") from error

    def build(self, stage: Stage, pause_after: int | None = None) -> Path:
        """Return the folder of the stage's artifact; build it, and the upstream stages it needs, if it is missing.

        Raises:
            Paused: after ``pause_after`` epochs of this stage.
        """
        with within(f"stages.{stage.name}"):
            return self.store.get(stage.spec, lambda folder: self._yield(stage, folder, pause_after))

    def fill_targets(self, stage: Stage) -> None:
        """Cache the teacher outputs that the stage and its upstream stages read, for teachers that are in the store.

        Nothing is trained.
        """
        readers = [reader for reader, _ in fillable(stage, self.store, self.runtime.targets)]
        for reader in readers:
            teacher_targets(reader, self)
        if not readers:
            log.info("nothing to cache: the outputs are cached or cannot be, or the teacher is not built yet")

    def checkpoints(self, stage: Stage, pause_after: int | None = None) -> Path:
        """Return the folder with the stage's model after each epoch and, in ``YIELD``, all that the stage yields.

        A stage that was built without checkpoints is trained again. The result is the same on a CPU, and similar
        elsewhere.

        Raises:
            Paused: as in ``build``.
        """

        def train(folder: Path) -> None:
            if not (folder / YIELD / CHECKPOINT).exists() and not _is_complete(folder / YIELD):
                remove(folder / YIELD)  # left by a build that was interrupted at its end; shares files with the epochs
            (folder / YIELD).mkdir(exist_ok=True)
            self._fit(stage, folder / YIELD, folder, pause_after)

        return self.store.get(stage.checkpoints_spec, train)

    def _yield(self, stage: Stage, folder: Path, pause_after: int | None) -> None:
        if stage.config.given is not None:
            members = [self.build(member) for member in stage.members]
            judge_mean(stage, folder, members, lambda name: self.inputs.split(stage.members[0], name))
            return
        keeps = stage.config.keep_checkpoints
        kept = self.checkpoints(stage, pause_after) if keeps else self.store.find(stage.checkpoints_spec)
        if kept is not None:
            link_tree(kept / YIELD, folder)
        else:
            self._fit(stage, folder, pause_after=pause_after)

    def _fit(self, stage: Stage, folder: Path, keep: Path | None = None, pause_after: int | None = None) -> None:
        if _is_complete(folder):
            log.info("stage %s: complete, an earlier run was interrupted after its last step", stage.name)
            return
        if stage.teacher and stage.route and not self.store.has(stage.teacher.spec):
            self.checkpoints(stage.teacher)  # before the teacher's artifact, so that both come from the same training
        for upstream in stage.upstream:
            self.build(upstream)
        log.info("stage %s: building %s", stage.name, stage.key)
        data, targets = self.inputs.data(stage), teacher_targets(stage, self)
        # By now all inputs are in the store, where the other processes find them.
        started, record = time.monotonic(), Record(folder, self.report(stage.name), keep)
        job = partial(_take_part, stage, self.store.folder, self.runtime, self.devices, folder, pause_after)
        with together([device.torch for device in self.devices], job) as group:
            training = self.training(stage, data, targets, record, pause_after, group)
            history = fit(training)
        if keep is not None:
            link_tree(keep / EPOCH.format(history.best), folder / "model")
        if (tokenizer := self.inputs.tokenizer(stage)) is not None:  # a fresh one: those used above may truncate
            tokenizer.save_pretrained(folder / "model")
        if stage.config.task is not None:
            stage.config.task.save_reader(folder / "model")
        judged, outputs = data.judge(lambda: self.device.place(kept_model(stage, folder / "model")))
        for name, predictions in outputs.items():
            np.save(folder / PREDICTIONS.format(name), predictions)
        saved = json.loads((folder / "model" / "config.json").read_text())  # a new model has its tokenizer's size
        metrics = asdict(history) | {
            "examples_per_second": history.examples_per_second,
            "wall_seconds": time.monotonic() - started,
            "metrics": judged | history.epochs[history.best - 1],
            "num_params": training.num_params,
            "shape": asdict(stage.shape) | {"vocab_size": saved.get("vocab_size", stage.shape.vocab_size)},
        }
        write_json(folder / METRICS, metrics)
        remove(folder / CHECKPOINT)

    def training(
        self,
        stage: Stage,
        data: Data,
        targets: TeacherTargets,
        record: Record,
        pause_after: int | None,
        group: ProcessGroup,
    ) -> Training:
        """Return the training of a stage, before its first update or at the point where it was interrupted."""
        model = self._initial(stage)
        return Training(
            Learner(model, stage.method(), data, targets),
            Procedure(
                stage.config.optim,
                stage_seed(stage.config.seed, stage.name),
                select_best=stage.config.select == "best",
                pause_after=pause_after,
            ),
            Machine(self.device, self.runtime, group),
            record,
        )

    def untrained(self, stage: Stage) -> Any:
        """Return the stage's model as it is before its first epoch, and restore the random number generators."""
        with undisturbed():
            return self._initial(stage)

    def _initial(self, stage: Stage) -> Any:
        source = self.build(stage.source) / "model" if stage.source else None
        return initial_model(stage, source, self.inputs.vocab_size(stage))


def _is_complete(folder: Path) -> bool:
    """Whether an earlier build filled the folder, and was interrupted before the store took it over."""
    return (folder / METRICS).exists() and not (folder / CHECKPOINT).exists()


def _take_part(
    stage: Stage,
    store: Path,
    runtime: Runtime,
    devices: list[Device],
    folder: Path,
    pause_after: int | None,
    group: ProcessGroup,
) -> None:
    """Take part in the training of a stage from a further process: the same work as the first one, without output."""
    quiet()
    here = runtime.model_copy(update={"device": str(devices[group.rank].torch), "num_processes": 1})
    pipeline = Pipeline(Store(store), here)
    data, targets = pipeline.inputs.data(stage), teacher_targets(stage, pipeline)
    fit(pipeline.training(stage, data, targets, Record(folder, discard(stage.name)), pause_after, group))
