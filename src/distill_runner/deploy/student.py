"""The student of a finished run, with the task that it was trained on, for predictions on other examples."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

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
    """The student of a finished run.

    Attributes:
        folder: folder of the run, with the model in its subfolder ``model``.
        task: resolved task that the student was trained on.
    """

    folder: Path
    task: "Task"

    @classmethod
    def read(cls, folder: Path) -> "Student":
        """Read the student of the run in ``folder``.

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
        if described is None:
            raise UserError("folder", folder, "holds a student without a task, such as one of method=pretrain", remedy)
        kind = kind_of(described)
        described |= _found_in_data(folder, described, kind.has_classes)
        return cls(folder, typed(kind, described, "task.").resolved())

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def outputs(self, task: "Task", device: str) -> "np.ndarray":
        """Return the outputs of the head for the test split of ``task``, (N, C), in the order of the split."""
        return self.read_off(task, device, lambda outputs, _split: outputs)

    def read_off(self, task: "Task", device: str, read: Callable[["np.ndarray", "Split"], Read]) -> Read:
        """Run the student on the test split of ``task`` and return ``read(outputs, split)``.

        The outputs of the head are (N, C). The split is on disk only during the call, hence the callback.
        """
        from distill_runner.common.terminal import quiet
        from distill_runner.models.build import build
        from distill_runner.models.config import ModelConfig
        from distill_runner.models.sources import read_tokenizer
        from distill_runner.training.devices import Device
        from distill_runner.training.evaluate import predict

        quiet()
        place = Device.of(device, "fp32")
        model = place.place(build(ModelConfig(source=str(self.model), head="keep"), task.head))
        tokenizer = read_tokenizer(str(self.model)) if task.tokenized else None
        with TemporaryDirectory() as folder:
            task.write(Path(folder), task.examples(task.test[TEST]), tokenizer)
            split = task.open(Path(folder))
            return read(predict(model, split, place), split)

    def outputs_of_file(self, file: Path, device: str) -> "np.ndarray":
        """Return the outputs of the head for the examples in ``file``, (N, C), in the order of the file.

        The columns of ``file`` must have the names of the task's columns.

        Raises:
            UserError: the file cannot be read.
        """
        if not file.is_file():
            raise UserError("file", file, "there is no such file")
        if file.suffix not in READERS:
            raise UserError("file", file, "has a suffix that cannot be read", f"Known: {', '.join(READERS)}.")
        # ``file`` is linked into an empty folder: a file beside it, such as test-2.csv, would belong to the same split.
        with TemporaryDirectory() as folder:
            (Path(folder) / file.name).with_stem(TEST).symlink_to(file.absolute())
            # Labels, which the file need not have, are not read.
            place = {"dataset": folder, "config": None, "test": {TEST: TEST}, "validation": {}, "label": ""}
            return self.outputs(self.task.model_copy(update=place), device)


def _found_in_data(folder: Path, described: Mapping[str, Any], has_classes: bool) -> dict[str, Any]:
    """Return the options of the task that the run found in its training data, which may be gone since."""
    try:
        result = json.loads((folder / "result.json").read_text())
        columns, labels, names = result["data"]["columns"], result["data"]["labels"], result["labels"]
    except (OSError, ValueError, KeyError, TypeError):  # of an older version
        return {}
    found: dict[str, Any] = {}
    if not described.get("columns"):
        found |= {"columns": columns, "label": labels if isinstance(described.get("label"), list) else labels[0]}
    if has_classes and not described.get("labels"):
        found["labels"] = names
    if described.get("class_weights"):
        found["class_weights"] = None  # only of training
    return found
