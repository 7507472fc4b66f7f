"""A finished run's student and the task that it was trained on, to predict other texts with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

import yaml

from distill_runner.common.errors import UserError
from distill_runner.datasets.reading.folders import READERS

if TYPE_CHECKING:
    import numpy as np

    from distill_runner.datasets.split import Split
    from distill_runner.kinds import Task

Read = TypeVar("Read")
TEST = "test"


@dataclass(frozen=True)
class Student:
    """``folder`` is the run's and has the model in ``model``; ``task`` is what it was trained on, resolved."""

    folder: Path
    task: "Task"

    @classmethod
    def read(cls, folder: Path) -> "Student":
        """
        Raises:
            UserError: the folder holds no finished run.
        """
        from distill_runner.common.schema import typed
        from distill_runner.kinds import kind_of

        remedy = "Name the folder of a finished run: outputs/runs/<name>."
        if not (folder / "model" / "config.json").is_file():
            raise UserError("folder", folder, "holds no student", remedy)
        try:
            described = yaml.safe_load((folder / "config.yaml").read_text())["stages"]["student"]["task"]
        except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
            raise UserError("folder", folder, "has no config.yaml of a run", remedy) from error
        return cls(folder, typed(kind_of(described), described, "task.").resolved())

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def outputs(self, task: "Task", device: str) -> "np.ndarray":
        """Outputs of the head, (N, C) in the order of the test split of ``task``."""
        return self.read_off(task, device, lambda outputs, _split: outputs)

    def read_off(self, task: "Task", device: str, read: Callable[["np.ndarray", "Split"], Read]) -> Read:
        """What ``read`` makes of the outputs of the head for the test split of ``task``, and of that split."""
        from distill_runner.common.terminal import quiet
        from distill_runner.models.build import build
        from distill_runner.models.config import ModelConfig
        from distill_runner.models.sources import read_tokenizer
        from distill_runner.training.devices import Device
        from distill_runner.training.evaluate import predict

        quiet()
        place = Device.of(device, "fp32")
        model = place.place(build(ModelConfig(source=str(self.model), head="keep"), task.head))
        with TemporaryDirectory() as folder:
            task.write(Path(folder), task.examples(task.test[TEST]), read_tokenizer(str(self.model)))
            split = task.open(Path(folder))
            return read(predict(model, split, place), split)

    def outputs_of_file(self, file: Path, device: str) -> "np.ndarray":
        """The same for a file whose columns have the names of the task's.

        Raises:
            UserError: it cannot be read.
        """
        if not file.is_file():
            raise UserError("file", file, "there is no such file")
        if file.suffix not in READERS:
            raise UserError("file", file, "is of no kind that can be read", f"Known: {', '.join(READERS)}.")
        with TemporaryDirectory() as folder:  # alone: the file's folder may hold others of like names
            (Path(folder) / file.name).with_stem(TEST).symlink_to(file.absolute())
            place = {"dataset": folder, "config": None, "test": {TEST: TEST}}
            return self.outputs(self.task.model_copy(update=place), device)
