"""The house stays small: code lines by package, as the table in CONTRIBUTING says, modules, tests and configuration."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "distill_runner"
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@cache
def code_lines(file: Path) -> int:
    """Lines with at least one token, without comments and docstrings."""
    text = file.read_text(encoding="utf-8")
    docstrings = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in NO_CODE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - docstrings)


def total(folder: Path) -> int:
    return sum(map(code_lines, folder.rglob("*.py")))


def table() -> dict[str, int]:
    """The budgets in CONTRIBUTING by package; ``.`` for modules in no package."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)/?`[^|]*\|[^|]*\| ([\d,]+) \|$", text, re.MULTILINE)
    return {name: int(lines.replace(",", "")) for name, lines in rows}


def measured() -> dict[str, int]:
    packages = {path.name: total(path) for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    modules = sum(map(code_lines, PACKAGE.glob("*.py")))
    return packages | {"hydra_plugins": total(ROOT / "src" / "hydra_plugins"), "cli.py": modules}


def over_budget(budgets: dict[str, int], sizes: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size > 1.1 * budgets[name]}


def test_each_package_keeps_to_its_line() -> None:
    assert table().keys() == measured().keys()
    assert over_budget(table(), measured()) == {}


def test_a_package_that_grows_by_more_than_a_tenth_is_over() -> None:
    assert over_budget({"loop": 100, "store": 100}, {"loop": 110, "store": 111}) == {"store": 111}


def test_code_lines_leave_out_comments_and_docstrings(tmp_path: Path) -> None:
    file, text = tmp_path / "module.py", '"""Doc\nstring."""\n# comment\nX = (\n    1,  # one\n)\n'
    file.write_text(text + 'def f():\n    """Doc."""\n    return """a\nb"""')
    assert code_lines(file) == 3 + 1 + 2


@pytest.mark.parametrize(("folder", "limit"), [("src", 22_500), ("tests", 26_000)])
def test_all_code(folder: str, limit: int) -> None:
    assert total(ROOT / folder) <= limit


def test_modules() -> None:
    assert len([file for file in (ROOT / "src").rglob("*.py") if code_lines(file)]) <= 160


def test_configuration() -> None:
    files = [file for folder in ("conf", "sweeps") for file in (ROOT / folder).rglob("*.yaml")]
    lines = [line for file in dict.fromkeys(file.resolve() for file in files) for line in file.read_text().splitlines()]
    assert len([line for line in lines if line.strip() and not line.lstrip().startswith("#")]) <= 2_400
