"""Base class of all typed parts of a configuration, the messages for values that do not fit, and assumptions.

An option declares its assumption as ``Annotated[<type>, Assumption(...)]``. A configuration file declares those that it
makes itself under ``assumptions``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from distill_runner.common.errors import UserError, format_value, suggestion

LARGEST = 2**63 - 1


class Schema(BaseModel):
    """Base class of every typed part of a configuration: immutable, without unknown keys, with finite numbers only."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _check_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject booleans in place of numbers, and integers above ``LARGEST``.

        No generator, clock or memory takes such integers.
        """
        if not isinstance(value, int):  # most values; a grid has thousands of them
            return value
        annotation: Any = cls.model_fields[info.field_name].annotation if info.field_name else None
        types = _types(annotation)
        if isinstance(value, bool) and types & {int, float} and bool not in types:
            raise ValueError("must be a number")
        if abs(value) > LARGEST:
            raise ValueError(f"must be at most {LARGEST}")
        return value


AnySchema = TypeVar("AnySchema", bound=Schema)

PLAIN_WORDS = {
    r", (unable|got|not) .*| after validation.*": "",  # the message shows the value already
    r"^Value error, ": "",
    r"^(Input|Value|List|Tuple|Dictionary) should ": "must ",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid boolean": "true or false",
    "a valid integer": "a whole number",
    "a valid ": "a ",
    r"a dictionary or instance of \w+": "a group of options",
    r"^Input is not a path .*": "must be a path",
}
"""Patterns in pydantic's messages -> plainer words."""


def validate_config(schema: type[AnySchema], values: Mapping[str, Any] | AnySchema, prefix: str = "") -> AnySchema:
    """Validate a part of a configuration, and return it in typed form.

    Args:
        prefix: the key of that part, with a dot at its end.
    Raises:
        UserError: the first fault with its key; for an unknown key, the remedy names the nearest known key.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        key, value = prefix + ".".join(map(str, fault["loc"])), fault["input"]
        value = None if isinstance(value, Mapping) else value
        match fault["type"]:
            case "extra_forbidden":
                *parents, name = fault["loc"]
                problem, remedy, value = "there is no such key", suggestion(name, _names(schema, parents)), None
            case "missing":
                problem, remedy, value = "needs a value", "", None
            case "literal_error":
                problem = "there is no such choice"
                remedy = suggestion(value, re.findall(r"'([^']*)'", fault["ctx"]["expected"]))
            case _:
                problem, remedy = fault["msg"], ""
                for pattern, words in PLAIN_WORDS.items():
                    problem = re.sub(pattern, words, problem)
        raise UserError(key, value, problem, remedy) from error


def _names(schema: Any, path: Sequence[int | str]) -> list[str]:
    """Return the keys that a schema knows at ``path``."""
    classes = (part for part in (schema, *get_args(schema)) if isinstance(part, type))
    inner = next((part for part in classes if issubclass(part, Schema)), None)
    if inner is None:
        return []
    if not path:
        return list(inner.model_fields)
    if inner is not schema and getattr(schema, "__origin__", None) is dict:
        return _names(inner, path[1:])
    field = inner.model_fields.get(str(path[0]))
    return _names(field.annotation, path[1:]) if field else []


@cache
def _types(annotation: Any) -> set[Any]:
    """Return the types that a field accepts: ``annotation`` and, recursively, its type arguments."""
    return {annotation, *chain(*(_types(part) for part in get_args(annotation)))}


# Assumptions: the choices that this program makes where a paper leaves a detail open

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

    def line(self, key: str, value: Any) -> str:
        return f"{key}={format_value(value)}: {self.text} ({self.source})"


def applied_assumptions(part: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a line for each assumption that applies to a typed part of a configuration or to a part nested in it."""
    if isinstance(part, Mapping):
        for name, value in part.items():
            yield from applied_assumptions(value, (*path, str(name)))
    if not isinstance(part, BaseModel):
        return
    for key, arguments in getattr(part, "assumptions", {}).items():
        assumption = Assumption(**arguments)
        for value in values_at(part, key.partition(".")[2]):
            if assumption.applies_to(value):
                yield assumption.line(key, value)
    for name, field in type(part).model_fields.items():
        value, option_path = getattr(part, name), (*path, name)
        for assumption in field.metadata:
            if isinstance(assumption, Assumption) and assumption.applies_to(value):
                yield assumption.line(".".join(word for word in option_path if word not in STRUCTURE), value)
        yield from applied_assumptions(value, option_path)


def values_at(node: Any, key: str) -> list[Any]:
    """Return the value at a dotted key of mappings and typed parts, as a list of one; empty if the key is absent."""
    for name in key.split("."):
        try:
            node = node[name] if isinstance(node, Mapping) else getattr(node, name)
        except (KeyError, AttributeError):
            return []
    return [node]
