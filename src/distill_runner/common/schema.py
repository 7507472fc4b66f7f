"""Base class of all typed parts of a configuration, and the messages for values that do not fit."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from distill_runner.common.errors import UserError, nearest

LARGEST = 2**63 - 1


class Schema(BaseModel):
    """Base class of every typed part of a configuration: immutable, without unknown keys, with finite numbers only."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_meant(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject booleans in place of numbers, and integers above ``LARGEST``.

        No generator, clock or memory takes such integers.
        """
        annotation: Any = cls.model_fields[info.field_name].annotation if info.field_name else None
        kinds = _kinds(annotation)
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError("must be a number")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"must be at most {LARGEST}")
        return value


AnySchema = TypeVar("AnySchema", bound=Schema)

PLAIN = {
    r", (unable|got|not) .*| after validation.*": "",  # the message shows the value already
    r"^Value error, ": "",
    r"^(Input|Value|List|Tuple|Dictionary) should ": "must ",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid boolean": "true or false",
    "a valid integer": "a whole number",
    "a valid ": "a ",
}
"""Patterns in pydantic's messages -> plainer words."""


def typed(schema: type[AnySchema], values: Mapping[str, Any] | AnySchema, prefix: str = "") -> AnySchema:
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
        shown = None if isinstance(value, Mapping) else value
        match fault["type"]:
            case "extra_forbidden":
                *parents, name = fault["loc"]
                problem, remedy, shown = "there is no such key", nearest(name, _names(schema, parents)), None
            case "missing":
                problem, remedy, shown = "needs a value", "", None
            case "literal_error":
                problem = "there is no such choice"
                remedy = nearest(value, re.findall(r"'([^']*)'", fault["ctx"]["expected"]))
            case _:
                problem, remedy = _plain(fault["msg"]), ""
        raise UserError(key, shown, problem, remedy) from error


def _plain(message: str) -> str:
    for theirs, ours in PLAIN.items():
        message = re.sub(theirs, ours, message)
    return message


def _names(schema: Any, path: Sequence[int | str]) -> list[str]:
    """Return the keys that a schema knows at ``path``."""
    kind = next((part for part in (schema, *get_args(schema)) if _is_schema(part)), None)
    if kind is None:
        return []
    if not path:
        return list(kind.model_fields)
    if kind is not schema and _is_mapping(schema):
        return _names(kind, path[1:])
    field = kind.model_fields.get(str(path[0]))
    return _names(field.annotation, path[1:]) if field else []


@cache
def _kinds(annotation: Any) -> set[Any]:
    """Return the types that a field accepts: ``annotation`` and, recursively, its type arguments."""
    return {annotation, *chain(*(_kinds(part) for part in get_args(annotation)))}


def _is_schema(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Schema)


def _is_mapping(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is dict
