"""The site: it builds without a warning, its search finds what newcomers type, and no page scrolls sideways."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = os.environ.get("CHROMIUM", "")
"""A Chromium's program, for the tests that draw pages; playwright drives it."""
WIDTHS = (390, 1024, 1366, 1920)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(ROOT / "docs"), str(folder)]
    subprocess.run(command, check=True, timeout=600)
    return folder


@pytest.mark.slow
def test_the_site_has_the_generated_reference(site: Path) -> None:
    assert "warmup" in (site / "reference" / "options" / "optim.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("class imbalance", "tutorials/own-data"),
        ("early stopping", "tutorials/own-data"),
        ("FastAPI", "frontier"),
        ("int8", "tutorials/deploy"),
        ("GPU memory", "clusters"),
        ("learning rate", "reference/options/optim"),
    ],
)
def test_the_search_finds_what_newcomers_type(site: Path, query: str, page: str) -> None:
    """As the page of the search does: a page has every word of the query, by its stem."""
    from sphinx.search.en import SearchEnglish

    index = json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    stem = SearchEnglish({}).stem
    assert page in set.intersection(*(pages_with(index, stem(word.lower())) for word in query.split()))


def pages_with(index: dict[str, Any], stem: str) -> set[str]:
    """Pages that have a word in their text or title."""
    numbers = [index[part].get(stem, []) for part in ("terms", "titleterms")]
    return {index["docnames"][number] for of in numbers for number in (of if isinstance(of, list) else [of])}


def test_the_style_sheet_fixes_no_width() -> None:
    """A fixed width is too wide for some window: ``width: 62em`` made laptops scroll sideways."""
    rules = (ROOT / "docs" / "_static" / "site.css").read_text()
    assert re.findall(r"\{[^{}]*(?<![-\w])width:\s*[1-9][^{}]*\}", rules) == []


@pytest.mark.slow
def test_no_page_scrolls_sideways(site: Path, tmp_path: Path) -> None:
    """Screenshots go to ``DISTILL_SCREENSHOTS``, light and dark."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM:
        pytest.skip("CHROMIUM names no browser")
    pictures = Path(os.environ.get("DISTILL_SCREENSHOTS", tmp_path))
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, overflow = browser.new_page(), {}
        for file in sorted(site.rglob("*.html")):
            page.goto(file.as_uri())
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                root = "document.documentElement"
                if pixels := page.evaluate(f"{root}.scrollWidth - {root}.clientWidth"):
                    overflow[file.name, width] = pixels
                if file.name == "few-labels.html":
                    for scheme in ("light", "dark"):
                        page.emulate_media(color_scheme=scheme)
                        page.screenshot(path=pictures / f"{width}-{scheme}.png")
        browser.close()
    assert overflow == {}
    assert len([*pictures.glob("*.png")]) == 2 * len(WIDTHS)
