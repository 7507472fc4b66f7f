"""``sweep.where``: conditions on the keys of a point, such as ``loss.eta + loss.lambda <= 1``."""

import ast
import re
from typing import Any

from omegaconf import DictConfig, OmegaConf
from simpleeval import EvalWithCompoundTypes, InvalidExpression

from distill_runner.common.errors import UserError, first_line

# Every word that is neither quoted nor in _WORDS is a configuration key. Keys are replaced by variable names, because
# Python cannot evaluate dotted keys of mappings, nor `lambda` as a name.
_KEY = re.compile(r"""'[^']*'|"[^"]*"|(?<![\w.])[A-Za-z_]\w*(?:\.\w+)*""")
_WORDS = {"and", "or", "not", "in", "is", "if", "else", "True", "False", "None"}
_ABSENT = object()
LONGEST = 500
"""Maximum number of characters of a condition: a longer one could be nested too deeply for Python's parser."""


def holds(condition: str, config: DictConfig) -> bool:
    """Return whether the configuration of a point meets ``condition``.

    A condition consists of comparisons and arithmetic over keys, numbers and quoted text, without function calls.

    Raises:
        UserError: ``condition`` cannot be read, or names a key that does not exist.
    """
    if len(condition) > LONGEST:
        raise UserError("sweep.where", f"{condition[:40]}...", f"is longer than {LONGEST} characters", "Split it.")
    values: dict[str, Any] = {}

    def name_of(found: re.Match[str]) -> str:
        word = found[0]
        if word in _WORDS or word[0] in "'\"":
            return word
        name = f"_{len(values)}"
        values[name] = OmegaConf.select(config, word, default=_ABSENT)
        if values[name] is _ABSENT:
            remedy = f"Put text in quotes: '{word}'. All keys: distill-run --cfg job"
            raise UserError("sweep.where", condition, f"there is no key {word}", remedy)
        if isinstance(values[name], DictConfig):
            remedy = f"Compare one of them: {', '.join(f'{word}.{key}' for key in [*values[name]][:4])}."
            raise UserError("sweep.where", condition, f"{word} is a group of keys, which equals no value", remedy)
        return name

    expression = _KEY.sub(name_of, condition)
    try:
        if any(isinstance(node, ast.Call | ast.Attribute) for node in ast.walk(ast.parse(expression, mode="eval"))):
            raise InvalidExpression("calls and attributes are not allowed")
        return bool(EvalWithCompoundTypes(names=values, functions={}).eval(expression))
    except (InvalidExpression, SyntaxError, TypeError, LookupError, ValueError, ArithmeticError) as error:
        problem = f"is not a condition: {first_line(error)}"
        remedy = "For example: sweep.where=['loss.eta + loss.lambda <= 1']"
        raise UserError("sweep.where", condition, problem, remedy) from error
