"""Typed configuration of a method: loss terms with arguments and weights, and an optional layer schedule.

A configuration is parsed once; all later code uses its typed form. Terms are named by id, or by path for a user's own.
"""

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from math import isfinite
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BeforeValidator, SerializeAsAny, create_model, model_serializer

from distill_runner.common import plugins
from distill_runner.common.errors import UserError, command, error_context, suggestion
from distill_runner.common.schema import Schema, validate_config
from distill_runner.methods import attention, hidden_states, predictions, vectors
from distill_runner.methods.base import LossTerm, Method
from distill_runner.methods.outputs import Outputs
from distill_runner.methods.schedules import LayerSchedule, ScheduledMethod
from distill_runner.models.features import EncoderShape

TERMS: dict[str, type[LossTerm]] = {
    "hard_labels": predictions.HardLabels,
    "soft_labels": predictions.SoftLabels,
    "soft_labels_per_class": predictions.SoftLabelsPerClass,
    "decoupled_soft_labels": predictions.DecoupledSoftLabels,
    "correlated_soft_labels": predictions.CorrelatedSoftLabels,
    "logit_matching": predictions.LogitMatching,
    "hidden_states": hidden_states.HiddenStateLoss,
    "attention_relations": attention.AttentionRelationLoss,
    "attention_scores": attention.AttentionScoreLoss,
    "token_states": hidden_states.TokenStateLoss,
    "embeddings": hidden_states.EmbeddingLoss,
    "pooled_states": hidden_states.PooledStateLoss,
    "next_sentence": predictions.NextSentence,
    "vectors": vectors.VectorLoss,
    "similarities": vectors.SimilarityLoss,
    "margins": vectors.MarginLoss,
}
"""Built-in terms by id. Ids are part of keys in the store: a class may move, but its id must not change."""
SCHEDULE = "method.schedule"
"""Key of the schedule among the terms of a spec. It cannot be a term's name: torch allows no dot in module names."""
SPEC_KEYS = ("term", "version", "weight", "source")
"""Keys of a term's spec besides its arguments."""
EXAMPLE = "For example: {term: soft_labels, temperature: 5.0}"


def find_term(term: str) -> type[LossTerm]:
    """Return the class of a term.

    Args:
        term: id, or ``<module>.<class>`` with a module that is installed or is in the working folder.
    Raises:
        UserError: there is no such term, it is no concrete ``LossTerm``, or its module cannot be imported. The error's
            key is relative to the key of the term.
    """
    if term in TERMS:
        return TERMS[term]
    if "." not in term:
        remedy = suggestion(term, TERMS) + " Your own: <module>.<class>, such as my_terms.MyTerm."
        raise UserError(".term", term, "there is no such term", remedy.strip())
    return plugins.load_class(".term", term, LossTerm)


class TermConfig(Schema):
    """One loss term of a method, with its weight and arguments.

    Args:
        term: id in ``TERMS``, or ``<module>.<class>`` for any other class.
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
        arguments = dict(_require_mapping(node, ".", EXAMPLE))
        term = arguments.pop("term", None)
        if not isinstance(term, str):
            raise UserError(".term", term, "needs the id of a term", f"Known: {', '.join(sorted(TERMS))}.")
        term_class = find_term(term)
        term = next((key for key, built_in in TERMS.items() if built_in is term_class), term)  # the id of a path
        return cls(term=term, weight=weight, arguments=validate_config(argument_schema(term_class), arguments, "."))

    @property
    def options(self) -> dict[str, Any]:
        """Arguments as plain JSON values."""
        return self.arguments.model_dump(mode="json")

    def make(self) -> LossTerm:
        """Build the loss term.

        Raises:
            UserError: the constructor refuses the arguments.
        """
        return find_term(self.term)(
            **{name: getattr(self.arguments, name) for name in type(self.arguments).model_fields}
        )

    def spec(self, outputs: Outputs) -> dict[str, Any]:
        """Return what determines the term: id, version, weight, arguments, and the source of an outside term.

        Arguments that equal their defaults are left out. A new argument, or a default that is spelled out, thus does
        not change the spec. Arguments that have no effect for ``outputs`` are left out too.
        """
        term_class = find_term(self.term)
        ignored = set(term_class.ignored_arguments(outputs))
        arguments = self.arguments.model_dump(mode="json", exclude=ignored, exclude_defaults=True)
        source = {} if self.term in TERMS else {"source": plugins.source_hash(term_class.__module__)}
        return {**arguments, "term": self.term, "version": term_class.version, "weight": self.weight, **source}


class MethodConfig(Schema):
    """Weighted sum of named loss terms, with an optional layer schedule.

    Args:
        terms: loss terms by name, in the order of logging.
        schedule: when each student layer is supervised; None supervises all layers in every epoch.
    """

    terms: dict[str, TermConfig]
    schedule: LayerSchedule | None = None

    @model_serializer
    def _as_plain_form(self) -> dict[str, Any]:
        """Return the form that ``parse_method`` reads, with defaults filled in."""
        return {
            "terms": {name: {"term": term.term, **term.options} for name, term in self.terms.items()},
            "weights": {name: term.weight for name, term in self.terms.items()},
            "schedule": self.schedule.model_dump(mode="json") if self.schedule else None,
        }

    @property
    def reads_teacher(self) -> bool:
        """Whether any term needs a teacher."""
        return any(find_term(term.term).reads_teacher for term in self.terms.values())

    @property
    def reads_labels(self) -> frozenset[str]:
        """Names of the batch's own labels that the terms read: ``labels``, ``is_next``."""
        return frozenset().union(*(find_term(term.term).reads_labels for term in self.terms.values()))

    @property
    def weighted_terms(self) -> list[str]:
        """Names of the terms that read the weights of the examples."""
        return [name for name, term in self.terms.items() if find_term(term.term).weighs_examples]

    @property
    def compares_examples(self) -> bool:
        """Whether a term's loss of an example depends on the others of its batch."""
        return any(find_term(term.term).compares_examples for term in self.terms.values())

    @property
    def ends_late(self) -> bool:
        """Whether a term has its final form in the last epochs only."""
        return any(find_term(term.term).ends_late for term in self.terms.values())

    def check_epochs(self, layers: Sequence[int], num_epochs: int) -> None:
        """Check that the schedule has its epochs; tell the user of terms that do not come to their final form.

        Args:
            layers: student layers that terms supervise.
        Raises:
            UserError: ``num_epochs`` epochs are too few for the schedule.
        """
        if self.schedule is not None:
            self.schedule.check_epochs(len(layers), num_epochs)
        for term in self.terms.values():
            if find_term(term.term).ends_late:
                term.make().check_epochs(num_epochs)

    def make(self) -> Method:
        """Construct the terms and the method, which ``Method.bind`` then binds to a pair of models.

        Raises:
            UserError: a term refuses its arguments.
        """
        terms: dict[str, LossTerm] = {}
        for name, term in self.terms.items():
            with error_context(f".method.terms.{name}"):
                terms[name] = term.make()
        weights = {name: term.weight for name, term in self.terms.items()}
        return ScheduledMethod(terms, weights, self.schedule) if self.schedule else Method(terms, weights)

    def build(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> Method:
        """Return the method for a pair of models; its parameters are drawn from torch's global generator.

        Args:
            student, teacher: shapes of the two models; ``teacher`` is None in a stage without a teacher.
            outputs: meaning of the heads' outputs.
        Raises:
            UserError: a term refuses its arguments, or does not work for this pair of models.
        """
        return self.make().bind(student, teacher, outputs)

    def describe(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> Method:
        """Return the method on the meta device, which draws nothing, to find out what it reads.

        Raises:
            UserError: as ``build``.
        """
        with torch.device("meta"):
            return self.build(student, teacher, outputs)

    def spec(self, outputs: Outputs) -> dict[str, Any]:
        """Return what determines the method: its terms and its schedule, but not the name of the method.

        Args:
            outputs: meaning of the heads' outputs, for which some arguments may have no effect.
        """
        schedule = {SCHEDULE: self.schedule.model_dump(mode="json")} if self.schedule else {}
        return schedule | {name: self.terms[name].spec(outputs) for name in sorted(self.terms)}


def parse_method(node: Any) -> MethodConfig:
    """Return the typed form of ``{terms: ..., weights: ..., schedule: ...}``.

    Terms of weight 0 are parsed too, and then dropped.

    Raises:
        UserError: a part is missing or malformed. The error's key begins with ``.method``.
    """
    if isinstance(node, MethodConfig):
        return node
    remedy = "A stage's method is {terms: ..., weights: ...}. By name: " + command("distill-run method=rkd")
    node = _require_mapping(node, ".method", remedy)
    if unknown := set(node) - {"terms", "weights", "schedule"}:
        raise UserError(f".method.{min(unknown)}", None, "there is no such key", "Known: schedule, terms, weights.")
    terms = _require_mapping(node.get("terms"), ".method.terms", "One entry for each term: {ce: {term: hard_labels}}")
    weights = _require_mapping(node.get("weights"), ".method.weights", "One number for each term: {ce: 1}")
    if set(terms) != set(weights):
        problem = f"must name the terms {', '.join(terms)}" if terms else "names terms that the method does not have"
        raise UserError(".method.weights", list(weights), problem)
    parsed = {}
    for name, term in terms.items():
        weight, key = weights[name], f".method.weights.{name}"
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
            raise UserError(key, weight, "must be a number")
        if weight < 0:
            raise UserError(key, weight, "must not be negative")
        with error_context(f".method.terms.{name}"):
            typed = TermConfig.parse(term, float(weight))
        if weight:
            parsed[name] = typed
    schedule = node.get("schedule")
    return MethodConfig(
        terms=parsed, schedule=validate_config(LayerSchedule, schedule, ".method.schedule.") if schedule else None
    )


ParsedMethod = Annotated[MethodConfig, BeforeValidator(parse_method)]
"""Annotation for schema fields that hold a method; it parses the plain form."""


def _require_mapping(node: Any, key: str, remedy: str) -> Mapping[str, Any]:
    if not isinstance(node, Mapping):
        raise UserError(key, "null" if node is None else node, "must be a mapping", remedy)
    return node


class _Arguments(Schema):
    """Base of the schemas that ``argument_schema`` creates.

    These classes cannot be imported by name in another process. Pickling therefore stores the class of the term.
    """

    term: ClassVar[type[LossTerm]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled_arguments, (self.term, self.model_dump(exclude_unset=True))


def _unpickled_arguments(term_class: type[LossTerm], values: dict[str, Any]) -> Schema:
    return argument_schema(term_class).model_validate(values)


@cache
def argument_schema(term_class: type[LossTerm]) -> type[Schema]:
    """Return the signature of the constructor of a loss term as a schema.

    Raises:
        UserError: an argument has a name that the spec of a term uses itself.
    """
    fields, empty = dict[str, Any](), inspect.Parameter.empty
    for name, parameter in inspect.signature(term_class, eval_str=True).parameters.items():
        annotation = Any if parameter.annotation is empty else parameter.annotation
        fields[name] = (annotation, ... if parameter.default is empty else parameter.default)
    if reserved := [name for name in SPEC_KEYS if name in fields]:
        problem = "an argument of a loss term cannot have this name, which is a part of every term's spec"
        raise UserError(f".{reserved[0]}", None, problem, f"Rename the argument in {term_class.__name__}.")
    schema = create_model(term_class.__name__, __base__=_Arguments, **fields)
    schema.term = term_class
    return schema
