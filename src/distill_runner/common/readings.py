"""Readings: choices made where a paper is silent, declared with their option as ``Annotated[<type>, Reading()]``.

A configuration file declares the readings that it decides itself under ``readings``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

EVERY: Any = object()
"""``Reading.value`` of a reading that applies to every value of the option."""
STRUCTURE = ("method", "terms", "arguments")
"""Parts of an option's path that are left out of the key shown in results."""


@dataclass(frozen=True)
class Reading:
    """Choice that an option makes because the source of the method leaves it open.

    Args:
        text: the choice made by default, and what else could be meant.
        source: the place that leaves the choice open, such as ``BERT A.2``.
        value: the only value of the option to which the reading applies; all values by default.
    """

    text: str
    source: str
    value: Any = EVERY


def of_file() -> Any:
    """Return a schema's field for the readings that its configuration file declares.

    The field maps the full key of an option to the arguments of a ``Reading``.
    """
    return Field(default_factory=dict, exclude=True)


@dataclass(frozen=True)
class Applied:
    """Reading that applies to a run, with the key and value of its option."""

    key: str
    value: Any
    reading: Reading


def applied(part: BaseModel, path: tuple[str, ...] = ()) -> Iterator[Applied]:
    """Yield all readings that apply to a typed part of a configuration and to the parts nested in it."""
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
    """Return the value at a dotted key of mappings and typed parts, as a list of one; empty if the key is absent."""
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
    """Return the readings of a schema's own options as tuples of option, default and reading."""
    return [
        (name, None if field.is_required() else field.default, reading)
        for name, field in schema.model_fields.items()
        for reading in field.metadata
        if isinstance(reading, Reading)
    ]
