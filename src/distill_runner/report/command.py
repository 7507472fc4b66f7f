"""``distill-run-table``: the table of the runs in some folders, at any time and without torch."""

import os
import sys
from argparse import RawDescriptionHelpFormatter
from pathlib import Path

from distill_runner.errors import UserError, nearest
from distill_runner.report.arguments import Parser, ended
from distill_runner.report.collect import results
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
    for folder in given.folders:
        if not folder.is_dir():
            raise UserError("folder", folder, "there is no such folder", "Name run folders, or a folder of them.")
    found = results(given.folders)
    for key in ("task", "method"):
        if wanted := getattr(given, key):
            known = {str(result[key]) for result in found}
            for name in wanted:
                if name not in known:
                    raise UserError(f"--{key}", name, "no run has it", nearest(name, known))
            found = [result for result in found if result[key] in wanted]
    if not found:
        raise UserError(
            "folder", ", ".join(map(str, given.folders)), "holds no runs", "distill-run task=rte method=alp"
        )
    table = tabulate(found)
    comparisons = compare(table, *given.compare) if given.compare else []
    write = {
        "terminal": lambda: terminal(table, comparisons) + "\n",
        "markdown": lambda: markdown(table, comparisons),
        "csv": lambda: as_csv(table),
        "latex": lambda: latex(table, comparisons),
        "html": lambda: html(table, given.title, comparisons, given.picture),
    }
    _emit(write[given.format](), given.out)


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


def _emit(text: str, file: Path | None) -> None:
    try:
        if file is None:
            print(text, end="", flush=True)
        else:
            file.write_text(text, encoding="utf-8")
    except BrokenPipeError:  # `| head` has seen enough; the flush at exit would complain once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise UserError("--out", file, f"cannot be written: {error.strerror}") from error
