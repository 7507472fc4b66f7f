"""docs/papers: every table and figure of the five papers has a row, which agrees with sweeps and published numbers.

``python -m tests.test_papers`` makes the pages of ``rows.yaml``.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.paper_hours import GPUS, commands, forward, forward_resnet
from distill_runner.report.published import cells

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "papers"
PAPERS: dict[str, dict[str, Any]] = yaml.safe_load((PAGES / "rows.yaml").read_text())
HOURS: dict[str, dict[str, float]] = yaml.safe_load((PAGES / "hours.yaml").read_text())
HOWS = {"command": "command", "stand-in": "stand-in", "set": "in the configuration", "drawing": "drawing"}

PLACES: dict[str, tuple[Any, Any]] = {  # as the captions of the papers count
    "alp_kd": (range(1, 11), range(1, 5)),
    "internal": (range(1, 5), range(1, 12)),
    "minilmv2": (range(1, 13), range(1, 3)),
    "pro_kd": (range(1, 16), range(1, 2)),
    "well_read": (["1a", "1b", 2, 3, 4], range(1, 11)),
}


def page(paper: str) -> str:
    """The page of a paper."""
    about, rows = PAPERS[paper]["about"], PAPERS[paper]["rows"]
    first = next(str(row[2]).split("; ")[0] for row in rows.values() if "run sweep" in str(row[2]))
    lines = [
        f"# {PAPERS[paper]['title']}",
        "",
        "```sh",
        f"{first} plan=true",
        "```",
        "",
        about,
        "",
        "Hours are [computed](../performance.md#hours-of-the-papers).",
        "",
        "| | shows | reproduced by | training runs, hours | what differs; measured at small scale |",
        "| --- | --- | --- | --- | --- |",
    ]
    drawings = [f"{place} ({row[0]}{row[2] and f', `{row[2]}`'})" for place, row in rows.items() if row[1] == "drawing"]
    for place, (shows, how, source, runs, differs, measured) in rows.items():
        row_commands = [command for command in str(source).split("; ") if command]
        code = "<br>".join(f"`{command}`" for command in row_commands)
        label = code if how == "command" else f"{HOWS[how]}{': ' if code else ''}{code}"
        costs = [sum(HOURS[command][gpu] for command in row_commands if command in HOURS) for gpu in GPUS]
        link = ", ".join(f"[{name}](../results/{name}.md)" for name in measured.split())
        hours = [
            f"{cost:,.{0 if cost >= 10 else 1}f} h ({gpu.upper()})"
            for gpu, cost in zip(GPUS, costs, strict=True)
            if cost
        ]
        effort = ", ".join([str(runs), *hours])
        remarks = "; ".join(filter(None, (differs, link)))
        if how != "drawing":
            name = re.sub(r" (?=\d)", "&nbsp;", place)  # the numbers stay with their word; words of sections wrap
            lines.append(f"| {name} | {shows} | {label} | {effort} | {remarks} |")
    return "\n".join([*lines, "", f"Drawings: {', '.join(drawings)}.", ""])


PARTS = {  # columns and numbers of the text that other commands reproduce than the table's or the figure's own
    "internal": ["Section Experimental Setup", "Section Performance vs. Parameters"],
    "minilmv2": ["Tables 1 to 9, #Param", "Tables 1, 2 and 9, Speedup"],
    "well_read": ["Section 6.1", "Section 6.2", "Section 6.3"],
}


@pytest.mark.parametrize("paper", PLACES)
def test_every_table_and_figure_has_a_row(paper: str) -> None:
    """A reader who looks for a number of the paper finds the command that repeats it."""
    tables, figures = PLACES[paper]
    expected = [f"Table {number}" for number in tables] + [f"Figure {number}" for number in figures]
    parts = PARTS.get(paper, [])
    assert [place for place in PAPERS[paper]["rows"] if place not in parts] == expected
    assert [place for place in PAPERS[paper]["rows"] if place in parts] == parts
    assert {row[1] for row in PAPERS[paper]["rows"].values()} <= set(HOWS)


def test_every_printed_number_is_of_a_row() -> None:
    for paper in PAPERS:
        places = {cell.table if not cell.is_of_a_table else f"Table {cell.table}" for cell in cells(paper)}
        assert places <= set(PAPERS[paper]["rows"])


@pytest.mark.parametrize("paper", PLACES)
def test_sweeps_and_rows_name_each_other(paper: str) -> None:
    named = {name for row in PAPERS[paper]["rows"].values() for name in re.findall(r"sweep=([\w/]+)", str(row[2]))}
    there = {f"{paper}/{file.stem}" for file in (ROOT / "sweeps" / paper).glob("*.yaml")}
    assert named == there - {"alp_kd/seeds", "internal/schedule"}  # whose intervals and controls no paper has


def test_places_and_measurements_exist() -> None:
    for paper in PAPERS.values():
        for place, (_, how, by, _, _, measured) in paper["rows"].items():
            assert how not in ("command", "stand-in") or by, place
            assert all((ROOT / "docs" / "results" / f"{name}.md").exists() for name in measured.split()), place
            for path in re.findall(r"\b(?:conf|sweeps)/[\w/]+(?:\.yaml)?", str(by)):
                assert (ROOT / path).exists(), (place, path)


def test_every_training_has_hours_and_as_many_students_as_its_row_says() -> None:
    assert list(HOURS) == list(commands())
    assert min(cost["h200"] for cost in HOURS.values()) > 0
    for paper in PAPERS.values():
        for place, (_, _, by, trainings, _, _) in paper["rows"].items():
            if counted := [HOURS[command]["trainings"] for command in str(by).split("; ") if command in HOURS]:
                assert sum(counted) == int(re.findall(r"\d+", str(trainings))[0]), place


def test_operations_are_those_that_are_known() -> None:
    """As others count them: 22.5 billion of BERT-base at 128 tokens, 255 million multiplications of ResNet-110."""
    assert forward(12, 768, 128) == pytest.approx(22.5e9, rel=0.01)
    assert forward_resnet(110) / 2 == pytest.approx(255e6, rel=0.01)


@pytest.mark.parametrize("paper", PLACES)
def test_pages_are_those_of_the_rows(paper: str) -> None:
    assert (PAGES / f"{paper}.md").read_text() == page(paper), "python -m tests.test_papers"


if __name__ == "__main__":
    for paper in PLACES:
        (PAGES / f"{paper}.md").write_text(page(paper))


@pytest.mark.parametrize("paper", PLACES)
def test_the_first_column_is_narrow(paper: str) -> None:
    """Of a laptop's width, "Section Performance vs. Parameters" on one line took a third."""
    cells = re.findall(r"^\| ([A-Z][^|]+) \|", (PAGES / f"{paper}.md").read_text(), re.MULTILINE)
    assert max(len(part.replace("&nbsp;", " ")) for cell in cells for part in cell.split(" ")) <= 12
