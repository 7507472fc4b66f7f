"""Outputs of a stage's teacher: cached in the store or computed during training, whichever fits."""

import logging
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from distill_runner.pipeline.caches import cached_share, read_by, serving, why_live
from distill_runner.pipeline.ensembles import mean_of
from distill_runner.pipeline.inputs import Inputs
from distill_runner.pipeline.models import kept_model
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store
from distill_runner.training.cache_choice import cache_bytes, choose
from distill_runner.training.config import Runtime
from distill_runner.training.data import share_of
from distill_runner.training.devices import Device
from distill_runner.training.teachers import (
    CachedTargets,
    CheckpointTargets,
    LiveTargets,
    MeanTargets,
    NoTeacher,
    RoundedTargets,
    TeacherTargets,
)
from distill_runner.training.train import EPOCH

log = logging.getLogger(__name__)


class Builder(Protocol):
    """Interface of the ``Pipeline`` that builds the teacher."""

    store: Store
    runtime: Runtime
    inputs: Inputs

    @property
    def device(self) -> Device: ...

    def build(self, stage: Stage) -> Path: ...

    def checkpoints(self, stage: Stage) -> Path: ...

    def untrained(self, stage: Stage) -> Any: ...


def is_cached(stage: Stage, builder: Builder) -> tuple[bool, str]:
    """Return whether the outputs of the stage's teacher are read from a cache, and the reason."""
    mode = builder.runtime.targets
    if why := why_live(stage, mode):
        return False, why
    assert stage.teacher is not None
    if stage.teacher.has_columns:
        return True, "read from columns of the data"
    split = builder.inputs.split(stage, stage.data.train_split).taught
    num, share = len(stage.followed), cached_share(stage)
    size = cache_bytes(stage.needs[1], stage.teacher.shape, split, num, stage.teacher_outputs, share)
    there = all(builder.store.has(serving(stage, checkpoint, builder.store)) for checkpoint in stage.followed)
    return choose(mode, size, builder.store.folder, there)


def teacher_targets(stage: Stage, builder: Builder) -> TeacherTargets:
    """Return the outputs of the stage's teacher, cached or live, whichever fits; both give the same numbers."""
    if stage.teacher is None:
        return NoTeacher()
    cached, why = is_cached(stage, builder)
    log.info("stage %s: teacher targets %s", stage.name, why)
    teacher = _Teacher(stage, stage.teacher, builder)
    of: Callable[[int | None], TeacherTargets]
    if cached:
        of = {checkpoint: teacher.from_cache(checkpoint) for checkpoint in stage.followed}.__getitem__
    else:
        teacher.weights()  # built now, not between two steps of training
        rounded = stage.teacher_outputs == "float16"
        of = (lambda checkpoint: RoundedTargets(teacher.live(checkpoint))) if rounded else teacher.live
    return CheckpointTargets(stage.route, of) if stage.route else of(None)


class _Teacher:
    """Outputs of a stage's teacher, or of one of its checkpoints."""

    def __init__(self, stage: Stage, teacher: Stage, builder: Builder) -> None:
        self.stage, self.teacher, self.builder = stage, teacher, builder
        self.needs = stage.needs[1]
        self.weights = cache(lambda: (builder.checkpoints if stage.route else builder.build)(teacher))
        """The folder of the teacher, built if it is not there."""

    def live(self, checkpoint: int | None) -> LiveTargets | MeanTargets:
        if self.teacher.members:
            members = [self._alone(member, self.builder.build(member) / "model") for member in self.teacher.members]
            return MeanTargets(members, mean_of(self.teacher))
        if checkpoint == 0:
            return self._alone(self.teacher, None)
        name = "model" if checkpoint is None else EPOCH.format(checkpoint)
        return self._alone(self.teacher, self.weights() / name)

    def _alone(self, model: Stage, folder: Path | None) -> LiveTargets:
        """Return the live outputs of ``model`` as saved in ``folder``; before its first epoch if ``folder`` is None."""
        split = self.builder.inputs.split(read_by(self.stage, model), self.stage.data.train_split)
        network = kept_model(self.stage, folder) if folder else self.builder.untrained(model)
        return LiveTargets(network, split, self.needs, self.builder.device)

    def from_cache(self, checkpoint: int | None) -> CachedTargets:
        store = self.builder.store
        folder = store.get(serving(self.stage, checkpoint, store), partial(self._write, checkpoint=checkpoint))
        return CachedTargets(folder, self.builder.device, self.needs)

    def _write(self, folder: Path, checkpoint: int | None) -> None:
        if self.teacher.has_columns:
            assert self.stage.config.task is not None
            given = self.stage.config.task.given_logits(self.stage.data.train_split)
            np.save(folder / "logits.npy", np.tile(given, (self.stage.data.views or 1, 1)))
        else:
            teacher, share = self.live(checkpoint), cached_share(self.stage)
            chosen = share_of(len(teacher.split), share) if share < 1 else None
            CachedTargets.write(folder, teacher, self.stage.teacher_outputs, chosen)
