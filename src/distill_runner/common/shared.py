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
        self._same: dict[tuple[str, str, int], tuple[Any, Any]] = {}
        """Parts whose typed form is kept, with this form, by their identity."""

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
            key: self._typed_form(kind, key, part) if isinstance(part, Mapping) else part
            for key, part in values.items()
        }

    def _typed_form(self, kind: str, key: str, part: Mapping[str, Any]) -> Any:
        """Return the typed form of a part, or the part itself; to recognize the same object takes no time."""
        if entry := self._same.get((kind, key, id(part))):
            return entry[1]
        return self._typed.get((kind, key, repr(part)), part)

    def keep_typed_parts(self, kind: str, values: Mapping[str, Any], typed: Mapping[str, Any]) -> None:
        """Keep the typed form of each part of a plain mapping that is a mapping itself.

        A part is recognized by its key and its content, which nobody may change from now on; its typed form must depend
        on nothing else.
        """
        for key, part in values.items():
            if isinstance(part, Mapping) and (kind, key, id(part)) not in self._same:
                name = (kind, key, repr(part))
                if name not in self._typed:
                    self._typed[name] = typed[key]
                    self._same[kind, key, id(part)] = part, typed[key]
