"""``distill-run predict`` and ``submit``: predictions of finished students for a file, or for the test splits of GLUE.

GLUE's server (https://gluebenchmark.com/submit) takes one zip file with a file for each task. A line has ``index`` and
``prediction``: class names for the inference tasks, 0 or 1 for the others, scores from 0 to 5 for STS-B.
"""

import csv
import io
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import yaml

from distill_runner.commands.parser import task_options, write_file
from distill_runner.common.errors import UserError, require_choice
from distill_runner.deploy.folder import TEST, ModelFolder


@dataclass(frozen=True)
class ServerFile:
    """A file that the server takes.

    Attributes:
        name: file name in the zip file.
        task: GLUE configuration on the hub whose student predicts the file.
        config, split: GLUE configuration and split that the student predicts.
        size: number of lines that the server expects, without the header.
        class_names: whether the server expects names of classes; false for numbers.
    """

    name: str
    task: str
    config: str
    split: str
    size: int
    class_names: bool = False


FILES = [ServerFile(**row) for row in yaml.safe_load(Path(__file__).with_name("glue_files.yaml").read_text("utf-8"))]


def predict(options: Namespace) -> None:
    """Write a model's prediction for each row of a file; what was read of the file goes to standard error.

    Raises:
        UserError: the folder has no model, or the file cannot be read.
    """
    model = ModelFolder.read(options.folder, options=task_options(options.overrides))
    content, line = model.predict_file(options.file, options.device, options.encoding, Path(options.out or "").suffix)
    for text in (line, *(f"warning: {warning}" for warning in line.warnings)):
        print(text, file=sys.stderr)
    if options.out:
        write_file(options.out, content)
        print(f"{options.out}: predictions for {options.file} by {options.folder}")
    elif isinstance(content, str):
        print(content, end="")
    else:
        sys.stdout.buffer.write(content)


def submit(options: Namespace) -> None:
    """Write students' predictions for the test splits of GLUE, and print what the file contains.

    A student of questions writes its answers instead.

    Raises:
        UserError: a folder has no student, two students have the same task, or data cannot be read.
    """
    students = [ModelFolder.read(str(folder)) for folder in options.folders]
    if students[0].task.has_ids:
        return _write_answers(students, options)
    by_task: dict[str, ModelFolder] = {}
    for student in students:
        config = str(student.task.config)
        if Path(student.task.dataset).name != "glue" or config not in {file.task for file in FILES}:
            problem = f"its task {student.task.name} is not one of GLUE's"
            raise UserError("folder", student.name, problem, "Predict a file of your own with distill-run predict.")
        if config in by_task:
            problem = f"{by_task[config].name} is also a student of {config}"
            raise UserError("folder", student.name, problem, "Name one run for each task.")
        by_task[config] = student
    content = io.BytesIO()
    with ZipFile(content, "w") as archive:
        for file in FILES:
            if (predictions := _predictions(file, by_task.get(file.task), options.device, options.fill)) is not None:
                text = io.StringIO()
                writer = csv.writer(text, delimiter="\t", lineterminator="\n")
                writer.writerows([("index", "prediction"), *enumerate(predictions)])
                # Without a time: equal predictions give equal bytes.
                archive.writestr(ZipInfo(file.name), text.getvalue(), ZIP_DEFLATED)
    write_file(options.out, content.getvalue())
    print(f"{options.out}: {len(archive.namelist())} of {len(FILES)} files")


def _predictions(file: ServerFile, student: ModelFolder | None, device: str, fill: bool) -> list[str] | None:
    """Return the lines of a file by its student, or constants; None without either. Print which it is."""
    if student is not None:
        test_task = student.task.model_copy(update={"config": file.config, "test": {TEST: file.split}})
        outputs = student.predict(test_task, device, lambda outputs, *_: outputs)
        if file.task == "stsb":
            outputs = outputs.clip(0, 5)  # the range that the server takes
        predictions = test_task.prediction_texts(outputs, file.class_names)
        print(f"{file.name}: {len(predictions)} predictions by {student.name}", flush=True)
        if len(predictions) != file.size:
            print(f"  the server expects {file.size}: is this the whole test split?")
        return predictions
    if not fill:
        print(f"{file.name}: missing, no student of {file.task} (--fill: a constant; the server wants all files)")
        return None
    constant = "entailment" if file.class_names else "0.000" if file.task == "stsb" else "0"
    print(f"{file.name}: no student of {file.task}, filled with {constant}")
    return [constant] * file.size


def _write_answers(students: Sequence[ModelFolder], options: Namespace) -> None:
    """Write answers by id, as JSON for the evaluation scripts of SQuAD and MLQA."""
    student, *others = students
    if others:
        raise UserError("folder", others[0].name, "the file holds the answers of one student", "Name one run folder.")
    task = student.task
    splits = {**task.validation, **task.test}
    name = options.split or next(iter(task.test or task.validation))
    require_choice("--split", name, splits, "there is no such split")
    # The split is read as a test split, since test splits may lack answers.
    test_task = task.model_copy(update={"test": {TEST: splits[name]}, "validation": {}, "languages": {}})
    answers = partial(test_task.prediction_file, suffix="", columns={})
    write_file(options.out, student.predict(test_task, options.device, answers))
    print(f"{options.out}: answers for the split {name} by {student.name}")
