"""The table as one self-contained HTML page: pictures are embedded, and there are no scripts."""

import base64
import mimetypes
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader

from distill_runner.common.errors import as_typed
from distill_runner.report.cells import settings
from distill_runner.report.collect import Result, pictures_of
from distill_runner.report.compare import Comparison, sentence
from distill_runner.report.lines import chosen_settings, lines, notes
from distill_runner.report.rows import ResultTable


def html(table: ResultTable, title: str, comparisons: Sequence[Comparison] = (), pictures: Sequence[Path] = ()) -> str:
    """Return the page: table, comparisons, causes of failures, pictures, and each run's settings and command.

    A run's pictures of examples, if it has any, are shown with its command; of several seeds, those of the first.

    Args:
        pictures: PNG, JPEG or SVG files to embed; files that do not exist are left out.
    """
    columns, every = lines(table)
    cells = [cell for row in table.rows for cell in row.cells.values()]
    environment = Environment(
        loader=PackageLoader("distill_runner.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("page.html")
    return page.render(
        title=title,
        columns=columns,
        lines=every,
        rows=table.rows,
        notes=notes(table),
        finished=sum(len(point.runs) for cell in cells for point in cell.points),
        unfinished=table.unfinished,
        comparisons=[sentence(comparison) for comparison in comparisons],
        pictures=_embedded(pictures),
        pictures_of=lambda run: _embedded(pictures_of(Path(run["folder"]))),
        typed=as_typed,
        settings=settings,
        chosen_settings=chosen_settings,
        folder_name=_folder_name,
    )


def _folder_name(run: Result) -> str:
    return Path(run["folder"]).name


def _embedded(files: Sequence[Path]) -> list[tuple[str, str]]:
    """Return name and content of the files that exist."""
    return [(file.stem, _data(file)) for file in files if file.is_file()]


def _data(file: Path) -> str:
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
