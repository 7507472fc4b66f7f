"""Lists and mappings that Python, JSON, numpy or pandas printed as text, as files of text such as CSV hold them."""

import ast
import json
import re
from typing import Any

_ARRAY = re.compile(r"\barray\s*\(")
_TYPE = re.compile(r",\s*dtype=[^)\]]*(?=\))")
_WORD = re.compile(
    r"""(?P<value>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[+-]?(?:\w[\w.]*|\.\d+)(?:(?<=[eE])[+-]\d+)?)|(?P<mark>\S)"""
)


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
    words, end = list[str](), None  # where a value has ended that a comma has to follow
    for word in _WORD.finditer(_ARRAY.sub("(", _TYPE.sub("", text))):
        if end is not None and (word["value"] or word["mark"] in "[{"):
            if word.start() == end:
                return None  # nothing divides two values; Python would join texts
            words.append(",")
        words.append(word[0])
        end = word.end() if word["value"] or word["mark"] in "]}" else None
    try:
        value = ast.literal_eval(" ".join(words))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, list | dict) else None


def printed_list(text: str) -> list[Any] | None:
    """Return the list that ``text`` represents; None for any other text."""
    value = printed_value(text)
    return value if isinstance(value, list) else None
