"""What a remedy offers to type is data, in Hydra's grammar, and of keys that the configuration has.

tests/test_cli.py and tests/faults follow the offers: each is appended to the command that was refused.
"""

import ast
import pickle
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from distill_runner.common.errors import Remedy, UserError, command, override
from distill_runner.compose.command_line import expand_shorthand, quoted
from distill_runner.compose.folders import choices, configuration_keys

SOURCE = Path(__file__).parents[1] / "src" / "distill_runner"
ERRORS = {"UserError": 3, "Unavailable": 3, "FileProblem": 1}
"""Exceptions with a remedy, and the number of the arguments before it."""
PARSER = OverridesParser.create()


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            yield f"{file.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}", node


def remedies(node: ast.AST) -> list[ast.expr]:
    """The expressions that a node takes for a remedy: a value of that name, or the last argument of an error."""
    match node:
        case (
            ast.Assign(targets=[ast.Name(name)], value=value)
            | ast.AugAssign(target=ast.Name(name), value=value)
            | ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value)
        ):
            return [value] if "remedy" in name.lower() else []
        case ast.Call(func=ast.Name(id=name), args=args) if name in ERRORS:
            return args[ERRORS[name] :]
    return []


def spelled(node: ast.expr) -> Iterator[str]:
    """Overrides in the strings of an expression, outside of calls."""
    key, of_python = r"(?<![\w.$<-])~?[a-z_]\w*(?:[./]\w+)*=(?!=)\S", r"\w\(.*?\)|\?\S*"
    match node:
        case ast.Constant(value=str(text)):
            yield from re.findall(key, re.sub(of_python, "", text))
        case ast.JoinedStr(values=parts):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts)
            yield from re.findall(rf"{key}|x[\w.]*=\S", re.sub(of_python, "", text))
            yield from (ast.unparse(part) for part in parts if re.search(r"\b(override|command)\(", ast.unparse(part)))
        case ast.BinOp(left=left, right=right):
            yield from (*spelled(left), *spelled(right))
        case ast.IfExp(body=body, orelse=other):
            yield from (*spelled(body), *spelled(other))


def test_no_remedy_spells_an_override_itself() -> None:
    source = "remedy = f'Take {key}=1.' + 'or method=rkd'\nraise UserError(a, b, 'task.type=x', 'seed=1')"
    examples = [text for node in ast.walk(ast.parse(source)) for part in remedies(node) for text in spelled(part)]
    assert len(examples) == 3
    problems = [(place, text) for place, node in nodes() for part in remedies(node) for text in spelled(part)]
    assert not problems


def test_all_that_is_offered_exists() -> None:
    """The keys that are written out are keys of the configuration, and the choices are those of their groups."""
    keys, number = configuration_keys(), 0
    for place, node in nodes():
        if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("override", "command")):
            continue
        number += 1
        constants = [part.value if isinstance(part, ast.Constant) else None for part in node.args]
        for key, value in zip(constants[::2], constants[1::2], strict=False):
            if isinstance(key, str) and not key.startswith("hydra"):
                assert key in keys, place
                assert value is None or "." in key or not choices(key) or value in choices(key), place
    assert number > 150


TEXTS = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]))
TEXTS = TEXTS.filter(lambda text: not re.fullmatch(r"<.*>|0|[1-9]\d*", text))  # to fill in, or names of classes
VALUES = st.none() | st.booleans() | st.integers() | TEXTS


def plain(value: Any) -> Any:
    """A parsed value without Hydra's class of quoted text."""
    return [plain(part) for part in value] if isinstance(value, list) else getattr(value, "text", value)


@given(st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3), max_leaves=4))
def test_what_is_offered_is_read_as_it_is_meant(value: Any) -> None:
    offer = override("task.labels" if isinstance(value, list) else "task.dataset", value)
    ((word,),) = offer.offers
    assert shlex.split(offer) == [word]
    assert plain(PARSER.parse_override(quoted(expand_shorthand(word))).value()) == value


def test_text_around_them_keeps_the_offers() -> None:
    remedy = "Take " + override("mapping", "layer", "mapping.layer", 6) + ", or " + command("pip install x") + "."
    assert remedy == "Take mapping=layer mapping.layer=6, or pip install x."
    error = pickle.loads(pickle.dumps(UserError("a", None, "b", remedy))).with_key("c")
    assert isinstance(error.remedy, Remedy)
    assert error.remedy.offers == (("mapping=layer", "mapping.layer=6"), ("pip", "install", "x"))
    with pytest.raises(ValueError, match="shorter"):
        override("mapping", "layer", "mapping.layer")
