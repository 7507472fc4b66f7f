"""Tests that text is UTF-8 on every machine, whatever its locale is."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "docs").rglob("*.py")])
POSITION_OF_ENCODING = {"read_text": 0, "write_text": 1}
BINARY = "gzip.open", "bz2.open", "lzma.open", "tarfile.open", "Image.open", "webbrowser.open", "os.open"
"""Functions that open bytes unless a mode says otherwise, or no file of text at all."""


def unspecified(source: str) -> Iterator[int]:
    """Yield the lines that open, read, write or decode text in the encoding of the locale."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        function = ast.unparse(node.func)
        name = function.rpartition(".")[2]
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in POSITION_OF_ENCODING:
            is_unspecified = len(node.args) <= POSITION_OF_ENCODING[name]
        elif name in ("open", "fdopen", "NamedTemporaryFile", "TemporaryFile") and function not in BINARY:
            has_file = function in ("open", "os.fdopen", "io.open")
            modes = [*node.args[has_file : has_file + 1], *([options["mode"]] if "mode" in options else [])]
            mode = modes[0] if modes else ast.Constant("w+b" if "Temporary" in name else "r")
            is_unspecified = isinstance(mode, ast.Constant) and "b" not in str(mode.value)  # else a task's open
        else:  # subprocess
            is_unspecified = isinstance(text := options.get("text"), ast.Constant) and bool(text.value)
        if is_unspecified:
            yield node.lineno


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("open(x)\nopen(x, 'rb')\nopen(x, 'w', encoding='utf-8')\nopen(x, mode='w')", [1, 4]),
        ("x.read_text()\nx.read_text('utf-8')\nx.write_text(y)\nx.write_text(y, encoding='utf-8')", [1, 3]),
        ("x.open()\nx.open('rb')\ngzip.open(x)\nNamedTemporaryFile('w')\nNamedTemporaryFile()\nos.open(x, 0)", [1, 4]),
        ("run(x, text=True)\nrun(x, text=True, encoding='utf-8')\nrun(x)", [1]),
    ],
)
def test_the_search_for_encodings_that_are_left_to_the_locale(source: str, lines: list[int]) -> None:
    assert list(unspecified(source)) == lines


def test_every_text_has_an_encoding() -> None:
    """A run in the C locale trained for hours and failed when it wrote the card, where the papers' symbols are."""
    places = [f"{file.relative_to(ROOT)}:{line}" for file in SOURCES for line in unspecified(file.read_text("utf-8"))]
    assert not places
