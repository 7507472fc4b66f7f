"""The settings of a run beside those of its paper, and the readings where the paper is silent (``conf/recipe``)."""

import textwrap
from collections.abc import Mapping
from typing import Any

from distill_runner.common.errors import as_typed
from distill_runner.common.readings import at

WIDTH = 120
DECLARING = ("recipe", "method", "student")
"""Parts of the configuration that may have ``readings``."""


def beside_the_paper(settings: Mapping[str, Any]) -> list[str]:
    """Return a header and a line for each setting that the recipe's paper mentions and the run has.

    Args:
        settings: resolved configuration.
    """
    recipe = settings["recipe"]
    known = ((key, at(settings, key), str(said)) for key, said in recipe.get("says", {}).items())
    rows = [("recipe", "this run", str(recipe["paper"]))]
    rows += [(key, _text(value), said) for key, value, said in known if value]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = []
    for key, value, said in rows:
        head = f"{key:<{widths[0]}}  {value:<{widths[1]}}  "
        lines += textwrap.wrap(said, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    return lines


def _text(value: list[Any]) -> str:
    (found,) = value
    return ", ".join(map(str, found)) if isinstance(found, list) else "null" if found is None else str(found)


def declared_readings(settings: Mapping[str, Any]) -> list[str]:
    """Return the readings that the chosen configuration files declare under ``readings``, one line each.

    A reading with a ``value`` applies only while the option has that value. A reading of an option that the run does
    not have is left out. The source of a reading is the recipe's paper unless the reading names another source.

    Readings of tasks and corpora are not included; they are read with their stages. A run that was made in Python,
    without configuration files, has no readings here.
    """
    if "recipe" not in settings:
        return []
    paper, lines = settings["recipe"]["paper"], []
    for part in DECLARING:
        for key, reading in (settings.get(part) or {}).get("readings", {}).items():
            meant = reading if isinstance(reading, Mapping) else {"text": reading}
            for value in at(settings, key):
                if meant.get("value", value) == value:
                    lines.append(f"{key}={as_typed(value)}: {meant['text']} ({meant.get('source', paper)})")
    return lines
