"""The student of a finished run, with the task that it was trained on, for predictions on other examples."""

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from distill_runner.common.errors import UserError
from distill_runner.common.terminal import AccountLine
from distill_runner.datasets.readers.dataset import is_text_encoding
from distill_runner.datasets.readers.files import FORMAT_NAMES, OTHER_FORMATS, PLAIN_TEXT, file_format
from distill_runner.datasets.readers.table import recorded_tables
from distill_runner.datasets.readers.tables import open_split
from distill_runner.tasks.split_account import data_line
from distill_runner.tasks.text import SCORE_FIELDS

if TYPE_CHECKING:
    import numpy as np

    from distill_runner.datasets.splits import Split
    from distill_runner.datasets.tokenization import Examples
    from distill_runner.tasks import Task

Prediction = TypeVar("Prediction")
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
        from distill_runner.common.schema import validate_config
        from distill_runner.tasks import task_type

        remedy = "Name the folder of a finished run: outputs/runs/<name>."
        if not (folder / "model" / "config.json").is_file():
            raise UserError("folder", folder, "holds no student", remedy)
        try:
            config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
            fields = config["stages"]["student"]["task"]
            result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
            raise UserError("folder", folder, "has no config.yaml and result.json of a run", remedy) from error
        if fields is None:
            raise UserError("folder", folder, "holds a student without a task, such as one of method=pretrain", remedy)
        # What the run inferred from its training data, which may be gone since; what only training reads is left out.
        schema, data = task_type(fields), result["data"]
        if not fields.get("columns") and data.get("columns") and data["labels"]:
            label = data["labels"] if isinstance(fields.get("label"), list) else data["labels"][0]
            fields |= {"columns": data["columns"], "label": label}
        fields |= {name: data[name] for name in schema.inferred_fields if fields.get(name) is None and name in data}
        if schema.has_classes and not fields.get("labels"):
            fields["labels"] = result["labels"]
        for name in (SCORE_FIELDS | {"class_weights", "example_weight"}) & schema.model_fields.keys():
            if fields.get(name):
                fields[name] = schema.model_fields[name].default
        return cls(folder, validate_config(schema, fields, "task.").resolved())

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def predict(
        self, task: "Task", device: str, read: Callable[["np.ndarray", "Split", "Examples"], Prediction]
    ) -> Prediction:
        """Run the student on the test split of ``task`` and return ``read(outputs, split, examples)``.

        The split is on disk only during the call, hence the callback.

        Args:
            task: the student's task, with other data or the same.
            device: name of the device.
            read: function of the outputs of the head, the split, and the examples that the split was written from.
        """
        import numpy as np

        from distill_runner.common.library_switches import quiet_transformers
        from distill_runner.models.build import load_model
        from distill_runner.models.sources import resolve_source
        from distill_runner.training.data import predict
        from distill_runner.training.devices import Device

        quiet_transformers()
        place = Device.from_name(device, "fp32")
        model = place.place(load_model(self.model, task.head))
        tokenizer = resolve_source(str(self.model)).tokenizer() if task.tokenized else None
        with TemporaryDirectory() as folder:
            examples = task.examples(task.test[TEST])
            task.write(Path(folder), examples, tokenizer)
            split = task.open(Path(folder))
            outputs = predict(model, split, place)
            if not np.isfinite(outputs).all():
                problem = f"its student gives {int((~np.isfinite(outputs)).sum())} outputs that are not finite"
                raise UserError("folder", self.folder, problem, "Its training diverged: try a lower optim.lr.")
            return read(outputs, split, examples)

    def predict_file(
        self, file: Path, device: str, encoding: str | None = None, suffix: str = ""
    ) -> tuple[str | bytes, AccountLine]:
        """Return the predictions for the examples in ``file``, as the content of a prediction file, and their account.

        The columns of ``file`` must have the names of the task's columns. In a ``.txt`` file, each line is a text. A
        prediction file in CSV keeps all columns of ``file``, behind the predictions.

        Args:
            encoding: as ``Dataset.encoding``, for this file.
            suffix: ending of the prediction file's name, for tasks that write several formats.
        Raises:
            UserError: the file cannot be read.
        """
        if not file.is_file():
            problem = "is not a file that can be read" if file.exists() else "there is no such file"
            raise UserError("file", file, problem)
        if encoding is not None and not is_text_encoding(encoding):
            raise UserError("--encoding", encoding, "there is no such encoding of text", "Such as cp1252 or utf-16.")
        if self.task.unread_files:
            remedy = f"SentenceTransformer('{self.folder}/model') encodes texts."
            raise UserError("folder", self.folder, self.task.unread_files, remedy)
        if not file_format(file):
            remedy = OTHER_FORMATS.get(file.suffix.lower(), f"Known: {FORMAT_NAMES}.")
            raise UserError("file", file, "is of a format that is not read", remedy)
        # A single file is the split ``train``. Labels, which the file need not have, are not read.
        data = {"dataset": str(file), "config": None, "train": "", "test": {TEST: "train"}, "validation": {}}
        fields: dict[str, Any] = {**data, "label": "", "encoding": encoding}
        if file_format(file) == PLAIN_TEXT:
            if len(self.task.columns) != 1 and not self.task.single_texts:
                problem = f"has one text a line, but the student reads {' and '.join(self.task.columns)}"
                raise UserError("file", file, problem, "Give a CSV or JSON lines file with these columns.")
            fields["columns"] = ["text"]
        task = self.task.model_copy(update=fields)

        def with_account(outputs: "np.ndarray", split: "Split", examples: "Examples") -> Any:
            account = task.account(TEST, examples, tables)
            line = data_line({file.name: account}, {}, "text" if task.tokenized else "image")
            return task.prediction_file(outputs, split, examples, suffix), line

        try:
            with recorded_tables() as tables:
                content, line = self.predict(task, device, with_account)
            has_columns = file_format(file) != PLAIN_TEXT and task.tokenized
            return _with_columns(content, task) if has_columns else content, line
        except UserError as error:
            if not error.key.startswith("task."):
                raise
            remedy = error.remedy.replace("task.encoding=", "--encoding ")
            raise UserError("file", file, error.problem, remedy) from error


def _with_columns(content: str | bytes, task: "Task") -> str | bytes:
    """Return a prediction file in CSV with all columns of the file that was predicted; other formats as they are.

    A column whose name the predictions have, such as ``index``, gets the prefix ``input_``.
    """
    if not isinstance(content, str) or not content.startswith("index,"):
        return content

    def cell(value: Any) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        return json.dumps(value, ensure_ascii=False, default=str)

    header, *rows = csv.reader(io.StringIO(content))
    with open_split(task, "train") as table:
        columns = table.columns(list(table.column_names))
    if any(len(values) != len(rows) for values in columns.values()):  # a prediction is not of one row
        return content
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*header, *(f"input_{name}" if name in header else name for name in columns)])
    writer.writerows([*row, *map(cell, values)] for row, *values in zip(rows, *columns.values(), strict=True))
    return text.getvalue()
