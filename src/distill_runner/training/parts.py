"""The parts that a training is made of: who learns, by which procedure, on which machine, and what is kept of it."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from distill_runner.methods.base import Method
from distill_runner.training.config import Optim, Runtime
from distill_runner.training.data import Data
from distill_runner.training.devices import Device
from distill_runner.training.meter import Log
from distill_runner.training.processes import ALONE, ProcessGroup
from distill_runner.training.teachers import TeacherTargets


@dataclass(frozen=True)
class Learner:
    """A model, the method that is bound to it, its examples, and a teacher's outputs for them."""

    model: PreTrainedModel
    method: Method
    data: Data
    teacher: TeacherTargets


@dataclass(frozen=True)
class Procedure:
    """How it is trained.

    Attributes:
        seed: of the order of examples and of dropout.
        select_best: keep the epoch with the best first metric of the data, else the last one.
        pause_after: stop after that many epochs, if they are not all.
    """

    optim: Optim
    seed: int
    select_best: bool = False
    pause_after: int | None = None


@dataclass(frozen=True)
class Machine:
    """What computes.

    Attributes:
        group: of the processes that share every update; all have the same parts, and the first one writes.
    """

    device: Device
    runtime: Runtime
    group: ProcessGroup = ALONE


@dataclass(frozen=True)
class Record:
    """What is kept and told.

    Attributes:
        folder: of the artifact; a checkpoint in it is taken up.
        report: called every ``runtime.log_every`` steps and after every epoch.
        keep: where the model after each epoch goes, as ``EPOCH``, beside the one to keep; nowhere by default.
    """

    folder: Path
    report: Log
    keep: Path | None = None
