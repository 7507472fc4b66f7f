"""The parts of a training: the learner, the procedure, the machine, and the record of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distill_runner.methods.base import Method
from distill_runner.training.config import Optim, Runtime
from distill_runner.training.data import Data
from distill_runner.training.devices import Device
from distill_runner.training.meter import Log
from distill_runner.training.processes import ALONE, ProcessGroup
from distill_runner.training.teachers import TeacherTargets

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Learner:
    """A model, the method bound to it, its training data, and a teacher's outputs for that data."""

    model: PreTrainedModel
    method: Method
    data: Data
    teacher: TeacherTargets


@dataclass(frozen=True)
class Procedure:
    """Optimiser, seed and selection of the epoch to keep.

    Attributes:
        seed: seed of the order of examples and of dropout.
        select_best: keep the model of the epoch with the best first metric, otherwise the model of the last epoch.
        pause_after: stop after this many epochs, unless training is finished by then.
    """

    optim: Optim
    seed: int
    select_best: bool = False
    pause_after: int | None = None


@dataclass(frozen=True)
class Machine:
    """Device, runtime options and process group used for training.

    Attributes:
        group: processes that share every update. All have the same parts; only the first process writes.
    """

    device: Device
    runtime: Runtime
    group: ProcessGroup = ALONE


@dataclass(frozen=True)
class Record:
    """Where a training writes its model and reports its metrics.

    Attributes:
        folder: folder of the artifact; training resumes from a checkpoint in it.
        report: callback for metrics, called every ``runtime.log_every`` steps and after every epoch.
        keep: folder for the model after each epoch, named by ``EPOCH``; None saves only the model to keep.
    """

    folder: Path
    report: Log
    keep: Path | None = None
