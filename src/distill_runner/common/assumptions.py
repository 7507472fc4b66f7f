"""Assumptions: the choices that this program makes where a paper leaves a detail open.

An option declares its own as ``Annotated[<type>, Assumption(...)]``. A configuration file declares those that it makes
itself under ``assumptions``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

ANY_VALUE: Any = object()
"""``Assumption.value`` of an assumption that applies to every value of the option."""
STRUCTURE = ("method", "terms", "arguments")
"""Parts of an option's path that are left out of the key shown in results."""


@dataclass(frozen=True)
class Assumption:
    """Choice that an option makes because the method's source leaves it open.

    Args:
        text: the choice made by default, and what else could be meant.
        source: the place that leaves the choice open, such as ``BERT A.2``.
        value: the only value of the option to which the assumption applies; all values by default.
    """

    text: str
    source: str
    value: Any = ANY_VALUE

    def applies_to(self, value: Any) -> bool:
        return self.value is ANY_VALUE or bool(self.value == value)


def assumptions_field() -> Any:
    """Return a schema's field for the assumptions that its configuration file declares.

    The field maps the full key of an option to the arguments of an ``Assumption``.
    """
    return Field(default_factory=dict, exclude=True)


@dataclass(frozen=True)
class AppliedAssumption:
    """Assumption that applies to a run, with the key and value of its option."""

    key: str
    value: Any
    assumption: Assumption


def applied_assumptions(part: Any, path: tuple[str, ...] = ()) -> Iterator[AppliedAssumption]:
    """Yield the assumptions that apply to a typed part of a configuration and to the parts nested in it."""
    if isinstance(part, Mapping):
        for name, value in part.items():
            yield from applied_assumptions(value, (*path, str(name)))
    if not isinstance(part, BaseModel):
        return
    for key, arguments in getattr(part, "assumptions", {}).items():
        assumption = Assumption(**arguments)
        for value in values_at(part, key.partition(".")[2]):
            if assumption.applies_to(value):
                yield AppliedAssumption(key, value, assumption)
    for name, field in type(part).model_fields.items():
        value, option_path = getattr(part, name), (*path, name)
        for assumption in field.metadata:
            if isinstance(assumption, Assumption) and assumption.applies_to(value):
                key = ".".join(word for word in option_path if word not in STRUCTURE)
                yield AppliedAssumption(key, value, assumption)
        yield from applied_assumptions(value, option_path)


def values_at(node: Any, key: str) -> list[Any]:
    """Return the value at a dotted key of mappings and typed parts, as a list of one; empty if the key is absent."""
    for name in key.split("."):
        try:
            node = node[name] if isinstance(node, Mapping) else getattr(node, name)
        except (KeyError, AttributeError):
            return []
    return [node]
