"""Lists and mappings that Python, JSON, numpy or pandas printed as text, as files of text such as CSV hold them."""

import ast
import io
import json
import re
import tokenize
from typing import Any

_ARRAY = re.compile(r"\barray\s*\(")
_TYPE = re.compile(r",\s*dtype=[^)\]]*(?=\))")
_VALUES = (tokenize.STRING, tokenize.NUMBER)
_SPACE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def printed_value(text: str) -> Any:
    """Return the list or mapping that ``text`` represents; None for any other text.

    numpy prints no commas: ``['a' 'b']`` are two labels. For Python, that is one text, ``ab``.
    """
    text = text.strip()
    if not (text.startswith(("[", "{")) and text.endswith(("]", "}"))):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(_with_commas(_ARRAY.sub("(", _TYPE.sub("", text))))
    except (ValueError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError):
        return None
    return value if isinstance(value, list | dict) else None


def printed_list(text: str) -> list[Any] | None:
    """Return the list that ``text`` represents; None for any other text."""
    value = printed_value(text)
    return value if isinstance(value, list) else None


def _with_commas(text: str) -> str:
    """Return ``text`` with a comma between two values that only blanks divide.

    Raises:
        SyntaxError: nothing divides two values; Python would join texts.
    """
    words, previous = list[str](), None
    for token in tokenize.generate_tokens(io.StringIO(f"({text})").readline):
        if token.type in _SPACE:
            continue
        is_value = token.type in _VALUES or token.string in ("True", "False", "None")
        if previous is not None and (is_value or token.string in ("[", "{", "-")):
            if token.start == previous:
                raise SyntaxError("two values without a gap")
            words.append(",")
        words.append(token.string)
        previous = token.end if is_value or token.string in ("]", "}") else None
    return " ".join(words)
