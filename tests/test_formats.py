"""Markdown, LaTeX, CSV and the page; the files of a report; the console script."""

import csv
import io
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_runner.commands.parser import run_subcommand
from distill_runner.common.errors import UserError
from distill_runner.report.formats import as_csv, html, latex, markdown, write_report
from distill_runner.report.frame import tabulate
from helpers.fake_results import failed, point, result, run_folder

NASTY = "50 % of_{a}|b* & #1 \\ $x^2 ~ <b>"


def grid() -> list[dict[str, Any]]:
    scores = [0.61, 0.65, 0.63]
    points = [point(lr, score=score) for lr, score in zip([1e-5, 2e-5, 5e-5], scores, strict=True)]
    cola = point(task="cola", metric="matthews", score=-0.02, teacher_score=None, published=None)
    return [*points, cola, failed(key="f", task="mrpc", error=NASTY)]


def test_markdown() -> None:
    text = markdown(tabulate(grid()))
    assert "| **alp all, best of grid** | 65.00 | - | failed | - |" in text
    assert "| &nbsp;&nbsp;mean of grid | 63.00 | - | - | - |" in text
    assert "- alp all on rte: optim.lr 2e-05" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {6}


def test_latex() -> None:
    text = latex(tabulate(grid()))
    assert r"alp all, best of grid & 65.00 & - & failed & - \\" in text
    assert r"alp all & - & $-$2.00 & - & - \\" in text
    assert r"\quad difference & $-$2.15 & - & - & - \\" in text
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {4}
    assert text.count(r"\begin{tabular}{lrrrr}") == text.count(r"\end{tabular}") == 1


def test_names_are_harmless_in_latex_and_markdown() -> None:
    table = tabulate([result(method=NASTY)])
    name = r"50 \% of\_\{a\}|b* \& \#1 \textbackslash{} \$x\textasciicircum{}2 \textasciitilde{} <b> all"
    assert name in latex(table)
    assert r"50 % of\_{a}\|b\* & #1 \\ $x^2 ~ \<b> all" in markdown(table)


@pytest.mark.parametrize("method", ["=1+1", "+cmd", "@SUM(A1)", "-2"])
def test_no_cell_of_csv_is_a_formula(method: str) -> None:
    rows = csv.DictReader(io.StringIO(as_csv(tabulate([result(method=method)]))))
    assert f"'{method}" in [row["row"][: len(method) + 1] for row in rows]


def test_csv_has_all_numbers_of_a_cell() -> None:
    teacher, rte, cola, mrpc = csv.DictReader(io.StringIO(as_csv(tabulate(grid()))))
    assert (teacher["row"], teacher["value"], teacher["published"]) == ("teacher bert_base", "68.23", "68.23")
    assert (rte["kind"], rte["points"], rte["seeds"], rte["sd"]) == ("best of grid", "3", "1", "")
    assert float(rte["value"]) == 65
    assert json.loads(rte["settings"]) == {"optim.lr": 2e-5}
    assert json.loads(rte["scores"]) == {"1": 65.0}
    assert float(rte["difference"]) == pytest.approx(65 - 67.15)
    assert (cola["metric"], float(cola["value"])) == ("matthews", -2)
    assert (mrpc["status"], mrpc["value"]) == ("failed", "")


runs = st.lists(
    st.builds(
        point,
        st.sampled_from([1e-5, 2e-5]),
        st.integers(1, 3),
        st.floats(-1, 1),
        task=st.sampled_from(["rte", "cola"]),
        method=st.sampled_from(["alp", 'a "name", with\ttraps', NASTY]),
    ),
    max_size=12,
)


class Balanced(HTMLParser):
    """Fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    picture = tmp_path / "score.svg"
    picture.write_text("<svg/>")
    page = html(tabulate(grid()), "A <title>", pictures=[picture, tmp_path / "absent.png"])
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert parser.sources == ["data:image/svg+xml;base64,PHN2Zy8+"]
    assert "http" not in page
    assert "<script" not in page
    for text in (
        "A &lt;title&gt;",
        "50 % of_{a}|b* &amp; #1",
        "distill-run task=rte method=alp seed=1",
        "best of grid: optim.lr 2e-05",
        "4 runs finished, 1 not",
        "prefers-color-scheme: dark",
    ):
        assert text in page, text


@given(runs)
@settings(max_examples=25)
def test_every_format_takes_every_table(results: Sequence[dict[str, Any]]) -> None:
    table = tabulate(results)
    parser = Balanced()
    parser.feed(html(table, "t"))
    assert parser.open == []
    assert latex(table).count(r"\toprule") == 1
    assert markdown(table).startswith("|  |")


def test_equal_results_give_equal_bytes_wherever_and_whenever_they_ran(tmp_path: Path) -> None:
    other = [
        entry | {"folder": "/elsewhere/x", "seconds": 7.0, "examples_per_second": 1.0, "pid": 5, "started": "now"}
        for entry in grid()
    ]
    texts = [write_report(entries, tmp_path / name, "Grid") for name, entries in (("a", grid()), ("b", other))]
    assert texts[0] == texts[1]
    names = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert names == ["table.csv", "table.html", "table.md", "table.tex", "table.txt"]
    for name in ("table.csv", "table.md", "table.tex", "table.txt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert str(tmp_path) not in (tmp_path / "a" / name).read_text()


def runs_folder(root: Path) -> Path:
    for number, entry in enumerate(grid()):
        run_folder(root / "runs", f"{number}", result=entry, status=entry)
    return root / "runs"


@pytest.mark.parametrize("name", ["terminal", "markdown", "csv", "latex", "html"])
def test_the_command_writes_every_format(tmp_path: Path, name: str) -> None:
    out = tmp_path / "table"
    run_subcommand("table", [str(runs_folder(tmp_path)), "--format", name, "--out", str(out), "--task", "rte"])
    text = out.read_text()
    assert "65.0" in text
    assert "cola" not in text


def test_the_command_splits_a_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_subcommand("table", [str(runs_folder(tmp_path)), "--task", "rte", "--split", "optim.lr"])
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("alp")]
    assert rows == [f"alp all, optim.lr {lr}" for lr in ("1e-05", "2e-05", "5e-05")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{tmp}/nowhere"], "there is no such folder"),
        (["{tmp}"], "holds no runs"),
        (["{runs}", "--task", "rtee"], "--task=rtee: no run has this value\n  Did you mean 'rte'?"),
        (["{runs}", "--compare", "alp", "rkd"], "--compare=rkd: there is no such row"),
        (["{runs}", "--format", "pdf"], "invalid choice: 'pdf'"),
        (["{runs}", "--format", "picture"], "Give a file: --out"),
        (["{runs}", "--format", "picture", "--out", "{tmp}/scores.doc"], "--out=scores.doc: is not a picture format"),
        (["{runs}", "--out", "{tmp}/nowhere/table.txt"], "its folder does not exist"),
        (["{runs}", "--out", "{tmp}"], "is a folder"),
        ([__file__, "--out", __file__], "is a file to read, too"),
        (["{runs}", "--picture", "nowhere.png"], "--picture=nowhere.png: there is no such file"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, arguments: list[str], said: str) -> None:
    names = {"tmp": tmp_path, "runs": runs_folder(tmp_path / "here")}
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        run_subcommand("table", [argument.format(**names) for argument in arguments])
    assert len(str(caught.value).splitlines()) <= 2
