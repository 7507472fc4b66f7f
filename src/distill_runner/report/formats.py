"""Tables in every format: 80 columns of text, Markdown, LaTeX, CSV, and an HTML page that needs nothing else."""

import base64
import json
import mimetypes
import re
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path

from jinja2 import Environment, PackageLoader, Template, select_autoescape

from distill_runner.common.errors import format_value, quantity
from distill_runner.common.files import atomic_replacement, without_paths
from distill_runner.common.terminal import duration, markdown_table
from distill_runner.report.collect import Result, constant_prediction, label, pictures_of, settings, undefined_reason
from distill_runner.report.compare import Comparison, compare, optimism
from distill_runner.report.frame import COLUMNS, ResultTable, tabulate
from distill_runner.report.lines import (
    Line,
    best_settings_text,
    escaped,
    notes,
    reasons,
    sections,
    sentence,
    table_cells,
    table_lines,
)
from distill_runner.report.published import NOT_COMPARABLE

WIDTH = 80
MAX_REASONS = 20
MAX_TESTS = 20
"""Most comparisons that a page makes on its own; each resamples the examples of its task."""


def write_report(
    results: Sequence[Result],
    folder: Path,
    title: str,
    pictures: Sequence[Path] = (),
) -> str:
    """Write ``table.txt``, ``.md``, ``.csv``, ``.tex`` and ``.html`` into ``folder``; equal results give equal bytes.

    Args:
        results: in the order in which their rows and tasks are to appear.
        pictures: picture files to show on the page.
    Returns:
        The table as text for a terminal.
    """
    table = tabulate(results)
    comparisons = optimism(table)
    text = terminal(table, comparisons)
    files = {
        "txt": text + "\n",
        "md": f"# {title}\n\n{markdown(table, comparisons)}",
        "csv": as_csv(table),
        "tex": latex(table, comparisons),
        "html": html(table, title, [*comparisons, *default_comparisons(table)], pictures),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for extension, content in files.items():
        with atomic_replacement(folder / f"table.{extension}") as partial:
            partial.write_text(content, encoding="utf-8")
    return text


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
        wrapped=lambda text: textwrap.fill(text, WIDTH, initial_indent=13 * " ", subsequent_indent=13 * " "),
    )


def terminal(table: ResultTable, comparisons: Sequence[Comparison] = ()) -> str:
    """Return the table in 80 columns, with the best point of each grid, comparisons, and why runs have not finished."""
    if not table.rows:
        return "no results of students"
    parts = [*_blocks(*table_lines(table)), *(textwrap.fill(note, WIDTH) for note in notes(table))]
    for title, sentences in sections(table, comparisons).items():
        if title == "Not finished":
            rest = [f"and {len(sentences) - MAX_REASONS} more"] if len(sentences) > MAX_REASONS else []
            lines = [one if len(one) <= WIDTH else f"{one[: WIDTH - 1]}…" for one in [*sentences[:MAX_REASONS], *rest]]
        else:
            indent = "" if title == "Comparisons" else "  "
            lines = [
                textwrap.fill(one, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ") for one in sentences
            ]
            lines[:0] = [f"{title}:"] if indent else []
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _blocks(columns: Sequence[str], lines: Sequence[Line]) -> list[str]:
    """Split the table into as few blocks of columns as the width allows, of nearly equal size."""
    names = [f"  {line.name}" if line.is_detail else line.name for line in lines]
    texts = [[line.text(column) for column in columns] for line in lines]
    # A text without a closing bracket ends in a blank, so that all numbers end in one place.
    cells = [[text if text.endswith(")") else f"{text} " for text in of_line] for of_line in texts]
    name_width = min(1 + max(map(len, names)), WIDTH // 2)
    width = 1 + max(len(text) for of_line in [[f"{column} " for column in columns], *cells] for text in of_line)
    most_columns = max(1, (WIDTH + 1 - name_width) // width)  # + 1: the trailing blank of a line is cut off
    count = ceil(len(columns) / ceil(len(columns) / most_columns))
    blocks = []
    for start in range(0, len(columns), count):
        part = slice(start, start + count)
        block = [" " * name_width + "".join(f"{column + ' ':>{width}}" for column in columns[part])]
        for line_name, of_line in zip(names, cells, strict=True):
            *wrapped, name = textwrap.wrap(line_name, WIDTH, subsequent_indent="  ", drop_whitespace=False)
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
    cells = table.frame[COLUMNS.split()].replace(
        r"^(?=[=+@-])", "'", regex=True
    )  # text that programs take for formulas
    text: str = cells.to_csv(index=False, lineterminator="\n")
    return text


# --- HTML


def template(name: str) -> Template:
    """Return one of the package's templates; values are escaped in those of HTML."""
    environment = Environment(
        loader=PackageLoader("distill_runner.report"),
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=name.endswith(".tex.jinja"),
    )
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
