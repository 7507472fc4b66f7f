"""A table as one HTML page that needs nothing else: table, paired tests, curves, data, environment, settings."""

import base64
import json
import mimetypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, Template, select_autoescape

from distill_runner.common.errors import format_value
from distill_runner.common.sharing import without_paths
from distill_runner.report.collect import Result, pictures_of, settings
from distill_runner.report.compare import Comparison, compare
from distill_runner.report.comparison_text import sentence, table_cells
from distill_runner.report.lines import best_settings_text, notes, table_lines
from distill_runner.report.rows import ResultTable

MAX_TESTS = 20
"""Most comparisons that a page makes on its own; each resamples the examples of its task."""


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
