"""``distill-run-submit``: write students' predictions for test splits, in the format of GLUE's leaderboard.

The server (https://gluebenchmark.com/submit) takes one zip file with a file for each task. A line has ``index`` and
``prediction``: class names for the inference tasks, 0 or 1 for the others, scores from 0 to 5 for STS-B.

For a question-answering student, answers by id are written instead, for the evaluation scripts of SQuAD and MLQA.
"""

import csv
import io
import json
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from distill_runner.commands.arguments import Parser, ended, require_folder, write
from distill_runner.common.errors import UserError, nearest
from distill_runner.deploy.student import TEST, Student

if TYPE_CHECKING:
    from distill_runner.kinds import Task


@dataclass(frozen=True)
class ServerFile:
    """A file that the server takes.

    Attributes:
        name: file name in the zip file.
        task: GLUE configuration on the hub whose student predicts the file.
        data, split: GLUE configuration and split that the student predicts.
        size: number of lines that the server expects, without the header.
        names: whether the server expects names of classes; false for numbers.
    """

    name: str
    task: str
    data: str
    split: str
    size: int
    names: bool = False


FILES = (
    ServerFile("AX.tsv", "mnli", "ax", TEST, 1104, names=True),
    ServerFile("CoLA.tsv", "cola", "cola", TEST, 1063),
    ServerFile("MNLI-m.tsv", "mnli", "mnli", "test_matched", 9796, names=True),
    ServerFile("MNLI-mm.tsv", "mnli", "mnli", "test_mismatched", 9847, names=True),
    ServerFile("MRPC.tsv", "mrpc", "mrpc", TEST, 1725),
    ServerFile("QNLI.tsv", "qnli", "qnli", TEST, 5463, names=True),
    ServerFile("QQP.tsv", "qqp", "qqp", TEST, 390965),
    ServerFile("RTE.tsv", "rte", "rte", TEST, 3000, names=True),
    ServerFile("SST-2.tsv", "sst2", "sst2", TEST, 1821),
    ServerFile("STS-B.tsv", "stsb", "stsb", TEST, 1379),
    ServerFile("WNLI.tsv", "wnli", "wnli", TEST, 146),
)
CONSTANTS = {"AX": "entailment", "MNLI-m": "entailment", "MNLI-mm": "entailment", "QNLI": "entailment"}
CONSTANTS |= {"RTE": "entailment", "STS-B": "0.000"}
"""Predictions that fill files without a student, by the file's name; 0 for files that are not listed."""
EXAMPLES = """examples:
  distill-run-submit outputs/runs/rte-alp-* outputs/runs/cola-alp-* --out submission.zip --fill
"""


def main() -> None:
    """Entry point of ``distill-run-submit``."""
    ended(lambda: submit(sys.argv[1:]))


def submit(arguments: list[str]) -> None:
    """Write the predictions that ``arguments`` ask for, and print what the file contains.

    Raises:
        UserError: a folder has no student, two students have the same task, or data cannot be read.
    """
    given = _parser().parse_args(arguments)
    require_folder(given.out)
    students = [Student.read(folder) for folder in given.folders]
    if students[0].task.has_ids:
        _answer(students, given)
        return
    by_task: dict[str, Student] = {}
    for student in students:
        task = _glue(student)
        if task is None:
            problem = f"its task {student.task.name} is not one of GLUE's"
            raise UserError("folder", student.folder, problem, "Predict a file of your own with distill-run-predict.")
        if task in by_task:
            problem = f"{by_task[task].folder} is also a student of {task}"
            raise UserError("folder", student.folder, problem, "Name one run for each task.")
        by_task[task] = student
    contents = dict(_contents(by_task, given.device, given.fill))
    write(given.out, _zip(contents))
    print(f"{given.out}: {len(contents)} of {len(FILES)} files")


def _answer(students: Sequence[Student], given: Namespace) -> None:
    """Write answers by id, as JSON for the evaluation scripts of SQuAD and MLQA."""
    student, *others = students
    if others:
        raise UserError("folder", others[0].folder, "the file holds the answers of one student", "Name one run folder.")
    task = student.task
    splits = {**task.validation, **task.test}
    name = given.split or next(iter(task.test or task.validation))
    if name not in splits:
        raise UserError("--split", name, "there is no such split", nearest(name, splits))
    # The split is read as a test split, since test splits may lack answers.
    chosen = task.model_copy(update={"test": {TEST: splits[name]}, "validation": {}, "languages": {}})
    answers = student.read_off(chosen, given.device, chosen.answers)
    write(given.out, json.dumps(answers, ensure_ascii=False, indent=0))
    print(f"{given.out}: {len(answers)} answers for the split {name} by {student.folder}")


def _parser() -> Parser:
    parser = Parser("distill-run-submit", formatter_class=RawDescriptionHelpFormatter, epilog=EXAMPLES)
    parser.description = "Write students' predictions for the test sets, in the format of GLUE's leaderboard."
    parser.add_argument("folders", nargs="+", type=Path, help="folders of finished runs, one for each task")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="submission.zip, or answers.json")
    parser.add_argument(
        "--split",
        metavar="NAME",
        help="split to answer, for questions (default: the first test split, or the first validation split)",
    )
    parser.add_argument("--fill", action="store_true", help="write constants for the tasks without a student")
    parser.add_argument("--device", default="auto", help="device: auto, cpu, cuda or cuda:1 (default: auto)")
    return parser


def _glue(student: Student) -> str | None:
    """Return the GLUE configuration of the student's task; None if the task is not one of GLUE's."""
    is_glue = Path(student.task.dataset).name == "glue" and any(file.task == student.task.config for file in FILES)
    return student.task.config if is_glue else None


def _contents(students: Mapping[str, Student], device: str, fill: bool) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each file, and print a line for each."""
    for file in FILES:
        stem = Path(file.name).stem
        if student := students.get(file.task):
            predictions = _labels(student, _test_task(student.task, file), device, file.names)
            print(f"{file.name}: {len(predictions)} predictions by {student.folder}", flush=True)
            if len(predictions) != file.size:
                print(f"  the server expects {file.size}: is this the whole test split?")
            yield file.name, _table(predictions)
        elif fill:
            constant = CONSTANTS.get(stem, "0")
            print(f"{file.name}: no student of {file.task}, filled with {constant}")
            yield file.name, _table([constant] * file.size)
        else:
            print(f"{file.name}: missing, no student of {file.task} (--fill: a constant; the server wants all files)")


def _test_task(task: "Task", file: ServerFile) -> "Task":
    return task.model_copy(update={"config": file.data, "test": {TEST: file.split}})


def _labels(student: Student, task: "Task", device: str, names: bool = True) -> list[str]:
    """Return the predictions for the test split of ``task`` as text, one for each example."""
    outputs = student.outputs(task, device)
    if _glue(student) == "stsb":
        outputs = outputs.clip(0, 5)  # the range that the server takes
    return task.as_lines(outputs, names)


def _table(predictions: Sequence[str]) -> str:
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
