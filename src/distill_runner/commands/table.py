"""``distill-run-table``: print the table of the runs in the given folders, at any time and without torch."""

import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from distill_runner.commands.arguments import Parser, ended, require_folder, write
from distill_runner.common.errors import UserError
from distill_runner.report.collect import Result, chosen
from distill_runner.report.compare import compare, optimism
from distill_runner.report.figures import drawable
from distill_runner.report.figures.canvas import save
from distill_runner.report.figures.scores import score_figure
from distill_runner.report.formats import as_csv, latex, markdown
from distill_runner.report.page import html
from distill_runner.report.rows import tabulate
from distill_runner.report.table import terminal

RUNS = Path("outputs/runs")
FORMATS = ("terminal", "markdown", "csv", "latex", "html", "picture")
EXAMPLES = """examples:
  distill-run-table                                   all runs in outputs/runs
  distill-run-table --task rte mrpc --format latex --out table.tex
  distill-run-table --method alp rkd --compare alp rkd
  distill-run-table --format picture --out methods.png
  distill-run-table --compare alp nkd rkd pkd ckd     four tests, with Holm's correction
"""


def main() -> None:
    """Entry point of ``distill-run-table``."""
    ended(lambda: show(sys.argv[1:]))


def show(arguments: list[str]) -> None:
    """Print or write the table that ``arguments`` ask for.

    Raises:
        UserError: there are no runs, no run has a name that is asked for, or a file cannot be written.
    """
    given = _parser().parse_args(arguments)
    if given.out:
        require_folder(given.out)
    results = chosen(given.folders, {"task": given.task, "method": given.method})
    if given.format == "picture":
        return _picture(results, given.out)
    table = tabulate(results)
    comparisons = [*optimism(table), *compare(table, *given.compare)]
    formats = {
        "terminal": lambda: terminal(table, comparisons) + "\n",
        "markdown": lambda: markdown(table, comparisons),
        "csv": lambda: as_csv(table),
        "latex": lambda: latex(table, comparisons),
        "html": lambda: html(table, given.title, comparisons, given.picture),
    }
    text = formats[given.format]()
    if given.out:
        write(given.out, text)
    else:
        _print(text)


def _picture(results: Sequence[Result], file: Path | None) -> None:
    if file is None:
        raise UserError("--format", "picture", "is not text", "Give a file: --out scores.png")
    if not (done := drawable(results)):
        raise UserError("--format", "picture", "no student has finished")
    save(score_figure(done), file)


def _parser() -> Parser:
    parser = Parser(
        "distill-run-table", description=__doc__, epilog=EXAMPLES, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, default=[RUNS], help=f"folders of runs (default: {RUNS})")
    parser.add_argument("--format", choices=FORMATS, default="terminal")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write instead of standard output")
    parser.add_argument("--task", nargs="+", metavar="TASK", help="only these tasks")
    parser.add_argument("--method", nargs="+", metavar="METHOD", help="only these methods")
    parser.add_argument(
        "--compare",
        nargs="+",
        action="append",
        default=[],
        metavar="ROW",
        help="test the first row, or method, against the others; may be given several times",
    )
    parser.add_argument("--title", default="distill-run", help="title of the HTML page")
    parser.add_argument(
        "--picture", nargs="+", type=Path, default=[], metavar="FILE", help="pictures to embed in the HTML page"
    )
    return parser


def _print(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # the reader, such as `| head`, is gone; the flush at exit would raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
