"""The recipe of a run beside what its paper says (``conf/recipe``)."""

import textwrap
from collections.abc import Mapping
from functools import reduce
from typing import Any

WIDTH = 120


def beside_the_paper(settings: Mapping[str, Any]) -> list[str]:
    """A line for each setting that the recipe's paper speaks of, and that the run has.

    Args:
        settings: the resolved configuration.
    """
    recipe = settings["recipe"]
    known = ((key, _value(settings, key), str(said)) for key, said in recipe.get("says", {}).items())
    rows = [("recipe", "this run", str(recipe["paper"]))]
    rows += [(key, _text(value), said) for key, value, said in known if value]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = []
    for key, value, said in rows:
        head = f"{key:<{widths[0]}}  {value:<{widths[1]}}  "
        lines += textwrap.wrap(said, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    return lines


def _value(settings: Mapping[str, Any], key: str) -> list[Any]:
    """The value of a dotted key in a list, which is empty where the run has no such key."""
    try:
        return [reduce(lambda node, name: node[name], key.split("."), settings)]
    except (KeyError, TypeError):
        return []


def _text(value: list[Any]) -> str:
    (found,) = value
    return ", ".join(map(str, found)) if isinstance(found, list) else "null" if found is None else str(found)
