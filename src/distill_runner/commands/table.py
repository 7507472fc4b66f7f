"""``distill-run table``, ``compare`` and ``curves``: read the results of runs, at any time and without torch."""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill

from distill_runner.commands.parser import write_file
from distill_runner.common.errors import UserError, require_file
from distill_runner.common.terminal import WIDTH, output_width
from distill_runner.report import formats
from distill_runner.report.collect import Result, select_results
from distill_runner.report.compare import Comparison, compare, optimism
from distill_runner.report.figures import comparison_figure, curve_figure, drawable, save, score_figure, write_pictures
from distill_runner.report.frame import ResultTable, tabulate


def show_table(options: Namespace) -> None:
    """Print or write the table of the runs in some folders.

    Raises:
        UserError: there are no runs, no run has a name that is asked for, or a file cannot be written.
    """
    results = select_results(options.folders, {"task": options.task, "method": options.method})
    for file in options.picture:
        require_file("--picture", file)
    if options.format == "picture":
        save(score_figure(drawable(results)), _picture(options.out))
        return
    table = tabulate(results, options.split)
    comparisons = [*optimism(table), *compare(table, *options.compare, margin=options.margin)]
    writers = {
        "terminal": lambda: formats.terminal(table, comparisons, WIDTH if options.out else output_width()) + "\n",
        "markdown": lambda: formats.markdown(table, comparisons),
        "csv": lambda: formats.as_csv(table),
        "latex": lambda: formats.latex(table, comparisons),
        "html": lambda: _page(results, table, comparisons or formats.default_comparisons(table), options),
    }
    _print_or_write(writers[options.format](), options.out)


def show_comparison(options: Namespace) -> None:
    """Print the tests of the first row, or method of files, against each of the others, on every task.

    Raises:
        UserError: there are no runs, or a name fits no row or several rows.
    """
    files, of_files = None, bool(options.predictions)
    unread = ("rows", "--task", "--method", "--split") if of_files else ("--gold", "--metric", "--type", "--labels")
    if name := next((name for name in unread if getattr(options, name.strip("-"))), None):
        raise UserError(name, None, f"is not read {'with' if of_files else 'without'} --predictions", "Leave it out.")
    if options.predictions:
        from distill_runner.report.file_comparison import compare_files, methods_of  # imports all task types

        if options.gold is None:
            raise UserError("--predictions", None, "needs the labels of the examples", "Add --gold gold.csv.")
        names = [*filter(None, map(str.strip, options.labels.split(",")))]
        settings = options.margin, options.looks, options.metric, options.type, names
        files = compare_files(methods_of(options.predictions), options.gold, *settings)
        comparisons = files.comparisons
    elif not options.rows:
        raise UserError("compare", None, "needs rows of the table, or files", "distill-run compare alp rkd")
    else:
        table = tabulate(select_results(options.runs, {"task": options.task, "method": options.method}), options.split)
        try:
            comparisons = compare(table, options.rows, margin=options.margin, looks=options.looks)
        except UserError as error:
            raise error.with_key("compare") if error.key == "--compare" else error from error
    width = WIDTH if options.out else output_width()
    if options.format == "picture":
        save(comparison_figure(comparisons), _picture(options.out))
        return
    text = formats.as_markdown(comparisons)
    if options.format == "terminal":
        text = "\n".join(fill(formats.sentence(one), width, subsequent_indent="  ") for one in comparisons) + "\n"
    text = files.as_text(text) if files else text
    if options.format == "json":
        text = json.dumps(files.as_json() if files else [*map(formats.as_mapping, comparisons)], indent=1) + "\n"
    _print_or_write(text, options.out)


def draw_curves(options: Namespace) -> None:
    """Draw the scores of the runs in some folders against the size of the student or of the data.

    Raises:
        UserError: as for ``figures.curve_cells``; there are no runs, or no run of the task.
    """
    save(curve_figure(select_results(options.folders, {"task": options.task}), options.by, options.order), options.out)


def _page(results: Sequence[Result], table: ResultTable, comparisons: Sequence[Comparison], options: Namespace) -> str:
    with TemporaryDirectory() as folder:
        pictures = write_pictures(results, Path(folder))
        return formats.html(table, "distill-run", comparisons, [*pictures, *options.picture])


def _picture(file: Path | None) -> Path:
    if file is None:
        raise UserError("--format", "picture", "is not text", "Give a file: --out scores.png")
    return file


def _print_or_write(text: str, file: Path | None) -> None:
    if file:
        write_file(file, text)
    else:
        print(text, end="")
