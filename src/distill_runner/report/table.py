"""Results as text for a terminal: the summary at the end of a run, and the table of methods × tasks in 80 columns."""

import textwrap
from collections.abc import Sequence
from math import ceil

from distill_runner.common.terminal import duration
from distill_runner.report.cells import label
from distill_runner.report.collect import Result
from distill_runner.report.compare import Comparison, sentence
from distill_runner.report.lines import Line, chosen, lines, notes, reasons
from distill_runner.report.rows import ResultTable, tabulate

WIDTH = 80
MOST_REASONS = 20


def result_row(result: Result) -> str:
    """Summarise one run in a few lines: score, teacher, published number, student, training cost and folder."""
    if result["status"] != "done":
        return f"{reasons(tabulate([result]))[0]}\n  folder     {result['folder']}"
    score, student = 100 * result["score"], result["student"]
    told = [f"{label(result)} on {result['task']}, seed {result['seed']}: {score:.2f} {result['metric']}"]
    if result.get("teacher_score") is not None:
        teacher = 100 * result["teacher_score"]
        told.append(f"  teacher    {teacher:.2f} ({score - teacher:+.2f}), {result['teacher']}")
    if number := result.get("published"):
        remark = "" if number["comparable"] else "; its teacher, size or metric differs"
        difference = f"({score - number['value']:+.2f})"
        told.append(f"  published  {number['value']:.2f} {difference}, {number['source']}{remark}")
    return "\n".join(
        [
            *told,
            f"  student    {student['num_layers']} layers of width {student['width']}, "
            f"init {student['init']}, {result['num_params'] / 1e6:.1f}M parameters",
            f"  training   best epoch {result['best_epoch']} of {result['epochs']}, "
            f"{duration(result['seconds'])}, {result['examples_per_second']:.0f} examples/s",
            f"  folder     {result['folder']}",
        ]
    )


def terminal(table: ResultTable, comparisons: Sequence[Comparison] = ()) -> str:
    """Return the table in 80 columns, with the best point of each grid, comparisons, and why runs have not finished."""
    if not table.rows:
        return "no results of students"
    columns, every = lines(table)
    parts = [*_blocks(columns, every), *(textwrap.fill(note, WIDTH) for note in notes(table))]
    if best := [f"{name} on {task}: {values}" for name, task, values in chosen(table)]:
        parts.append("Best points of the grids:\n" + _filled(best, "  "))
    parts.append(_filled([sentence(comparison) for comparison in comparisons]))
    if causes := reasons(table):
        left = len(causes) - MOST_REASONS
        more = [f"and {left} more"] if left > 0 else []
        parts.append("\n".join(_fit(cause) for cause in [*causes[:MOST_REASONS], *more]))
    return "\n\n".join(part for part in parts if part)


def _blocks(columns: Sequence[str], every: Sequence[Line]) -> list[str]:
    """Split the table into as few blocks of columns as the width allows, of nearly equal size."""
    cells = {id(line): {column: _aligned(line, column) for column in columns} for line in every}
    left = min(1 + max(len(_name(line)) for line in every), WIDTH // 2)
    width = 1 + max(len(text) for column in columns for text in [f"{column} ", *(c[column] for c in cells.values())])
    most = max(1, (WIDTH + 1 - left) // width)  # + 1: the trailing blank of a line is cut off
    count = ceil(len(columns) / ceil(len(columns) / most))
    blocks = []
    for part in (columns[start : start + count] for start in range(0, len(columns), count)):
        written = [" " * left + "".join(f"{column + ' ':>{width}}" for column in part)]
        for line in every:
            *above, name = textwrap.wrap(_name(line), WIDTH, subsequent_indent="  ", drop_whitespace=False)
            if len(name) >= left:
                above, name = [*above, name], ""
            written += [*above, name.ljust(left) + "".join(f"{cells[id(line)][column]:>{width}}" for column in part)]
        blocks.append("\n".join(text.rstrip() for text in written))
    return blocks


def _name(line: Line) -> str:
    return f"  {line.name}" if line.belongs else line.name


def _aligned(line: Line, column: str) -> str:
    """Return the cell's text, with a blank in place of the closing bracket if it has none."""
    text = line.text(column)
    return text if text.endswith(")") else f"{text} "


def _filled(sentences: Sequence[str], indent: str = "") -> str:
    return "\n".join(
        textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ") for text in sentences
    )


def _fit(text: str, width: int = WIDTH) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
