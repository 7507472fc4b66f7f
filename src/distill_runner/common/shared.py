"""What the points of a grid share: typed parts of their configurations, and what is computed from these."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Result = TypeVar("Result")


class Shared:
    """Results that are computed once, however many points of a grid need them.

    A result belongs to the very objects that it was computed from, which must be immutable. They are kept alive, so
    that no other object takes their identity. All ends with the planning of the grid: nothing is stored.
    """

    def __init__(self) -> None:
        self._results: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self._typed: dict[tuple[str, str, str], Any] = {}

    def __call__(self, function: Callable[..., Result], *inputs: Any) -> Result:
        """Return ``function(*inputs)``, computed at the first call with these objects. Errors are not kept."""
        key = (function, *map(id, inputs))
        if key not in self._results:
            self._results[key] = (inputs, function(*inputs))
        result: Result = self._results[key][1]
        return result

    def with_typed_parts(self, kind: str, values: Any) -> Any:
        """Return a plain mapping in which parts have the typed form that ``keep_typed_parts`` has had before.

        Args:
            kind: what the mapping is, such as ``stage``.
        """
        if not isinstance(values, Mapping):
            return values
        return {
            key: self._typed.get((kind, key, repr(part)), part) if isinstance(part, Mapping) else part
            for key, part in values.items()
        }

    def keep_typed_parts(self, kind: str, values: Mapping[str, Any], typed: Mapping[str, Any]) -> None:
        """Keep the typed form of each part of a plain mapping that is a mapping itself.

        A part is recognized by its key and its content; its typed form must depend on nothing else.
        """
        for key, part in values.items():
            if isinstance(part, Mapping):
                self._typed.setdefault((kind, key, repr(part)), typed[key])
