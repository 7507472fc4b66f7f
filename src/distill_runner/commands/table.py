"""``distill-run-table``: the table of the runs in some folders, at any time and without torch."""

import os
import sys
from argparse import RawDescriptionHelpFormatter
from pathlib import Path

from distill_runner.commands.arguments import Parser, ended, require_folder, write
from distill_runner.report.collect import chosen
from distill_runner.report.compare import compare
from distill_runner.report.formats import as_csv, latex, markdown
from distill_runner.report.page import html
from distill_runner.report.rows import tabulate
from distill_runner.report.table import terminal

RUNS = Path("outputs/runs")
FORMATS = ("terminal", "markdown", "csv", "latex", "html")
EXAMPLES = """examples:
  distill-run-table                                   all runs in outputs/runs
  distill-run-table --task rte mrpc --format latex --out table.tex
  distill-run-table --method alp rkd --compare alp rkd
"""


def main() -> None:
    """Entry point of ``distill-run-table``."""
    ended(lambda: show(sys.argv[1:]))


def show(arguments: list[str]) -> None:
    """Print or write the table that ``arguments`` ask for.

    Raises:
        UserError: no runs there, names that none of them has, or a file that cannot be written.
    """
    given = _parser().parse_args(arguments)
    if given.out:
        require_folder(given.out)
    table = tabulate(chosen(given.folders, {"task": given.task, "method": given.method}))
    comparisons = compare(table, *given.compare) if given.compare else []
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


def _parser() -> Parser:
    parser = Parser(
        "distill-run-table", description=__doc__, epilog=EXAMPLES, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, default=[RUNS], help=f"of runs (default: {RUNS})")
    parser.add_argument("--format", choices=FORMATS, default="terminal")
    parser.add_argument("--out", type=Path, metavar="FILE", help="instead of standard output")
    parser.add_argument("--task", nargs="+", metavar="TASK", help="only these")
    parser.add_argument("--method", nargs="+", metavar="METHOD", help="only these")
    parser.add_argument("--compare", nargs=2, metavar="ROW", help="test two rows, or methods, against each other")
    parser.add_argument("--title", default="distill-run", help="of the HTML page")
    parser.add_argument("--picture", nargs="+", type=Path, default=[], metavar="FILE", help="for the HTML page")
    return parser


def _print(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # `| head` has seen enough; the flush at exit would complain once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
