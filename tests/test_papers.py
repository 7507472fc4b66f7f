"""docs/papers: every table and figure of the five papers has a row, which agrees with sweeps and published numbers.

``python tests/test_papers.py`` makes the pages of ``rows.yaml``.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from distill_runner.report.published import cells, titles

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "papers"
PAPERS: dict[str, dict[str, Any]] = yaml.safe_load((PAGES / "rows.yaml").read_text())
HOWS = {"command": "by command", "stand-in": "by stand-in", "set": "in the configuration", "drawing": "a drawing"}

PLACES = {  # as the captions of the papers count
    "alp_kd": (range(1, 11), range(1, 5)),
    "internal": (range(1, 5), range(1, 12)),
    "minilmv2": (range(1, 13), range(1, 3)),
    "pro_kd": (range(1, 16), range(1, 2)),
    "well_read": (["1a", "1b", 2, 3, 4], range(1, 11)),
}


def page(paper: str) -> str:
    """The page of a paper."""
    known = PAPERS[paper]
    counts = Counter(row[1] for row in known["rows"].values())
    lines = [
        f"# {known['title']}",
        "",
        known["about"],
        "",
        ", ".join(f"{counts[how]} {words}" for how, words in HOWS.items() if counts[how])
        + f", of {len(known['rows'])} tables and figures. Add `plan=true` to a sweep for its hours on your machine.",
        "",
        "| | shows | repeated by | trainings | what differs | measured in small |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for place, (shows, how, by, trainings, differs, measured) in known["rows"].items():
        commands = "<br>".join(f"`{command}`" for command in str(by).split("; ") if command)
        told = commands if how == "command" else f"{HOWS[how]}{': ' if commands else ''}{commands}"
        link = f"[{measured}](../results/{measured}.md)" if measured else ""
        lines.append(f"| {place} | {shows} | {told} | {trainings} | {differs} | {link} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("paper", PLACES)
def test_every_table_and_figure_has_a_row(paper: str) -> None:
    tables, figures = PLACES[paper]
    expected = [f"Table {number}" for number in tables] + [f"Figure {number}" for number in figures]
    assert list(PAPERS[paper]["rows"]) == expected
    assert {row[1] for row in PAPERS[paper]["rows"].values()} <= set(HOWS)


def test_every_printed_number_is_of_a_row() -> None:
    for paper in titles():
        places = {cell.table if not cell.is_of_a_table else f"Table {cell.table}" for cell in cells(paper)}
        assert {place for place in places if not place.startswith("Section")} <= set(PAPERS[paper]["rows"])


@pytest.mark.parametrize("paper", PLACES)
def test_sweeps_and_rows_name_each_other(paper: str) -> None:
    named = {name for row in PAPERS[paper]["rows"].values() for name in re.findall(r"sweep=([\w/]+)", str(row[2]))}
    there = {f"{paper}/{file.stem}" for file in (ROOT / "sweeps" / paper).glob("*.yaml")}
    assert named == there - {"alp_kd/seeds"}  # whose means and intervals no paper has


def test_places_and_measurements_exist() -> None:
    for paper in PAPERS.values():
        for place, (_, how, by, _, _, measured) in paper["rows"].items():
            assert how not in ("command", "stand-in") or by, place
            assert not measured or (ROOT / "docs" / "results" / f"{measured}.md").exists(), place
            for path in re.findall(r"\b(?:conf|sweeps)/[\w/]+(?:\.yaml)?", str(by)):
                assert (ROOT / path).exists(), (place, path)


@pytest.mark.parametrize("paper", PLACES)
def test_pages_are_those_of_the_rows(paper: str) -> None:
    assert (PAGES / f"{paper}.md").read_text() == page(paper), "python tests/test_papers.py"


if __name__ == "__main__":
    for paper in PLACES:
        (PAGES / f"{paper}.md").write_text(page(paper))
