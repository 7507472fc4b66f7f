"""``distill-run-submit``: a student's predictions for test splits, in the format of GLUE's leaderboard.

The server (https://gluebenchmark.com/submit) takes one zip with a file for every task, lines of ``index`` and
``prediction``: class names for the inference tasks, 0 or 1 for the others, scores from 0 to 5 for STS-B.
"""

import csv
import io
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import yaml

from distill_runner.commands.arguments import Parser, ended, require_folder, write
from distill_runner.common.errors import UserError
from distill_runner.datasets.reading.folders import READERS

if TYPE_CHECKING:
    import numpy as np

    from distill_runner.kinds import Task
    from distill_runner.training.devices import Device

TEST = "test"


@dataclass(frozen=True)
class ServerFile:
    """A file that the server takes.

    Attributes:
        task: GLUE's configuration on the hub whose student predicts it; ``data`` and ``split`` are what it predicts.
        size: lines that the server expects, without the header.
        names: whether it wants the class's name, else its number.
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
"""What fills a file without a student; 0 where nothing is named."""
EXAMPLES = """examples:
  distill-run-submit outputs/runs/rte-alp-* outputs/runs/cola-alp-* --out submission.zip --fill
  distill-run-submit outputs/runs/rte-alp-0123456789ab --file my_pairs.csv --out predictions.csv
"""


def main() -> None:
    """Entry point of ``distill-run-submit``."""
    ended(lambda: submit(sys.argv[1:]))


def submit(arguments: list[str]) -> None:
    """Write what ``arguments`` ask for, and say what it holds.

    Raises:
        UserError: no students there, two of one task, or data that cannot be read.
    """
    given = _parser().parse_args(arguments)
    require_folder(given.out)
    students = [_student(folder) for folder in given.folders]
    if given.file:
        if len(students) > 1:
            raise UserError("--file", given.file, "is for one student", "Name one run folder.")
        write(given.out, _table(_of_file(students[0], given.file, given.device), ","))
        print(f"{given.out}: {given.file} by {students[0].folder}")
        return
    by_task: dict[str, Student] = {}
    for student in students:
        if student.glue is None:
            raise UserError("folder", student.folder, f"its task {student.task.name} is none of GLUE's", "Take --file.")
        if student.glue in by_task:
            problem = f"{by_task[student.glue].folder} is a student of {student.glue} too"
            raise UserError("folder", student.folder, problem, "Name one for each task.")
        by_task[student.glue] = student
    contents = dict(_contents(by_task, given.device, given.fill))
    write(given.out, _zip(contents))
    print(f"{given.out}: {len(contents)} of {len(FILES)} files")


def _parser() -> Parser:
    parser = Parser("distill-run-submit", formatter_class=RawDescriptionHelpFormatter, epilog=EXAMPLES)
    parser.description = "Test predictions of students in the format of GLUE's leaderboard, or of a file of your own."
    parser.add_argument("folders", nargs="+", type=Path, help="of finished runs, one for each task")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="submission.zip, or a CSV with --file")
    parser.add_argument("--fill", action="store_true", help="constants for the tasks without a student")
    parser.add_argument("--file", type=Path, metavar="FILE", help="predict this CSV, TSV, JSON or Parquet file instead")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1 (default: auto)")
    return parser


@dataclass(frozen=True)
class Student:
    """A finished run's student: ``folder`` has its model, ``task`` is what it was trained on."""

    folder: Path
    task: "Task"

    @property
    def glue(self) -> str | None:
        """GLUE's configuration, if its task is one."""
        is_glue = Path(self.task.dataset).name == "glue" and any(file.task == self.task.config for file in FILES)
        return self.task.config if is_glue else None


def _student(folder: Path) -> Student:
    from distill_runner.common.schema import typed
    from distill_runner.kinds import kind_of

    remedy = "Name the folder of a finished run: outputs/runs/<name>."
    if not (folder / "model" / "config.json").is_file():
        raise UserError("folder", folder, "holds no student", remedy)
    try:
        described = yaml.safe_load((folder / "config.yaml").read_text())["stages"]["student"]["task"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError("folder", folder, "has no config.yaml of a run", remedy) from error
    return Student(folder, typed(kind_of(described), described, "task.").resolved())


def _contents(students: Mapping[str, Student], device: str, fill: bool) -> Iterator[tuple[str, str]]:
    """Name and text of each file, said on standard output as it is made."""
    for file in FILES:
        stem = Path(file.name).stem
        if student := students.get(file.task):
            predictions = _labels(student, _test_task(student.task, file), device, file.names)
            print(f"{file.name}: {len(predictions)} predictions by {student.folder}", flush=True)
            if len(predictions) != file.size:
                print(f"  the server expects {file.size}: is this the whole test split?")
            yield file.name, _table(predictions, "\t")
        elif fill:
            constant = CONSTANTS.get(stem, "0")
            print(f"{file.name}: no student of {file.task}, filled with {constant}")
            yield file.name, _table([constant] * file.size, "\t")
        else:
            print(f"{file.name}: missing, no student of {file.task} (--fill: a constant, the server wants all files)")


def _test_task(task: "Task", file: ServerFile) -> "Task":
    return task.model_copy(update={"config": file.data, "test": {TEST: file.split}})


def _of_file(student: Student, file: Path, device: str) -> list[str]:
    """Predictions for a file whose columns have the names of the task's."""
    if not file.is_file():
        raise UserError("--file", file, "there is no such file")
    if file.suffix not in READERS:
        raise UserError("--file", file, "is of no kind that can be read", f"Known: {', '.join(READERS)}.")
    with TemporaryDirectory() as folder:  # alone: the file's folder may hold others of like names
        (Path(folder) / file.name).with_stem(TEST).symlink_to(file.absolute())
        place = {"dataset": folder, "config": None, "test": {TEST: TEST}}
        return _labels(student, student.task.model_copy(update=place), device)


def _labels(student: Student, task: "Task", device: str, names: bool = True) -> list[str]:
    """The prediction for each example of the task's test split, as it is to be written."""
    from distill_runner.training.devices import Device

    outputs = _outputs(student, task, Device.of(device, "fp32"))
    if student.glue == "stsb":
        outputs = outputs.clip(0, 5)  # the range that the server takes
    return task.as_lines(outputs, names)


def _outputs(student: Student, task: "Task", device: "Device") -> "np.ndarray":
    """Logits (N, C), or scores (N, 1), in the order of the test split."""
    from distill_runner.common.terminal import quiet
    from distill_runner.models.build import build
    from distill_runner.models.config import ModelConfig
    from distill_runner.models.sources import read_tokenizer
    from distill_runner.training.evaluate import predict

    quiet()
    source = str(student.folder / "model")
    model = device.place(build(ModelConfig(source=source, head="keep"), task.head))
    with TemporaryDirectory() as folder:
        task.write(Path(folder), task.examples(task.test[TEST]), read_tokenizer(source))
        return predict(model, task.open(Path(folder)), device)


def _table(predictions: Sequence[str], delimiter: str) -> str:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow(["index", "prediction"])
    writer.writerows(enumerate(predictions))
    return text.getvalue()


def _zip(contents: Mapping[str, str]) -> bytes:
    """Equal contents give equal bytes: no times are kept."""
    file = io.BytesIO()
    with ZipFile(file, "w") as archive:
        for name, text in contents.items():
            archive.writestr(ZipInfo(name), text, ZIP_DEFLATED)
    return file.getvalue()
