"""``distill-run-predict``: write the predictions of a finished run's student for a file, with probabilities."""

import csv
import io
import sys
from argparse import RawDescriptionHelpFormatter
from pathlib import Path

from distill_runner.commands.arguments import Parser, ended, require_folder, write
from distill_runner.common.errors import UserError
from distill_runner.deploy.student import Student

EXAMPLES = """examples:
  distill-run-predict outputs/runs/rte-alp-0123456789ab my_pairs.csv
  distill-run-predict outputs/runs/custom-alp-0123456789ab new.jsonl --out predictions.csv
"""


def main() -> None:
    """Entry point of ``distill-run-predict``."""
    ended(lambda: predict(sys.argv[1:]))


def predict(arguments: list[str]) -> None:
    """Write the predictions that ``arguments`` ask for, a line for each row of the file.

    Raises:
        UserError: the folder has no student, its task is questions, or the file cannot be read.
    """
    given = _parser().parse_args(arguments)
    if given.out:
        require_folder(given.out)
    student = Student.read(given.run)
    if student.task.has_ids:
        problem = "its student answers questions, but this command predicts classes and scores"
        raise UserError("run", given.run, problem, "distill-run-submit writes the answers by the ids of the questions.")
    outputs = student.outputs_of_file(given.file, given.device)
    probabilities = student.task.class_probabilities(outputs)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["index", "prediction", *(f"p_{name}" for name in probabilities)])
    columns = [[f"{value:.6f}" for value in values] for values in probabilities.values()]
    rows.writerows(zip(range(len(outputs)), student.task.as_lines(outputs), *columns, strict=True))
    if given.out:
        write(given.out, text.getvalue())
        print(f"{given.out}: {len(outputs)} predictions for {given.file} by {given.run}")
    else:
        print(text.getvalue(), end="")


def _parser() -> Parser:
    parser = Parser("distill-run-predict", formatter_class=RawDescriptionHelpFormatter, epilog=EXAMPLES)
    parser.description = "Write a finished run's predictions for a file, with the probability of each class."
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("file", type=Path, help="CSV, TSV, JSON, JSON lines or Parquet, with the task's text columns")
    parser.add_argument("--out", type=Path, metavar="FILE", help="CSV file to write (default: standard output)")
    parser.add_argument("--device", default="auto", help="device: auto, cpu, cuda or cuda:1 (default: auto)")
    return parser
