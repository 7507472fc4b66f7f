"""What all formats show: lines of a table with values, spreads, grids and published numbers; comparisons in words."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from distill_runner.common.errors import format_value, quantity
from distill_runner.common.terminal import markdown_table
from distill_runner.report.collect import constant_prediction, undefined_reason
from distill_runner.report.compare import SAME, UNDECIDED, Comparison
from distill_runner.report.rows import ResultCell, ResultTable, Row, held_out_column
from distill_runner.report.statistics import MAX_SEEDS

PHASES, BEST_RUN = "steps, phases included", "best single run"
BRACKETS = "In parentheses: the paper's teacher differs from the run's, or it does not name metric or split."


@dataclass(frozen=True)
class Line:
    """A line of the table, with its cells by task.

    Attributes:
        is_detail: whether the line gives details of the last line above it that is none itself.
        values: numbers by task, formatted by ``form``.
        words: text by task, shown where there is no number.
        bracketed: tasks whose number is shown in brackets, because the published number is not comparable.
        averaged: whether a mean over the tasks is meaningful.
    """

    name: str
    values: Mapping[str, float]
    is_detail: bool = True
    form: str = "{:.2f}"
    words: Mapping[str, str] = field(default_factory=dict)
    bracketed: frozenset[str] = frozenset()
    averaged: bool = True

    def text(self, task: str) -> str:
        if task not in self.values:
            return self.words.get(task, "-")
        text = self.form.format(self.values[task])
        return f"({text})" if task in self.bracketed else text

    def with_average(self, name: str, columns: Sequence[str]) -> "Line":
        """Add the column ``name`` with the mean over ``columns``, if the line has a number for each of them."""
        if not self.averaged or any(column not in self.values for column in columns):
            return self
        values = {**self.values, name: fmean(self.values[column] for column in columns)}
        bracketed = {name} if self.bracketed & {*columns} else set()
        return replace(self, values=values, bracketed=self.bracketed | bracketed)


DETAILS: tuple[tuple[str, str, str, bool], ...] = (
    ("sd over seeds", "sd", "{:.2f}", False),
    ("95% interval", "interval", "±{:.2f}", False),
    ("seeds", "seeds", "{:.0f}", False),
    (PHASES, "steps_in_all", "{:.0f}", False),
    (BEST_RUN, "best_run", "{:.2f}", True),
    ("mean of grid", "grid_mean", "{:.2f}", True),
    ("points of grid", "points", "{:.0f}", False),
)
"""Details of a value: name, column of ``ResultCell.numbers``, format, and whether the line is averaged over the tasks.

``PHASES`` is only in tables whose rows differ in the steps of earlier phases, ``BEST_RUN`` only beside means of a grid.
"""


def table_lines(table: ResultTable) -> tuple[list[str], list[Line]]:
    """Return the columns and the lines of a table, teachers first, with averages over tasks in columns of their own."""
    lines = list[Line]()
    for teacher in table.teachers:
        lines.append(Line(teacher.name, _column(teacher.numbers, "value"), is_detail=False))
        lines += _published_lines(teacher.numbers)
    steps = [(cell.numbers.get("steps_in_all"), cell.best_point) for _, _, cell in table.cells]
    phases_differ = len({total - point.runs[0]["steps"] if total and point else 0 for total, point in steps}) > 1
    lines += [line for row in table.rows for line in _row_lines(row) if phases_differ or line.name != PHASES]
    averages = [name for name in table.means if name not in table.tasks]
    for name in averages:
        lines = [line.with_average(name, table.means[name]) for line in lines]
    return [*table.tasks, *averages], lines


def notes(table: ResultTable) -> list[str]:
    """Return the notes that readers of the numbers need, one sentence each."""
    bracketed = any(line.bracketed for line in table_lines(table)[1])
    is_optimistic = any(cell.is_optimistic for _, _, cell in table.cells)
    optimistic = "The best of a grid was chosen by these scores: expect a lower score on other data."
    means = [f"{name}: the mean of {_enumeration(columns)}." for name, columns in table.means.items()]
    sentences = [*means, *[BRACKETS] * bracketed, *[optimistic] * is_optimistic]
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


def _enumeration(names: Sequence[str]) -> str:
    separator = "; " if any("," in name for name in names) else ", "
    return f"{separator.join(names[:-1])} and {names[-1]}"


def best_points(table: ResultTable) -> list[str]:
    """Return a sentence for each grid with row, task and the best of the hyper-parameters that vary in it."""
    return [f"{name} on {task}: {best_settings_text(cell)}" for name, task, cell in table.cells if cell.best_settings]


def best_settings_text(cell: ResultCell) -> str:
    """Return the hyper-parameters of a grid's best point, and the number of other points with an equal score."""
    text = ", ".join(f"{name} {format_value(value)}" for name, value in cell.best_settings.items())
    return f"{text} ({len(cell.best_points) - 1} more with the same score)" if len(cell.best_points) > 1 else text


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


def _row_lines(row: Row) -> list[Line]:
    """Return a row's lines. Each kind of value has its own, so that a mean is never beside the best of a grid."""
    waiting = {task: cell.status for task, cell in row.cells.items() if not cell.points}
    kinds = list(dict.fromkeys(cell.kind for cell in row.cells.values() if cell.points))
    lines: list[Line] = []
    for number, kind in enumerate(kinds or [""]):
        numbers = {task: cell.numbers for task, cell in row.cells.items() if cell.points and cell.kind == kind}
        values = _column(numbers, "value")
        name = f"{row.name}, {kind}" if kind else row.name
        lines.append(Line(name, values, is_detail=False, words={} if number else waiting))
        for detail, column, form, averaged in DETAILS:
            shown_numbers = numbers
            if detail == BEST_RUN:
                shown_numbers = {
                    task: cell for task, cell in numbers.items() if cell["seeds"] > 1 and cell["points"] > 1
                }
            line = Line(detail, _column(shown_numbers, column), form=form, averaged=averaged)
            if any(line.text(task) not in ("0", "1") for task in line.values):
                lines.append(line)
        # The score under selection on the reported examples minus that under held-out selection.
        held_out = {task: row.cells.get(held_out_column(task)) for task in values}
        optimism = {
            task: values[task] - cell.value for task, cell in held_out.items() if cell and cell.value is not None
        }
        if optimism:
            lines.append(Line("optimism", optimism, form="{:+.2f}", averaged=False))
        lines += _published_lines(numbers)
    return lines


def _column(numbers: Mapping[str, Mapping[str, Any]], column: str) -> dict[str, float]:
    """Return the numbers of a column by task, where there are any."""
    return {task: of_task[column] for task, of_task in numbers.items() if of_task.get(column) is not None}


def _published_lines(numbers: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """Return two lines per source: its published numbers, and the differences of the run's scores from them."""
    lines = []
    for source in dict.fromkeys(of_task["source"] for of_task in numbers.values() if "source" in of_task):
        of_source = {task: of_task for task, of_task in numbers.items() if of_task.get("source") == source}
        bracketed = frozenset(task for task, of_task in of_source.items() if not of_task["comparable"])
        lines.append(Line(source, _column(of_source, "published"), bracketed=bracketed))
        lines.append(Line("difference", _column(of_source, "difference"), form="{:+.2f}", bracketed=bracketed))
    return lines


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
        interval = f"95% {bounds_text(test.low, test.high)}" if test.low is not None else f"{test.differing} differ"
        exact = " (exact)" if test.is_exact else ""
        parts.append(f"over {units}: {interval}, {_p(comparison, 'examples')}{exact}")
    if comparison.seeds_p is not None:
        parts.append(f"t-test over {comparison.shared} seeds: {_p(comparison, 'seeds')}")
    if comparison.methods:
        interval = f"{_level(comparison.methods.looks)} {bounds_text(*comparison.methods.interval)}"
        text = f"over seeds and examples: {interval}, {_p(comparison, 'methods')}"
        parts.append(f"{text}: {conclusion_text(comparison)}")
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
        numbers.append(bounds_text(*methods.interval) if methods else "")
        numbers.append(_p_text(comparison.corrected.get("methods", methods.p)).removeprefix("p ") if methods else "")
        rows.append([comparison.first, comparison.second, comparison.task, *numbers, conclusion_text(comparison)])
    return rows


def escaped(text: str) -> str:
    """Return text without characters that Markdown would read as its own."""
    return re.sub(r"([|*_`<\\\[\]])", r"\\\1", text)


def as_mapping(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison for JSON: differences and intervals in points, p-values, and the conclusion in words."""
    examples, methods = comparison.examples, comparison.methods
    content = {
        name: getattr(comparison, name) for name in ("first", "second", "task", "metric", "difference", "margin")
    }
    content["p"], content["p_holm"] = comparison.p_values, dict(comparison.corrected)
    content["examples"] = examples and {
        "examples": examples.examples,
        "units": examples.units,
        "differing": examples.differing,
        "interval": examples.low is not None and _points(examples.low, examples.high),
    }
    content["seeds"] = comparison.shared
    content["methods"] = methods and {
        "difference": 100 * methods.difference,
        "interval": _points(*methods.interval),
        "looks": methods.looks,
        "seed_variance": 1e4 * methods.seed_variance,
        "example_variance": 1e4 * methods.example_variance,
    }
    content |= {"conclusion": comparison.conclusion, "is_not_worse": comparison.is_not_worse}
    content |= {"seeds_needed": comparison.seeds_needed, "fixed_stages": comparison.fixed_stages}
    return content | {"remarks": comparison.remarks}


def _points(*fractions: float | None) -> list[float]:
    return [100 * fraction for fraction in fractions if fraction is not None]


def bounds_text(low: float | None, high: float | None) -> str:
    """Return an interval in points."""
    return "[" + ", ".join(f"{bound:+.2f}" for bound in _points(low, high)) + "]"


def _p(comparison: Comparison, test: str) -> str:
    """Return a p-value and, in a family of several, its corrected value."""
    p, corrected = comparison.p_values[test], comparison.corrected.get(test)
    size = comparison.family.get(test, 1)
    return _p_text(p) + (f" (Holm, {size} tests: {_p_text(corrected)})" if corrected is not None and size > 1 else "")


def _p_text(value: float) -> str:
    return "p < 0.0001" if value < 0.00005 else f"p {value:.4f}"
