"""Typed configuration of a method: loss terms with arguments and weights, and an optional layer schedule.

A configuration is parsed once; all later code uses its typed form.
"""

import inspect
from collections.abc import Mapping
from functools import cache
from math import isfinite
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, SerializeAsAny, create_model, model_serializer

from distill_runner.common.errors import UserError, within
from distill_runner.common.schema import Schema, typed
from distill_runner.methods.base import LossTerm, Method
from distill_runner.methods.layer_schedule import LayerSchedule, ScheduledMethod
from distill_runner.methods.outputs import Outputs
from distill_runner.methods.terms import TERMS, find_term, source_of

SCHEDULE = "method.schedule"
"""Key of the schedule among the terms of a spec. It cannot be a term's name: torch allows no dot in module names."""
EXAMPLE = "For example: {term: soft_labels, temperature: 5.0}"


SPEC_KEYS = ("term", "version", "weight", "source")
"""Keys of a term's spec beside its arguments."""


class TermConfig(Schema):
    """One loss term of a method, with its weight and arguments.

    Args:
        term: id in ``terms.TERMS`` or of an installed package, or ``<module>.<class>`` for any other class.
        weight: weight of the term in the training loss, greater than 0.
        arguments: arguments of the term's constructor, with defaults filled in.
    """

    term: str
    weight: float
    arguments: SerializeAsAny[Schema]

    @classmethod
    def parse(cls, node: Any, weight: float = 1.0) -> "TermConfig":
        """Return the typed form of ``{term: <id>, <argument>: <value>, ...}``.

        Raises:
            UserError: there is no such term, or it does not take these arguments. The error's key is relative to the
                key of the term.
        """
        given = dict(_mapping(node, ".", EXAMPLE))
        if "_target_" in given:
            path = str(given["_target_"])
            known = [key for key, kind in TERMS.items() if path.endswith(f".{kind.__name__}")]
            raise UserError("._target_", path, "terms are named by their ids now", f"Take term={[*known, path][0]}.")
        term = given.pop("term", None)
        if not isinstance(term, str):
            raise UserError(".term", term, "needs the id of a term", f"Known: {', '.join(sorted(TERMS))}.")
        found = find_term(term)
        term = next((key for key, kind in TERMS.items() if kind is found), term)  # its id, even if given by path
        return cls(term=term, weight=weight, arguments=typed(arguments_of(found), given, "."))

    @property
    def options(self) -> dict[str, Any]:
        """Arguments as plain JSON values."""
        return self.arguments.model_dump(mode="json")

    def make(self) -> LossTerm:
        """Build the loss term.

        Raises:
            UserError: the constructor refuses the arguments.
        """
        given = self.arguments
        return find_term(self.term)(**{name: getattr(given, name) for name in type(given).model_fields})

    def spec(self, outputs: Outputs) -> dict[str, Any]:
        """Return what determines the term: id, version, weight, arguments, and the source of an outside term.

        Arguments that equal their defaults are left out. A new argument, or a default that is spelt out, thus does not
        change the spec. Arguments that have no effect for ``outputs`` are left out too.
        """
        loss = find_term(self.term)
        ignored = set(loss.ignored_arguments(outputs))
        given = self.arguments.model_dump(mode="json", exclude=ignored, exclude_defaults=True)
        own = {"term": self.term, "version": loss.version, "weight": self.weight}
        return {**given, **own, **source_of(self.term)}


class MethodConfig(Schema):
    """Weighted sum of named loss terms, with an optional layer schedule.

    Args:
        terms: loss terms by name, in the order of logging.
        schedule: when each student layer is supervised; None supervises all layers in every epoch.
    """

    terms: dict[str, TermConfig]
    schedule: LayerSchedule | None = None

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        """Return the form that ``parse_method`` reads, with defaults filled in."""
        return {
            "terms": {name: {"term": term.term, **term.options} for name, term in self.terms.items()},
            "weights": {name: term.weight for name, term in self.terms.items()},
            "schedule": self.schedule.model_dump(mode="json") if self.schedule else None,
        }

    def make(self) -> Method:
        """Build the method.

        Raises:
            UserError: a term refuses its arguments.
        """
        made: dict[str, LossTerm] = {}
        for name, term in self.terms.items():
            with within(f".method.terms.{name}"):
                made[name] = term.make()
        weights = {name: term.weight for name, term in self.terms.items()}
        return ScheduledMethod(made, weights, self.schedule) if self.schedule else Method(made, weights)

    def spec(self, outputs: Outputs) -> dict[str, Any]:
        """Return what determines the method: its terms and its schedule, but not the name of the method.

        Args:
            outputs: meaning of the heads' outputs, for which some arguments may have no effect.
        """
        schedule = {SCHEDULE: self.schedule.spec()} if self.schedule else {}
        return schedule | {name: self.terms[name].spec(outputs) for name in sorted(self.terms)}


def parse_method(node: Any) -> MethodConfig:
    """Return the typed form of ``{terms: ..., weights: ..., schedule: ...}``.

    Terms of weight 0 are dropped before they are parsed.

    Raises:
        UserError: a part is missing or malformed. The error's key begins with ``.method``.
    """
    if isinstance(node, MethodConfig):
        return node
    node = _mapping(node, ".method", "method=rkd chooses a method; a stage's method is {terms: ..., weights: ...}")
    if unknown := set(node) - {"terms", "weights", "schedule"}:
        raise UserError(f".method.{min(unknown)}", None, "there is no such key", "Known: schedule, terms, weights.")
    terms = _mapping(node.get("terms"), ".method.terms", "One entry for each term: {ce: {term: hard_labels}}")
    weights = _mapping(node.get("weights"), ".method.weights", "One number for each term: {ce: 1}")
    if set(terms) != set(weights):
        problem = f"must name the terms {', '.join(terms)}" if terms else "names terms that the method does not have"
        raise UserError(".method.weights", list(weights), problem)
    parsed = {}
    for name, term in terms.items():
        if weight := _weight(name, weights[name]):
            with within(f".method.terms.{name}"):
                parsed[name] = TermConfig.parse(term, weight)
    schedule = node.get("schedule")
    return MethodConfig(
        terms=parsed, schedule=typed(LayerSchedule, schedule, ".method.schedule.") if schedule else None
    )


ParsedMethod = Annotated[MethodConfig, BeforeValidator(parse_method)]
"""Annotation for schema fields that hold a method; it parses the plain form."""


def _mapping(node: Any, key: str, remedy: str) -> Mapping[str, Any]:
    if not isinstance(node, Mapping):
        raise UserError(key, "null" if node is None else node, "must be a mapping", remedy)
    return node


def _weight(name: str, weight: Any) -> float:
    key = f".method.weights.{name}"
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
        raise UserError(key, weight, "must be a number")
    if weight < 0:
        raise UserError(key, weight, "must not be negative")
    return float(weight)


class _Arguments(Schema):
    """Base of the schemas that ``arguments_of`` creates.

    These classes cannot be imported by name in another process. Pickling therefore stores the class of the term.
    """

    term: ClassVar[type[LossTerm]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _revived, (self.term, self.model_dump(exclude_unset=True))


def _revived(kind: type[LossTerm], values: dict[str, Any]) -> Schema:
    return arguments_of(kind).model_validate(values)


@cache
def arguments_of(kind: type[LossTerm]) -> type[Schema]:
    """Return the signature of the constructor of ``kind`` as a schema.

    Raises:
        UserError: an argument has a name that the spec of a term uses itself.
    """
    fields: dict[str, Any] = {
        name: (parameter.annotation, ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in inspect.signature(kind, eval_str=True).parameters.items()
    }
    if taken := [name for name in SPEC_KEYS if name in fields]:
        problem = "an argument of a loss term cannot have this name, which is a part of every term's spec"
        raise UserError(f".{taken[0]}", None, problem, f"Rename the argument in {kind.__name__}.")
    made = create_model(kind.__name__, __base__=_Arguments, **fields)
    made.term = kind
    return made
