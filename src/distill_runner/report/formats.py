"""Tables in every format: 80 columns of text, Markdown, LaTeX, CSV, and an HTML page that needs nothing else."""

import base64
import json
import mimetypes
import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, Template, select_autoescape

from distill_runner.common.errors import format_value, quantity
from distill_runner.common.files import atomic_replacement, without_paths
from distill_runner.common.terminal import duration, markdown_table
from distill_runner.report.collect import Result, constant_prediction, label, pictures_of, settings, undefined_reason
from distill_runner.report.compare import Comparison, compare, has_repeated_seeds, optimism
from distill_runner.report.identity import identity_of
from distill_runner.report.lines import (
    Line,
    best_points,
    best_settings_text,
    escaped,
    notes,
    reasons,
    sentence,
    table_cells,
    table_lines,
)
from distill_runner.report.published import NOT_COMPARABLE
from distill_runner.report.rows import ResultTable, tabulate

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
    score, student = 100 * result["score"], result["student"]
    score_text = "undefined" if undefined_reason(result) else f"{score:.2f}"
    lines = [f"{label(result)} on {result['task']}, seed {result['seed']}: {score_text} {result['metric']}"]
    lines += _splits_lines(result)
    if warning := constant_prediction(result):
        lines += [f"  warning    {warning}"]
    if result.get("teacher_score") is not None:
        lines.append(f"  teacher    {_with_difference(result['teacher_score'], score)}, {result['teacher']}")
    lines += _published_lines(result)
    if test := result.get("test"):
        teacher = test["teacher_score"]
        of_teacher = "" if teacher is None else f"; teacher {_with_difference(teacher, 100 * test['score'])}"
        lines += [f"  test       {100 * test['score']:.2f} {test['metric']}{of_teacher}"]
        lines += [*_splits_lines(test), *_published_lines(test)]
    return "\n".join(
        [
            *lines,
            f"  student    {quantity(student['num_layers'], 'layer')} of width {student['width']}, "
            f"init {student['init']}, {result['num_params'] / 1e6:.1f}M parameters",
            f"  training   best epoch {result['best_epoch']} of {result['epochs']}, "
            f"{duration(result['seconds'])}, {result['examples_per_second']:.0f} examples/s",
            f"  folder     {result['folder']}",
        ]
    )


def _with_difference(other: float, score: float) -> str:
    """Return another score, given as a fraction, and the difference of ``score`` from it, in percent."""
    return f"{100 * other:.2f} ({score - 100 * other:+.2f})"


def _splits_lines(numbers: Mapping[str, Any]) -> list[str]:
    """Return the scores on the splits whose mean is the score, if there are several."""
    splits = [f"{name} {100 * part['score']:.2f}" for name, part in (numbers.get("splits") or {}).items()]
    text = f"mean of {', '.join(splits)}"
    return textwrap.wrap(text, WIDTH, initial_indent=13 * " ", subsequent_indent=13 * " ") if len(splits) > 1 else []


def _published_lines(numbers: Mapping[str, Any]) -> list[str]:
    if not (number := numbers.get("published")):
        return []
    remark = "" if number["comparable"] else f"; {NOT_COMPARABLE}"
    value = _with_difference(number["value"] / 100, 100 * numbers["score"])
    return [f"  published  {value}, {number['source']}{remark}"]


def terminal(table: ResultTable, comparisons: Sequence[Comparison] = ()) -> str:
    """Return the table in 80 columns, with the best point of each grid, comparisons, and why runs have not finished."""
    if not table.rows:
        return "no results of students"

    def filled(sentences: Sequence[str], indent: str = "") -> str:
        further = f"{indent}  "
        lines = (textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=further) for text in sentences)
        return "\n".join(lines)

    parts = [*_blocks(*table_lines(table)), *(textwrap.fill(note, WIDTH) for note in notes(table))]
    if best := best_points(table):
        parts.append("Best points of the grids:\n" + filled(best, "  "))
    parts.append(filled([sentence(comparison) for comparison in comparisons]))
    if causes := reasons(table):
        rest = len(causes) - MAX_REASONS
        sentences = [*causes[:MAX_REASONS], *([f"and {rest} more"] if rest > 0 else [])]
        parts.append("\n".join(cause if len(cause) <= WIDTH else f"{cause[: WIDTH - 1]}…" for cause in sentences))
    return "\n\n".join(part for part in parts if part)


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
    for title, items in (
        ("Best points of the grids", best_points(table)),
        ("Comparisons", [sentence(comparison) for comparison in comparisons]),
        ("Not finished", reasons(table)),
    ):
        if items:
            parts.append(f"{title}:\n\n" + "\n".join(f"- {escaped(item)}" for item in items))
    return "\n\n".join(parts) + "\n"


# --- LaTeX

_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$"}
_LATEX |= {character: f"\\{character}" for character in "&%$#_{}"}


def latex(table: ResultTable, comparisons: Sequence[Comparison] = ()) -> str:
    """Return a ``tabular`` for the package booktabs; notes, comparisons and causes of failure are comments above it."""
    columns, lines = table_lines(table)
    rows = [r"\begin{tabular}{l" + "r" * len(columns) + "}", r"\toprule"]
    rows.append(" & ".join(["", *map(_escaped, columns)]) + r" \\")
    for line in lines:
        rows += [] if line.is_detail else [r"\midrule"]
        name = rf"\quad {_escaped(line.name)}" if line.is_detail else _escaped(line.name)
        rows.append(" & ".join([name, *(_escaped(line.text(column)) for column in columns)]) + r" \\")
    rows += [r"\bottomrule", r"\end{tabular}"]
    remarks = [*notes(table), *(sentence(comparison) for comparison in comparisons), *reasons(table)]
    return "\n".join([*(f"% {remark}" for remark in remarks), *rows]) + "\n"


def _escaped(text: str) -> str:
    text = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"^-(?=\d)", "$-$", re.sub(r"\(-(?=\d)", "($-$", text))


# --- CSV

COLUMNS = (
    "row method task status metric kind value seeds sd interval best_run points grid_mean published source comparable "
    "difference teacher teacher_score num_layers settings scores"
)
"""One line per cell. ``scores`` (by seed) and ``settings`` (hyper-parameters) of the chosen point are JSON."""


def as_csv(table: ResultTable) -> str:
    """Return all numbers of the table in long form: one line per cell, in full precision, teachers first."""
    import pandas as pd

    lines = [
        {"row": teacher.name, "task": task, "status": "done", **numbers}
        for teacher in table.teachers
        for task, numbers in teacher.numbers.items()
    ]
    for row in table.rows:
        for task, cell in row.cells.items():
            lines.append({"row": row.name, "method": label(row.result), "task": task, "status": cell.status})
            if cell.best_point:
                run = cell.best_point.runs[0]
                lines[-1] |= cell.numbers | {
                    "teacher": run.get("teacher"),
                    "teacher_score": 100 * run["teacher_score"] if run.get("teacher_score") is not None else None,
                    "num_layers": run["student"].get("num_layers"),
                    "settings": json.dumps(cell.best_settings),
                    "scores": json.dumps(_scores_by_seed(cell.best_point.runs)),
                }
    text: str = pd.DataFrame(lines, columns=COLUMNS.split(), dtype=object).to_csv(index=False, lineterminator="\n")
    return text


def _scores_by_seed(runs: Sequence[Result]) -> dict[str, float]:
    """Return the score of each run by its seed; by the seeds of all stages, if several runs have one seed."""
    scores = {}
    for run in runs:
        identity = identity_of(run) if has_repeated_seeds(runs) else None
        seeds = sorted(identity.seeds.items()) if identity else ()
        scores[", ".join(f"{name}={seed}" for name, seed in seeds) or str(run["seed"])] = 100 * run["score"]
    return scores


# --- HTML


def template(name: str) -> Template:
    """Return one of the package's templates; values are escaped in those of HTML."""
    environment = Environment(
        loader=PackageLoader("distill_runner.report"),
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["without_paths"] = without_paths
    return environment.get_template(name)


def html(table: ResultTable, title: str, comparisons: Sequence[Comparison] = (), pictures: Sequence[Path] = ()) -> str:
    """Return the page: table, paired tests, causes of failures, pictures, data, environment, settings and commands.

    A run's pictures of examples, if it has any, are shown with its command; of several seeds, those of the first.

    Args:
        comparisons: made for this page; ``default_comparisons`` makes some.
        pictures: PNG, JPEG or SVG files to embed; files that do not exist are left out.
    """
    columns, lines = table_lines(table)
    runs = [run for _, _, cell in table.cells for point in cell.points for run in point.runs]
    header, *tests = table_cells(comparisons)
    return template("page.html").render(
        title=title,
        columns=columns,
        lines=lines,
        rows=table.rows,
        notes=notes(table),
        finished=len(runs),
        unfinished=table.unfinished,
        test_header=header,
        tests=tests,
        sentences=[sentence(comparison) for comparison in comparisons],
        pictures=_embedded(pictures),
        pictures_of=lambda run: _embedded(pictures_of(Path(run["folder"]))),
        environment=_environment(runs),
        account=_account(table),
        typed=format_value,
        settings=settings,
        best_settings=best_settings_text,
        folder_name=lambda run: Path(run["folder"]).name,
    )


def default_comparisons(table: ResultTable) -> list[Comparison]:
    """Compare the first row that has scores with each of the others; nothing where that would be over ``MAX_TESTS``."""
    names = [row.name for row in table.rows if any(cell.best_point for cell in row.cells.values())]
    if len(names) < 2 or len({*names}) < len(names) or (len(names) - 1) * len(table.tasks) > MAX_TESTS:
        return []
    return [comparison for comparison in compare(table, names) if comparison.difference is not None]


def _environment(runs: Sequence[Result]) -> dict[str, str]:
    """Return when the runs started, and the commits, packages and platforms that they recorded, by name."""
    values: dict[str, dict[str, None]] = {"date": {}, "commit": {}}
    for run in runs:
        record: Any = {}
        with suppress(OSError, ValueError):  # it is gone or damaged
            record = json.loads((Path(run["folder"]) / "environment.json").read_text(encoding="utf-8"))
        record = record if isinstance(record, dict) else {}
        packages = record.get("packages") if isinstance(record.get("packages"), dict) else {}
        facts = {"date": str(record.get("started") or "")[:10], "commit": record.get("commit")}
        facts |= {"python": record.get("python"), **packages, "platform": record.get("platform")}
        for name, value in facts.items():
            values.setdefault(name, {}).update({str(value): None} if value else {})
    dates = sorted(values["date"])
    texts = {name: ", ".join(of_name) for name, of_name in values.items()}
    texts["date"] = " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else ""
    return {name: text or "not recorded" for name, text in texts.items()}


def _account(table: ResultTable) -> dict[str, list[tuple[str, str, list[str]]]]:
    """Return, by task, what the runs read: topic, text and warnings, each combination once."""
    accounts: dict[str, dict[tuple[str, str], list[str]]] = {}
    for task, run in ((task, run) for _, task, cell in table.cells for point in cell.points for run in point.runs):
        for entry in run.get("account") or ():
            if entry.get("topic") != "scores":  # the notes have these
                warnings = [str(warning) for warning in entry.get("warnings") or ()]
                accounts.setdefault(task, {}).setdefault((str(entry.get("topic")), str(entry.get("text"))), warnings)
    return {task: [(*name, warnings) for name, warnings in of_task.items()] for task, of_task in accounts.items()}


def _embedded(files: Sequence[Path]) -> list[tuple[str, str]]:
    """Return name and content, as the address of an image, of the files that exist."""
    types = {file: mimetypes.guess_type(file.name)[0] or "application/octet-stream" for file in files if file.is_file()}
    return [(f.stem, f"data:{type_};base64,{base64.b64encode(f.read_bytes()).decode()}") for f, type_ in types.items()]
