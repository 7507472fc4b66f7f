"""Lines of the account of what a run reads: its data, its weights, and whatever else a part of it takes in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

WIDTH = 8
"""Width of the topics in front of the lines."""


@dataclass(frozen=True)
class AccountLine:
    """One line of the account.

    Attributes:
        topic: what was read: ``data``, ``lengths``, ``weights``.
        text: what was taken of it, left out, or not understood.
        warnings: what would surprise the user, a sentence each.
        details: the same in numbers, for ``result.json``.
    """

    topic: str
    text: str
    warnings: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.topic:{WIDTH}} {self.text}"


def account_entries(lines: Iterable[AccountLine]) -> list[dict[str, Any]]:
    """Return the lines as entries of ``result.json``."""
    return [{"topic": line.topic, "text": line.text, "warnings": list(line.warnings), **line.details} for line in lines]
