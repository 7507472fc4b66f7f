"""Write the files of a report: one table in every format."""

import os
from collections.abc import Sequence
from pathlib import Path

from distill_runner.report.collect import Result
from distill_runner.report.compare import optimism
from distill_runner.report.formats import as_csv, latex, markdown
from distill_runner.report.page import html
from distill_runner.report.rows import tabulate
from distill_runner.report.table import terminal


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
    found = optimism(table)
    text = terminal(table, found)
    files = {
        "txt": text + "\n",
        "md": f"# {title}\n\n{markdown(table, found)}",
        "csv": as_csv(table),
        "tex": latex(table, found),
        "html": html(table, title, found, pictures=pictures),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for extension, content in files.items():
        partial = folder / f"table.{extension}.{os.getpid()}.partial"  # by process: two may write one sweep's tables
        partial.write_text(content, encoding="utf-8")
        partial.replace(folder / f"table.{extension}")
    return text
