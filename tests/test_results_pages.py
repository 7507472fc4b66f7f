"""The pages of results: published numbers stand under the table, the method and the task that they are printed for."""

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import pytest

from distill_runner.report.published import PublishedCell, cells, titles

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs" / "results").glob("*.md")), ROOT / "docs" / "tables.md", ROOT / "README.md"]
INDENT = "&nbsp;&nbsp;"


class Number(NamedTuple):
    """A published number on a page, with the row and the column that it stands in."""

    row: str
    paper: str
    table: str
    column: str
    value: Decimal


def published_numbers(text: str) -> Iterator[Number]:
    """Yield the published numbers of the Markdown tables of a page."""
    paper_of = {title: paper for paper, title in titles().items()}
    columns, row = list[str](), ""
    for line in text.splitlines():
        entries = [entry.strip() for entry in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not entries:
            columns = []
        elif not columns:
            columns = [entry.replace("\\_", "_") for entry in entries[1:]]
        elif match := re.match(rf"{INDENT}(.+) Table (\w+)$", entries[0]):
            for column, entry in zip(columns, entries[1:], strict=True):
                if number := re.search(r"\d+\.\d+", entry):
                    yield Number(row, paper_of[match[1]], match[2], column, Decimal(number[0]))
        elif bold := re.fullmatch(r"\*\*(.+)\*\*", entries[0]):
            row = bold[1].replace("\\_", "_")


def matching(number: Number) -> list[PublishedCell]:
    """The printed cells that a number may be."""
    method = number.row.split()[0].rstrip(",")
    task = number.column.split(",")[0].split()[0]
    return [
        cell
        for cell in cells(number.paper)
        if cell.table == number.table
        and cell.value == number.value
        and method in str(cell.method).split("|")
        and (cell.task == task or (cell.task == "average" and task in ("average", "xnli", "mlqa")))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_published_numbers_are_those_of_their_row_and_column(page: Path) -> None:
    """A reader would take the number of another method, task or table for the one to reach."""
    wrong = [number for number in published_numbers(page.read_text()) if not matching(number)]
    assert wrong == []


MODEL = re.compile(r"(\d+)-layer, (\d+)-wide students? distilled from ([A-Z][\w-]+\w)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_row_of_a_paper_is_named_by_its_own_model(page: Path) -> None:
    """XLM-100's row, 16 layers of 1280, was named "6-layer, 384-wide student distilled from XLM-R-large"."""
    text = page.read_text()
    numbers = list(published_numbers(text))
    for line in text.splitlines():
        if line.startswith("| paper's row |") and (model := MODEL.search(line)):
            models = {(cell.num_layers, cell.width, cell.teacher) for number in numbers for cell in matching(number)}
            assert models == {(int(model[1]), int(model[2]), model[3])}, line


def test_numbers_are_found_on_a_page() -> None:
    """A pattern that finds nothing would let every page pass."""
    page = """
|  | rte | mnli |
| --- | ---: | ---: |
| **alp po** | 66.06 | 75.00 |
| &nbsp;&nbsp;ALP-KD Table 1 | 66.43 | (77.90) |
| &nbsp;&nbsp;difference | -0.37 | (-2.90) |
"""
    found = list(published_numbers(page))
    assert [(number.row, number.column, str(number.value)) for number in found] == [
        ("alp po", "rte", "66.43"),
        ("alp po", "mnli", "77.90"),
    ]
    assert matching(found[0])
    assert not matching(found[0]._replace(column="cola"))
    assert not matching(found[0]._replace(row="pkd skip"))


def test_the_experiments_of_internal_kd_have_their_published_numbers() -> None:
    """The page types them by hand: a shifted row would compare a student with another experiment's."""
    printed = {
        (cell.task, str(cell.method).split("|")[-1]): cell.value for cell in cells("internal") if cell.table == "1"
    }
    task, found = "", 0
    for line in (ROOT / "docs" / "results" / "internal.md").read_text().splitlines():
        if line.startswith("## "):
            task = line.removeprefix("## ").split(",")[0].lower()
        elif match := re.match(r"\| (\d)\.(\d) \|.*\| \((\d+\.\d+)\) \|$", line):
            assert printed[task, f"internal_{match[1]}_{match[2]}"] == Decimal(match[3]), line
            found += 1
    assert found == 10 + 6
