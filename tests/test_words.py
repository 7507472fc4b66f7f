"""No name that docs/style.md bans is defined in ``src``."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
STYLE = (ROOT / "docs" / "style.md").read_text().partition("\n## Names that are not used\n")[2]
BANNED = {name for row in re.findall(r"^\| (`.*?) \|", STYLE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
BANNED_FUNCTIONS = set(re.findall(r"`(\w+)`", STYLE.rpartition("\nA function of a module is not called")[2]))


def definitions(source: str) -> Iterator[tuple[int, str]]:
    """The line and the name of each definition that has a banned name."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                defined = name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                defined = name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                defined = name
            case _:
                continue
        if defined.strip("_").lower() in BANNED:
            yield node.lineno, defined
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.strip("_") in BANNED_FUNCTIONS:
            yield node.lineno, f"{node.name}()"


def test_the_tables_are_read() -> None:
    assert len(BANNED) > 60
    assert sorted(BANNED_FUNCTIONS) == ["chosen", "lines", "of", "read", "write"]
    source = "def f(given):\n    for of, (x, self.found) in y: pass\ndef lines(): pass"
    assert sorted(definitions(source)) == [(1, "given"), (2, "found"), (2, "of"), (3, "lines()")]


def test_no_banned_name_is_defined() -> None:
    problems = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        name = file.relative_to(ROOT)
        problems += [f"{name}:{line} {word}" for line, word in definitions(file.read_text())]
        problems += [f"{name}: a module" for part in (file.stem, file.parent.name) if part.strip("_") in BANNED]
    assert not problems, "\n".join([f"{len(problems)} banned names (docs/style.md):", *problems])
