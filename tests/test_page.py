"""The HTML page as a person reads it: in a browser, wide, narrow and dark; skipped where there is no Chromium."""

import json
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill_runner.commands.parser import run_subcommand
from helpers.fake_results import failed, predicted, run_folder

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LABELS = np.tile([0, 1], 150)
CONSTANT = "validation: the student predicts 'yes' for all 300 examples"
PROBE = """<script>onload = () => {
  const frame = document.querySelector("iframe").contentDocument, view = frame.defaultView;
  const shown = element => element.checkVisibility() && element.getBoundingClientRect().width > 0;
  const cells = row => [...row.cells].map(cell => cell.innerText.trim());
  const report = {
    title: frame.title, text: frame.body.innerText,
    headings: [...frame.querySelectorAll("h1, h2, h3")].filter(shown).map(heading => heading.innerText),
    tables: [...frame.querySelectorAll("table")].filter(shown).map(table => [...table.rows].map(cells)),
    pictures: [...frame.images].map(image => [image.alt, image.complete && image.naturalWidth, image.width]),
    overflow: frame.documentElement.scrollWidth - view.innerWidth,
    ground: view.getComputedStyle(frame.body).backgroundColor, ink: view.getComputedStyle(frame.body).color,
  };
  document.body.innerHTML = "";
  document.body.appendChild(document.createElement("pre")).textContent = JSON.stringify(report);
};</script>"""


def page_of_runs(root: Path) -> Path:
    """Write the page of five runs: RKD better than NKD, one student that predicts one class only, one failed run."""
    environment = {
        "started": "2026-03-04T05:06:07+00:00",
        "python": "3.12.1",
        "platform": "Linux",
        "packages": {"torch": "2.9.0", "transformers": "5.23.0"},
        "commit": "0123456789ab",
    }
    account = [
        {"topic": "data", "text": "train.csv 900 rows, validation.csv 300 rows", "warnings": ["2 rows occur twice"]},
        {"topic": "weights", "text": "teacher bert: 197 of 199 tensors read", "warnings": []},
    ]
    constant = [*account, {"topic": "scores", "text": "see the warning", "warnings": [CONSTANT]}]
    for method, errors in (("nkd", 60), ("rkd", 6)):
        for seed in (1, 2):
            wrong = np.arange(300) < errors + seed
            run = predicted(root, f"{method}{seed}", np.where(wrong, 1 - LABELS, LABELS), LABELS, **named(method, seed))
            finish(run, environment, {"account": account})
    finish(predicted(root, "pkd1", np.ones(300, int), LABELS, **named("pkd", 1)), environment, {"account": constant})
    entry = failed(key="f", method="ckd", error="out of <memory>")
    run_folder(root, "failed", status=entry)
    run_subcommand("table", [str(root), "--format", "html", "--title", "Two & more", "--out", str(root / "page.html")])
    return root / "page.html"


def named(method: str, seed: int) -> dict[str, Any]:
    return {"method": method, "mapping": None, "attention": None, "seed": seed, "published": None, "settings": {}}


def finish(run: dict[str, Any], environment: dict[str, Any], changes: dict[str, Any]) -> None:
    """Add epochs, what the run read, and its environment to its folder."""
    folder, scores = Path(run["folder"]), [0.5, 0.6, run["score"]]
    history = [{"accuracy": score} for score in scores]
    result = run | {"history": history, "epochs": 3, "best_epoch": 3} | changes
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "environment.json").write_text(json.dumps(environment))


def read_page(page: Path, width: int = 1200, dark: bool = False) -> dict[str, Any]:
    """Return what a browser shows of the page in a window of ``width`` pixels."""
    frame = f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{escape(page.read_text())}"></iframe>'
    probe = page.with_name("probe.html")
    probe.write_text(f"<!doctype html><meta charset='utf-8'><body style='margin:0'>{frame}{PROBE}")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=5000"]
    options += [
        f"--user-data-dir={page.parent / 'browser'}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    ]
    command = [str(CHROMIUM), *options, probe.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    report: dict[str, Any] = json.loads(unescape(dom[dom.index("<pre>") + 5 : dom.index("</pre>")]))
    return report


def brightness(color: str) -> float:
    """Return the mean of the red, green and blue parts of ``rgb(…)``."""
    return sum(map(int, color.removeprefix("rgb(").rstrip(")").split(","))) / 3


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium in PATH")
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    page = page_of_runs(tmp_path)
    shown = read_page(page)
    assert shown["title"] == "Two & more"
    assert shown["headings"] == [
        "Two & more", "Paired tests", "Not finished", "Pictures", "Data and weights", "rte", "Runs", "Environment",
    ]  # fmt: skip
    scores, tests, unfinished = shown["tables"]
    rows = {row[0]: row[1] for row in scores}
    assert (rows["nkd"], rows["rkd"], rows["pkd"]) == ("79.50", "97.50", "50.00")
    assert [row[1] for row in tests] == ["second", "pkd", "rkd"]
    assert tests[2][0] == "nkd"
    assert tests[2][3] == "-18.00"
    assert unfinished[1][0] == "ckd all"
    assert "out of <memory>" in unfinished[1][4]
    for text in ("2026-03-04, commit 0123456789ab, Python 3.12.1", "2 rows occur twice", "predicts 'yes' for all"):
        assert text in shown["text"]
    assert [name for name, *_ in shown["pictures"]] == ["scores", "curves"]
    assert all(width > 100 for _, width, _ in shown["pictures"])
    assert shown["overflow"] <= 0
    assert brightness(shown["ground"]) > 200 > 100 > brightness(shown["ink"])

    narrow = read_page(page, width=360, dark=True)
    assert narrow["overflow"] <= 0, "tables scroll in their own frames"
    assert all(width <= 360 for *_, width in narrow["pictures"])
    assert brightness(narrow["ground"]) < 60 < 180 < brightness(narrow["ink"])
