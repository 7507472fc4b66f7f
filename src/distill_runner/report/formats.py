"""Tables in every format: 80 columns of text, Markdown, LaTeX, CSV, and an HTML page that needs nothing else."""

import base64
import json
import mimetypes
import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, Template, select_autoescape

from distill_runner.common.errors import format_value, quantity
from distill_runner.common.files import atomic_replacement, without_paths
from distill_runner.common.terminal import WIDTH, duration, markdown_table, output_width
from distill_runner.report.collect import Result, constant_prediction, label, pictures_of, settings, undefined_reason
from distill_runner.report.compare import SAME, UNDECIDED, Comparison, compare, optimism
from distill_runner.report.frame import COLUMNS, Cell, ResultTable, tabulate
from distill_runner.report.published import NOT_COMPARABLE
from distill_runner.report.statistics import MAX_SEEDS

if TYPE_CHECKING:
    import pandas as pd

# --- Lines and sentences


PHASES, BEST_RUN = "steps, phases included", "best single run"
RESUMED = dict.fromkeys(("interrupted", "killed"), "repeat the command to resume")
RESUMED["paused"] = "the command resumes without sweep.halving or runtime.pause_after"
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
"""Details of a value: name, column of the table's frame, format, and whether the line is averaged over the tasks."""
# ``PHASES`` is only in tables whose rows differ in the steps of earlier phases, ``BEST_RUN`` beside means of a grid.


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
            lines.append(Line(name, dict(cells["value"].dropna()), is_detail=False, words=words))
            lines += _details(cells, phases_differ)
    averages = {name: columns for name, columns in table.means.items() if name not in table.tasks}
    for line in lines:
        for name, columns in averages.items():
            if line.averaged and line.values.keys() >= {*columns}:
                line.values[name] = fmean(line.values[column] for column in columns)
                line.bracketed.update([name] if line.bracketed & {*columns} else ())
    return [*table.tasks, *averages], lines


def _details(cells: "pd.DataFrame", phases_differ: bool) -> list[Line]:
    lines, is_mean_of_grid = [], (cells["seeds"] > 1) & (cells["points"] > 1)
    for name, column, form, averaged in DETAILS:
        values = dict(cells[column][is_mean_of_grid | (name != BEST_RUN)].dropna())
        line = Line(name, values, form=form, averaged=averaged)
        if any(line.text(task) not in ("0", "1") for task in line.values) and (phases_differ or name != PHASES):
            lines.append(line)
    for source, printed in cells.groupby("source", sort=False):
        bracketed = {task for task, comparable in printed["comparable"].items() if not comparable}
        lines.append(Line(str(source), dict(printed["published"].dropna()), bracketed={*bracketed}))
        lines.append(Line("difference", dict(printed["difference"].dropna()), form=SIGNED, bracketed=bracketed))
    return lines


def notes(table: ResultTable) -> list[str]:
    """Return the notes that readers of the numbers need, one sentence each."""
    sentences = []
    for name, columns in table.means.items():
        separator = "; " if any("," in column for column in columns) else ", "
        sentences.append(f"{name}: the mean of {separator.join(columns[:-1])} and {columns[-1]}.")
    sentences += [BRACKETS] if table.frame["comparable"].eq(False).any() else []
    optimistic = "The best of a grid was chosen by these scores: expect a lower score on other data."
    sentences += [optimistic] if any(cell.is_optimistic for _, _, cell in table.cells) else []
    texts = {
        undefined_reason: "{}: the metric of {} is undefined ({}), which counts as 0.",
        constant_prediction: "{}: a constant prediction in {} ({}).",
    }
    for reason_of, text in texts.items():
        for name, task, cell in table.cells:
            runs = [run for point in cell.points for run in point.runs if "tested_on" not in run]
            if reasons := [reason for run in runs if (reason := reason_of(run))]:
                share = f"{len(reasons)} of {len(runs)} runs" if len(runs) > 1 else "the run"
                sentences.append(text.format(f"{name} on {task}", share, "; ".join(dict.fromkeys(reasons))))
    return sentences


def best_settings_text(cell: Cell) -> str:
    """Return the hyper-parameters of a grid's best point, and the number of other points with an equal score."""
    text = ", ".join(f"{name} {format_value(value)}" for name, value in cell.settings.items())
    return f"{text} ({cell.ties - 1} more with the same score)" if cell.ties > 1 else text


def reasons(table: ResultTable) -> list[str]:
    """Return why runs have not finished; runs with the same row, task, status and cause share a line."""
    groups: dict[tuple[str, str, str, str], list[object]] = {}
    for name, run in table.unfinished:
        cause = str(run.get("error") or "").partition("\n")[0] or RESUMED.get(run["status"], "")
        groups.setdefault((name, run["task"], run["status"], cause), []).append(run["seed"])
    sentences = []
    for (name, task, status, cause), seeds in groups.items():
        runs = f", seed {seeds[0]} {status}" if len(seeds) == 1 else f": {len(seeds)} runs {status}"
        sentences.append(f"{name} on {task}{runs}" + (f": {cause}" if cause else ""))
    return sentences


def sections(table: ResultTable, comparisons: Sequence[Comparison]) -> dict[str, list[str]]:
    """Return the sentences below a table by their title; none without sentences."""
    grids = [(name, task, cell) for name, task, cell in table.cells if cell.settings]
    parts = {
        "Best points of the grids": [f"{name} on {task}: {best_settings_text(cell)}" for name, task, cell in grids],
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
        units = quantity(test.examples, "example")
        units += f" in {quantity(test.units, 'cluster')}" if test.units < test.examples else ""
        interval = f"95% {bounds_text(*test.interval)}" if test.interval else f"{test.differing} differ"
        parts.append(f"over {units}: {interval}, {_p(comparison, 'examples')}{' (exact)' if test.is_exact else ''}")
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
        if comparison.fixed_stages:
            words.append("over seeds of the last stage only")
        return ", ".join(words)
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
    table = markdown_table(header, [[escaped(cell) for cell in row] for row in rows], text_columns=len(header))
    return table + "\n\n" + "\n".join([f"- {escaped(sentence(comparison))}" for comparison in comparisons]) + "\n"


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
    own = "first", "second", "task", "metric", "difference", "margin", "conclusion"
    further = "is_not_worse", "seeds_needed", "fixed_stages", "remarks"
    content = {name: getattr(comparison, name) for name in (*own, *further)}
    content |= {"p": comparison.p_values, "p_holm": dict(comparison.corrected), "examples": None}
    if examples:
        content["examples"] = {name: getattr(examples, name) for name in ("examples", "units", "differing")}
        content["examples"]["interval"] = examples.interval and [100 * bound for bound in examples.interval]
    content |= {"seeds": comparison.shared, "methods": None}
    if methods:
        variances = {name: 1e4 * getattr(methods, name) for name in ("seed_variance", "example_variance")}
        interval = {"interval": [100 * bound for bound in methods.interval], "looks": methods.looks}
        content["methods"] = {"difference": 100 * methods.difference, **interval, **variances}
    return content


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


# --- Pages and files

MAX_REASONS = 20
MAX_TESTS = 20
"""Most comparisons that a page makes on its own; each resamples the examples of its task."""


def write_report(results: Sequence[Result], folder: Path, title: str, pictures: Sequence[Path] = ()) -> str:
    """Write ``table.txt``, ``.md``, ``.csv``, ``.tex`` and ``.html`` into ``folder``; equal results give equal bytes.

    Args:
        results: in the order in which their rows and tasks are to appear.
        pictures: picture files to show on the page.
    Returns:
        The table as text for a terminal.
    """
    table = tabulate(results)
    comparisons = optimism(table)
    files = {
        "txt": terminal(table, comparisons) + "\n",
        "md": f"# {title}\n\n{markdown(table, comparisons)}",
        "csv": as_csv(table),
        "tex": latex(table, comparisons),
        "html": html(table, title, [*comparisons, *default_comparisons(table)], pictures),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for extension, content in files.items():
        with atomic_replacement(folder / f"table.{extension}") as partial:
            partial.write_text(content, encoding="utf-8")
    return terminal(table, comparisons, output_width())


# --- Text for a terminal


def result_row(result: Result) -> str:
    """Summarize one run in a few lines: scores, teacher, published numbers, student, training cost and folder."""
    if result["status"] != "done":
        return f"{reasons(tabulate([result]))[0]}\n  folder     {result['folder']}"
    return template("run.txt.jinja").render(
        result=result,
        label=label(result),
        is_undefined=undefined_reason(result),
        warning=constant_prediction(result),
        layers=quantity(result["student"]["num_layers"], "layer"),
        seconds=duration(result["seconds"]),
        not_comparable=NOT_COMPARABLE,
        wrapped=lambda text: textwrap.fill(text, output_width(), initial_indent=13 * " ", subsequent_indent=13 * " "),
    )


def terminal(table: ResultTable, comparisons: Sequence[Comparison] = (), width: int = WIDTH) -> str:
    """Return the table in ``width`` columns, with grids' best points, comparisons, and why runs have not finished."""
    if not table.rows:
        return "no results of students"
    parts = [*_blocks(*table_lines(table), width), *(textwrap.fill(note, width) for note in notes(table))]
    for title, sentences in sections(table, comparisons).items():
        if title == "Not finished":
            rest = [f"and {len(sentences) - MAX_REASONS} more"] if len(sentences) > MAX_REASONS else []
            lines = [one if len(one) <= width else f"{one[: width - 1]}…" for one in [*sentences[:MAX_REASONS], *rest]]
        else:
            indent = "" if title == "Comparisons" else "  "
            indents: dict[str, Any] = {"initial_indent": indent, "subsequent_indent": f"{indent}  "}
            lines = [f"{title}:"] if indent else []
            lines += [textwrap.fill(one, width, **indents) for one in sentences]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _blocks(columns: Sequence[str], lines: Sequence[Line], screen: int) -> list[str]:
    """Split the table into as few blocks of columns as the width allows, of nearly equal size."""
    names = [f"  {line.name}" if line.is_detail else line.name for line in lines]
    texts = [[line.text(column) for column in columns] for line in lines]
    # A text without a closing bracket ends in a blank, so that all numbers end in one place.
    cells = [[text if text.endswith(")") else f"{text} " for text in of_line] for of_line in texts]
    name_width = min(1 + max(map(len, names)), screen // 2)
    width = 1 + max(len(text) for of_line in [[f"{column} " for column in columns], *cells] for text in of_line)
    # + 1: the trailing blank of a line is cut off
    count = ceil(len(columns) / ceil(len(columns) / max(1, (screen + 1 - name_width) // width)))
    blocks = []
    for start in range(0, len(columns), count):
        part = slice(start, start + count)
        block = [" " * name_width + "".join(f"{column + ' ':>{width}}" for column in columns[part])]
        for line_name, of_line in zip(names, cells, strict=True):
            *wrapped, name = textwrap.wrap(line_name, screen, subsequent_indent="  ", drop_whitespace=False)
            if len(name) >= name_width:
                wrapped, name = [*wrapped, name], ""
            block += [*wrapped, name.ljust(name_width) + "".join(f"{text:>{width}}" for text in of_line[part])]
        blocks.append("\n".join(text.rstrip() for text in block))
    return blocks


# --- Markdown


def markdown(table: ResultTable, comparisons: Sequence[Comparison] = ()) -> str:
    """Return the table in GitHub's Markdown, then lists of grids' best points, comparisons and unfinished runs."""
    columns, lines = table_lines(table)
    names = [f"&nbsp;&nbsp;{escaped(one.name)}" if one.is_detail else f"**{escaped(one.name)}**" for one in lines]
    rows = [[name, *(escaped(one.text(column)) for column in columns)] for name, one in zip(names, lines, strict=True)]
    parts = [markdown_table(["", *columns], rows), *map(escaped, notes(table))]
    for title, items in sections(table, comparisons).items():
        parts.append(f"{title}:\n\n" + "\n".join(f"- {escaped(item)}" for item in items))
    return "\n\n".join(parts) + "\n"


# --- LaTeX

_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$"}
_LATEX |= {character: f"\\{character}" for character in "&%$#_{}"}


def latex(table: ResultTable, comparisons: Sequence[Comparison] = ()) -> str:
    """Return a ``tabular`` for the package booktabs; notes, comparisons and causes of failure are comments above it."""
    columns, lines = table_lines(table)
    remarks = [*notes(table), *(sentence(comparison) for comparison in comparisons), *reasons(table)]
    return template("table.tex.jinja").render(columns=columns, lines=lines, remarks=remarks)


def _escaped(text: str) -> str:
    text = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"^-(?=\d)", "$-$", re.sub(r"\(-(?=\d)", "($-$", text))


def as_csv(table: ResultTable) -> str:
    """Return all numbers of the table in long form: one line per cell, in full precision, teachers first."""
    # Programs take text with these beginnings for formulas.
    cells = table.frame[[*COLUMNS]].replace(r"^(?=[=+@-])", "'", regex=True)
    return str(cells.to_csv(index=False, lineterminator="\n"))


# --- HTML


def template(name: str) -> Template:
    """Return one of the package's templates; values are escaped in those of HTML."""
    loader = PackageLoader("distill_runner.report")
    environment = Environment(loader=loader, autoescape=select_autoescape(), trim_blocks=True, lstrip_blocks=True)
    environment.keep_trailing_newline = name.endswith(".tex.jinja")
    environment.filters |= {"without_paths": without_paths, "tex": _escaped}
    return environment.get_template(name)


def html(table: ResultTable, title: str, comparisons: Sequence[Comparison] = (), pictures: Sequence[Path] = ()) -> str:
    """Return the page: table, paired tests, causes of failures, pictures, data, environment, settings and commands.

    A run's pictures of examples, if it has any, are shown with its command; of several seeds, those of the first.

    Args:
        comparisons: made for this page; ``default_comparisons`` makes some.
        pictures: PNG, JPEG or SVG files to embed; files that do not exist are left out.
    """
    columns, lines = table_lines(table)
    header, *tests = table_cells(comparisons)
    return template("page.html").render(
        title=title,
        columns=columns,
        lines=lines,
        table=table,
        runs=[run for _, _, cell in table.cells for point in cell.points for run in point.runs],
        notes=notes(table),
        test_header=header,
        tests=tests,
        sentences=map(sentence, comparisons),
        pictures=_embedded(pictures),
        pictures_of=lambda run: _embedded(pictures_of(Path(run["folder"]))),
        environment=_environment(table),
        account=_account(table),
        typed=format_value,
        settings=settings,
        best_settings=best_settings_text,
    )


def default_comparisons(table: ResultTable) -> list[Comparison]:
    """Compare the first row that has scores with each of the others; nothing where that would be over ``MAX_TESTS``."""
    names = [name for name, cells in table.rows.items() if any(cell.points for cell in cells.values())]
    if len(names) < 2 or len({*names}) < len(names) or (len(names) - 1) * len(table.tasks) > MAX_TESTS:
        return []
    return [comparison for comparison in compare(table, names) if comparison.difference is not None]


def _environment(table: ResultTable) -> dict[str, str]:
    """Return when the runs started, and the commits, packages and platforms that they recorded, by name."""
    values: dict[str, dict[str, None]] = {"date": {}, "commit": {}, "python": {}, "platform": {}}
    for run in (run for _, _, cell in table.cells for point in cell.points for run in point.runs):
        with suppress(OSError, ValueError, KeyError):  # it is gone or damaged
            record = json.loads((Path(run["folder"]) / "environment.json").read_text(encoding="utf-8"))
            facts = {"date": record["started"][:10], "commit": record["commit"], "python": record["python"]}
            for name, value in {**facts, **record["packages"], "platform": record["platform"]}.items():
                values.setdefault(name, {})[str(value)] = None
    if dates := sorted(values["date"]):
        values["date"] = dict.fromkeys([" to ".join(dict.fromkeys([dates[0], dates[-1]]))])
    return {name: ", ".join(of_name) or "not recorded" for name, of_name in values.items()}


def _account(table: ResultTable) -> dict[str, dict[tuple[str, str], list[str]]]:
    """Return, by task, what the runs read: warnings by topic and text, each combination once."""
    accounts: dict[str, dict[tuple[str, str], list[str]]] = {}
    for task, run in ((task, run) for _, task, cell in table.cells for point in cell.points for run in point.runs):
        for entry in run.get("account") or ():
            if entry["topic"] != "scores":  # the notes have these
                accounts.setdefault(task, {}).setdefault((entry["topic"], entry["text"]), entry.get("warnings") or [])
    return accounts


def _embedded(files: Sequence[Path]) -> list[tuple[str, str]]:
    """Return name and content, as the address of an image, of the files that exist."""
    types = {file: mimetypes.guess_type(file.name)[0] or "application/octet-stream" for file in files if file.is_file()}
    return [(f.stem, f"data:{type_};base64,{base64.b64encode(f.read_bytes()).decode()}") for f, type_ in types.items()]
