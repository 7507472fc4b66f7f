"""Readings: what is taken where a paper is silent, declared where the option is as ``Annotated[<type>, Reading()]``.

A file of configuration declares those that it decides under ``readings``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

EVERY: Any = object()
"""A reading applies whatever the option's value is."""
STRUCTURE = ("method", "terms", "arguments")
"""Parts of a path that a reader of a result need not see."""


@dataclass(frozen=True)
class Reading:
    """What an option decides that its source leaves open.

    Args:
        text: what is taken by default, and what else could be meant.
        source: the place that leaves it open.
        value: of the option, to which alone this applies.
    """

    text: str
    source: str
    value: Any = EVERY


def of_file() -> Any:
    """A schema's field for the readings of its file: by the option's whole key, a text, its source and the value."""
    return Field(default_factory=dict, exclude=True)


@dataclass(frozen=True)
class Applied:
    """A reading with the option of a run that it belongs to."""

    key: str
    value: Any
    reading: Reading


def applied(part: BaseModel, path: tuple[str, ...] = ()) -> Iterator[Applied]:
    """All readings that apply to a typed part of a configuration and to what is in it."""
    for key, declared in getattr(part, "readings", {}).items():
        reading = Reading(**declared)
        for value in at(part, key.partition(".")[2]):
            if reading.value is EVERY or reading.value == value:
                yield Applied(key, value, reading)
    for name, field in type(part).model_fields.items():
        value, here = getattr(part, name), (*path, name)
        for reading in field.metadata:
            if isinstance(reading, Reading) and (reading.value is EVERY or reading.value == value):
                yield Applied(".".join(word for word in here if word not in STRUCTURE), value, reading)
        yield from _below(value, here)


def at(node: Any, key: str) -> list[Any]:
    """The value of a dotted key, of mappings and typed parts, in a list that is empty where there is none."""
    for name in key.split("."):
        try:
            node = node[name] if isinstance(node, Mapping) else getattr(node, name)
        except (KeyError, AttributeError):
            return []
    return [node]


def _below(value: Any, path: tuple[str, ...]) -> Iterator[Applied]:
    if isinstance(value, BaseModel):
        yield from applied(value, path)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _below(part, (*path, str(name)))


def declared(schema: type[BaseModel]) -> list[tuple[str, Any, Reading]]:
    """The readings of a schema's own options: option, default, reading."""
    return [
        (name, None if field.is_required() else field.default, reading)
        for name, field in schema.model_fields.items()
        for reading in field.metadata
        if isinstance(reading, Reading)
    ]
