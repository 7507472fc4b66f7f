"""What all formats show: lines of a table with values, spreads, grids and published numbers; comparisons in words."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from distill_runner.common.errors import format_value, quantity
from distill_runner.common.terminal import markdown_table
from distill_runner.report.collect import constant_prediction, undefined_reason
from distill_runner.report.compare import SAME, UNDECIDED, Comparison
from distill_runner.report.frame import Cell, ResultTable
from distill_runner.report.published import NOT_COMPARABLE
from distill_runner.report.statistics import MAX_SEEDS

if TYPE_CHECKING:
    import pandas as pd

PHASES, BEST_RUN = "steps, phases included", "best single run"
BRACKETS = f"In parentheses: {NOT_COMPARABLE}."
SIGNED = "{:+.2f}"


@dataclass(frozen=True)
class Line:
    """A line of the table, with its cells by task.

    Attributes:
        is_detail: whether the line gives details of the last line above it that is none itself.
        values: numbers by task, formatted by ``form``; the means over tasks are added here if ``averaged``.
        words: text by task, shown where there is no number.
        bracketed: tasks whose number is shown in brackets, because the published number is not comparable.
    """

    name: str
    values: dict[str, float]
    is_detail: bool = True
    form: str = "{:.2f}"
    averaged: bool = True
    words: Mapping[str, str] = field(default_factory=dict)
    bracketed: set[str] = field(default_factory=set)

    def text(self, task: str) -> str:
        if task not in self.values:
            return self.words.get(task, "-")
        text = self.form.format(self.values[task])
        return f"({text})" if task in self.bracketed else text


DETAILS: tuple[tuple[str, str, str, bool], ...] = (
    ("sd over seeds", "sd", "{:.2f}", False),
    ("95% interval", "interval", "±{:.2f}", False),
    ("seeds", "seeds", "{:.0f}", False),
    (PHASES, "steps_in_all", "{:.0f}", False),
    (BEST_RUN, "best_run", "{:.2f}", True),
    ("mean of grid", "grid_mean", "{:.2f}", True),
    ("points of grid", "points", "{:.0f}", False),
    ("optimism", "optimism", SIGNED, False),
)
"""Details of a value: name, column of the table's frame, format, and whether the line is averaged over the tasks.

``PHASES`` is only in tables whose rows differ in the steps of earlier phases, ``BEST_RUN`` only beside means of a grid.
"""


def table_lines(table: ResultTable) -> tuple[list[str], list[Line]]:
    """Return the columns and the lines of a table, teachers first, with averages over tasks in columns of their own.

    Each kind of value has its own line, so that a mean is never beside the best of a grid.
    """
    steps = [(cell.numbers.get("steps_in_all"), cell.runs) for _, _, cell in table.cells]
    phases_differ = len({total - runs[0]["steps"] if total and runs else 0 for total, runs in steps}) > 1
    lines = list[Line]()
    for row, of_row in table.frame.groupby("row", sort=False):
        is_done = of_row["status"] == "done"
        waiting = dict(of_row[~is_done].set_index("task")["status"])
        kinds = [*of_row[is_done].set_index("task").groupby("kind", sort=False)]
        if not kinds:
            lines.append(Line(str(row), {}, is_detail=False, words=waiting))
        for number, (kind, cells) in enumerate(kinds):
            name, words = f"{row}, {kind}" if kind else str(row), {} if number else waiting
            lines.append(Line(name, _numbers(cells["value"]), is_detail=False, words=words))
            lines += _details(cells, phases_differ)
    averages = {name: columns for name, columns in table.means.items() if name not in table.tasks}
    for line in lines:
        for name, columns in averages.items():
            if line.averaged and line.values.keys() >= {*columns}:
                line.values[name] = fmean(line.values[column] for column in columns)
                line.bracketed.update([name] if line.bracketed & {*columns} else ())
    return [*table.tasks, *averages], lines


def _numbers(column: "pd.Series[Any]") -> dict[str, float]:
    return dict(column.dropna())


def _details(cells: "pd.DataFrame", phases_differ: bool) -> list[Line]:
    lines, is_mean_of_grid = [], (cells["seeds"] > 1) & (cells["points"] > 1)
    for name, column, form, averaged in DETAILS:
        line = Line(name, _numbers(cells[column][is_mean_of_grid | (name != BEST_RUN)]), form=form, averaged=averaged)
        if any(line.text(task) not in ("0", "1") for task in line.values) and (phases_differ or name != PHASES):
            lines.append(line)
    for source, printed in cells.groupby("source", sort=False):
        bracketed = {task for task, comparable in printed["comparable"].items() if not comparable}
        lines.append(Line(str(source), _numbers(printed["published"]), bracketed={*bracketed}))
        lines.append(Line("difference", _numbers(printed["difference"]), form=SIGNED, bracketed=bracketed))
    return lines


def notes(table: ResultTable) -> list[str]:
    """Return the notes that readers of the numbers need, one sentence each."""
    sentences = []
    for name, columns in table.means.items():
        separator = "; " if any("," in column for column in columns) else ", "
        sentences.append(f"{name}: the mean of {separator.join(columns[:-1])} and {columns[-1]}.")
    if table.frame["comparable"].eq(False).any():
        sentences.append(BRACKETS)
    if any(cell.is_optimistic for _, _, cell in table.cells):
        sentences.append("The best of a grid was chosen by these scores: expect a lower score on other data.")
    texts = {
        undefined_reason: "{}: the metric of {} is undefined ({}), which counts as 0.",
        constant_prediction: "{}: a constant prediction in {} ({}).",
    }
    for reason_of, text in texts.items():
        for name, task, cell in table.cells:
            runs = [run for point in cell.points for run in point.runs]
            if reasons := [reason for run in runs if (reason := reason_of(run))]:
                share = f"{len(reasons)} of {len(runs)} runs" if len(runs) > 1 else "the run"
                sentences.append(text.format(f"{name} on {task}", share, reasons[0]))
    return sentences


def best_points(table: ResultTable) -> list[str]:
    """Return a sentence for each grid with row, task and the best of the hyper-parameters that vary in it."""
    return [f"{name} on {task}: {best_settings_text(cell)}" for name, task, cell in table.cells if cell.settings]


def best_settings_text(cell: Cell) -> str:
    """Return the hyper-parameters of a grid's best point, and the number of other points with an equal score."""
    text = ", ".join(f"{name} {format_value(value)}" for name, value in cell.settings.items())
    return f"{text} ({cell.ties - 1} more with the same score)" if cell.ties > 1 else text


def reasons(table: ResultTable) -> list[str]:
    """Return why runs have not finished; runs with the same row, task, status and cause share a line."""
    groups: dict[tuple[str, str, str, str], list[object]] = {}
    for name, run in table.unfinished:
        cause = str(run.get("error") or "").partition("\n")[0]
        if not cause and run["status"] in ("interrupted", "paused", "killed"):
            cause = "repeat the command to resume"
        groups.setdefault((name, run["task"], run["status"], cause), []).append(run["seed"])
    sentences = []
    for (name, task, status, cause), seeds in groups.items():
        runs = f", seed {seeds[0]} {status}" if len(seeds) == 1 else f": {len(seeds)} runs {status}"
        sentences.append(f"{name} on {task}{runs}" + (f": {cause}" if cause else ""))
    return sentences


def sections(table: ResultTable, comparisons: Sequence[Comparison]) -> dict[str, list[str]]:
    """Return the sentences below a table by their title; none without sentences."""
    parts = {
        "Best points of the grids": best_points(table),
        "Comparisons": [sentence(comparison) for comparison in comparisons],
        "Not finished": reasons(table),
    }
    return {title: sentences for title, sentences in parts.items() if sentences}


# --- Comparisons


def sentence(comparison: Comparison) -> str:
    """Describe the comparison in words, percentages and p-values."""
    head = f"{comparison.first} against {comparison.second} on {comparison.task}"
    parts = []
    if comparison.difference is not None:
        parts.append(f"{comparison.difference:+.2f} {comparison.metric}")
    if test := comparison.examples:
        clusters = f" in {quantity(test.units, 'cluster')}" if test.units < test.examples else ""
        units = quantity(test.examples, "example") + clusters
        interval = f"95% {bounds_text(*test.interval)}" if test.interval else f"{test.differing} differ"
        exact = " (exact)" if test.is_exact else ""
        parts.append(f"over {units}: {interval}, {_p(comparison, 'examples')}{exact}")
    if comparison.seeds_p is not None:
        parts.append(f"t-test over {comparison.shared} seeds: {_p(comparison, 'seeds')}")
    if comparison.methods:
        interval = f"{_level(comparison.methods.looks)} {bounds_text(*comparison.methods.interval)}"
        text = f"over seeds and examples: {interval}, {_p(comparison, 'methods')}"
        parts.append(f"{text}: {conclusion_text(comparison)}")
    if comparison.of_models is not None:
        parts.append(f"these models: {conclusion_text(comparison)}")
    return f"{head}: {'; '.join([*parts, *comparison.remarks])}"


def _level(looks: int) -> str:
    """Return the level of intervals that are corrected for ``looks``, as text."""
    return f"{100 - 5 / looks:.4g}%"


def conclusion_text(comparison: Comparison) -> str:
    """Return the conclusion in words; for an undecided one, about how many seeds would decide."""
    margin = "" if comparison.margin is None else quantity(comparison.margin, "point", "g")
    words = [comparison.conclusion]
    if words == [SAME]:
        words = [f"{SAME} within {margin}"]
    elif words != [UNDECIDED] and comparison.is_significant("same"):
        words.append(f"by less than {margin}")
    if words[0] != UNDECIDED:
        return ", ".join([*words, *["over seeds of the last stage only"] * bool(comparison.fixed_stages)])
    if comparison.is_not_worse:
        words.append(f"not worse by {margin} or more")
    if comparison.methods and not comparison.is_selected:
        seeds = comparison.seeds_needed
        needed = f"about {seeds} seeds" if seeds else f"more than {MAX_SEEDS} seeds, or more examples,"
        words.append(f"{needed} would decide")
    return ", ".join(words)


def as_markdown(comparisons: Sequence[Comparison]) -> str:
    """Return a table of the conclusions in GitHub's Markdown, and below it the sentence of each comparison."""
    header, *rows = table_cells(comparisons)
    sentences = [f"- {escaped(sentence(comparison))}" for comparison in comparisons]
    table = markdown_table(header, [[escaped(cell) for cell in row] for row in rows], text_columns=len(header))
    return table + "\n\n" + "\n".join(sentences) + "\n"


def table_cells(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return a table of the conclusions: the header, and a row for each comparison."""
    looks = max((comparison.methods.looks for comparison in comparisons if comparison.methods), default=1)
    intervals = f"{_level(looks)} over seeds and examples"
    rows = [["first", "second", "task", "points", intervals, "p (Holm)", "conclusion"]]
    for comparison in comparisons:
        methods = comparison.methods
        numbers = ["" if comparison.difference is None else f"{comparison.difference:+.2f}"]
        numbers.append(bounds_text(*comparison.interval) if comparison.interval else "")
        numbers.append(_p_text(comparison.corrected.get("methods", methods.p)).removeprefix("p ") if methods else "")
        rows.append([comparison.first, comparison.second, comparison.task, *numbers, conclusion_text(comparison)])
    return rows


def escaped(text: str) -> str:
    """Return text without characters that Markdown would read as its own."""
    return re.sub(r"([|*_`<\\\[\]])", r"\\\1", text)


def as_mapping(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison for JSON: differences and intervals in points, p-values, and the conclusion in words."""
    examples, methods = comparison.examples, comparison.methods
    names = ("first", "second", "task", "metric", "difference", "margin")
    return {name: getattr(comparison, name) for name in names} | {
        "p": comparison.p_values,
        "p_holm": dict(comparison.corrected),
        "examples": examples
        and {
            "examples": examples.examples,
            "units": examples.units,
            "differing": examples.differing,
            "interval": examples.interval and _points(*examples.interval),
        },
        "seeds": comparison.shared,
        "methods": methods
        and {
            "difference": 100 * methods.difference,
            "interval": _points(*methods.interval),
            "looks": methods.looks,
            "seed_variance": 1e4 * methods.seed_variance,
            "example_variance": 1e4 * methods.example_variance,
        },
        "conclusion": comparison.conclusion,
        "is_not_worse": comparison.is_not_worse,
        "seeds_needed": comparison.seeds_needed,
        "fixed_stages": comparison.fixed_stages,
        "remarks": comparison.remarks,
    }


def _points(*fractions: float) -> list[float]:
    return [100 * fraction for fraction in fractions]


def bounds_text(low: float, high: float) -> str:
    """Return an interval in points."""
    return f"[{100 * low:+.2f}, {100 * high:+.2f}]"


def _p(comparison: Comparison, test: str) -> str:
    """Return a p-value and, in a family of several, its corrected value."""
    p, corrected = comparison.p_values[test], comparison.corrected.get(test)
    size = comparison.family.get(test, 1)
    return _p_text(p) + (f" (Holm, {size} tests: {_p_text(corrected)})" if corrected is not None and size > 1 else "")


def _p_text(value: float) -> str:
    return "p < 0.0001" if value < 0.00005 else f"p {value:.4f}"
