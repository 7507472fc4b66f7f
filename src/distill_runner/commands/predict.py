"""``distill-run predict`` and ``submit``: predictions of finished students for a file, or for the test splits of GLUE.

GLUE's server (https://gluebenchmark.com/submit) takes one zip file with a file for each task. A line has ``index`` and
``prediction``: class names for the inference tasks, 0 or 1 for the others, scores from 0 to 5 for STS-B.
"""

import csv
import io
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from distill_runner.commands.parser import write_file
from distill_runner.common.errors import UserError, suggestion
from distill_runner.deploy.student import TEST, Student

if TYPE_CHECKING:
    from distill_runner.tasks import Task


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


FILES = (
    ServerFile("AX.tsv", "mnli", "ax", TEST, 1104, class_names=True),
    ServerFile("CoLA.tsv", "cola", "cola", TEST, 1063),
    ServerFile("MNLI-m.tsv", "mnli", "mnli", "test_matched", 9796, class_names=True),
    ServerFile("MNLI-mm.tsv", "mnli", "mnli", "test_mismatched", 9847, class_names=True),
    ServerFile("MRPC.tsv", "mrpc", "mrpc", TEST, 1725),
    ServerFile("QNLI.tsv", "qnli", "qnli", TEST, 5463, class_names=True),
    ServerFile("QQP.tsv", "qqp", "qqp", TEST, 390965),
    ServerFile("RTE.tsv", "rte", "rte", TEST, 3000, class_names=True),
    ServerFile("SST-2.tsv", "sst2", "sst2", TEST, 1821),
    ServerFile("STS-B.tsv", "stsb", "stsb", TEST, 1379),
    ServerFile("WNLI.tsv", "wnli", "wnli", TEST, 146),
)
CONSTANTS = {"AX": "entailment", "MNLI-m": "entailment", "MNLI-mm": "entailment", "QNLI": "entailment"}
CONSTANTS |= {"RTE": "entailment", "STS-B": "0.000"}
"""Predictions that fill files without a student, by the file's name; 0 for files that are not listed."""


def predict(options: Namespace) -> None:
    """Write a student's prediction for each row of a file; what was read of the file goes to standard error.

    Raises:
        UserError: the folder has no student, or the file cannot be read.
    """
    suffix = options.out.suffix if options.out else ""
    content, line = Student.read(options.run).predict_file(options.file, options.device, options.encoding, suffix)
    for text in (line, *(f"warning: {warning}" for warning in line.warnings)):
        print(text, file=sys.stderr)
    if options.out:
        write_file(options.out, content)
        print(f"{options.out}: predictions for {options.file} by {options.run}")
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
    students = [Student.read(folder) for folder in options.folders]
    if students[0].task.has_ids:
        return _write_answers(students, options)
    by_task: dict[str, Student] = {}
    for student in students:
        task = _glue_config(student)
        if task is None:
            problem = f"its task {student.task.name} is not one of GLUE's"
            raise UserError("folder", student.folder, problem, "Predict a file of your own with distill-run predict.")
        if task in by_task:
            problem = f"{by_task[task].folder} is also a student of {task}"
            raise UserError("folder", student.folder, problem, "Name one run for each task.")
        by_task[task] = student
    contents = dict(_contents(by_task, options.device, options.fill))
    write_file(options.out, _zip(contents))
    print(f"{options.out}: {len(contents)} of {len(FILES)} files")


def _write_answers(students: Sequence[Student], options: Namespace) -> None:
    """Write answers by id, as JSON for the evaluation scripts of SQuAD and MLQA."""
    student, *others = students
    if others:
        raise UserError("folder", others[0].folder, "the file holds the answers of one student", "Name one run folder.")
    task = student.task
    splits = {**task.validation, **task.test}
    name = options.split or next(iter(task.test or task.validation))
    if name not in splits:
        raise UserError("--split", name, "there is no such split", suggestion(name, splits))
    # The split is read as a test split, since test splits may lack answers.
    test_task = task.model_copy(update={"test": {TEST: splits[name]}, "validation": {}, "languages": {}})
    write_file(options.out, student.predict(test_task, options.device, test_task.prediction_file))
    print(f"{options.out}: answers for the split {name} by {student.folder}")


def _glue_config(student: Student) -> str | None:
    """Return the GLUE configuration of the student's task; None if the task is not one of GLUE's."""
    is_glue = Path(student.task.dataset).name == "glue" and any(file.task == student.task.config for file in FILES)
    return student.task.config if is_glue else None


def _contents(students: Mapping[str, Student], device: str, fill: bool) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each file, and print a line for each."""
    for file in FILES:
        if student := students.get(file.task):
            test_task = student.task.model_copy(update={"config": file.config, "test": {TEST: file.split}})
            predictions = _predictions(student, test_task, device, file.class_names)
            print(f"{file.name}: {len(predictions)} predictions by {student.folder}", flush=True)
            if len(predictions) != file.size:
                print(f"  the server expects {file.size}: is this the whole test split?")
            yield file.name, _tsv(predictions)
        elif fill:
            constant = CONSTANTS.get(Path(file.name).stem, "0")
            print(f"{file.name}: no student of {file.task}, filled with {constant}")
            yield file.name, _tsv([constant] * file.size)
        else:
            print(f"{file.name}: missing, no student of {file.task} (--fill: a constant; the server wants all files)")


def _predictions(student: Student, task: "Task", device: str, class_names: bool) -> list[str]:
    """Return the predictions for the test split of ``task`` as text, one for each example."""
    outputs = student.outputs(task, device)
    if _glue_config(student) == "stsb":
        outputs = outputs.clip(0, 5)  # the range that the server takes
    return task.prediction_texts(outputs, class_names)


def _tsv(predictions: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\n")
    writer.writerow(["index", "prediction"])
    writer.writerows(enumerate(predictions))
    return text.getvalue()


def _zip(contents: Mapping[str, str]) -> bytes:
    """Return the zip file as bytes. Equal contents give equal bytes, since no times are stored."""
    file = io.BytesIO()
    with ZipFile(file, "w") as archive:
        for name, text in contents.items():
            archive.writestr(ZipInfo(name), text, ZIP_DEFLATED)
    return file.getvalue()
