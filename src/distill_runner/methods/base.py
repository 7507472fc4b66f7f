"""Extension point for methods: a method is a weighted sum of loss terms, and the training loop knows nothing else.

A loss term declares what it reads of the models (``FeatureRequest``), builds its trained parameters in ``bind``, and
returns a scalar in ``forward``. A new method is a new loss term in a file of this folder, or only a new combination of
loss terms in ``conf/method/``.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from distill_runner.common.errors import UserError, within
from distill_runner.datasets.batches import Batch, Unit
from distill_runner.methods.layer_mapping import LayerMapping
from distill_runner.methods.outputs import Outputs
from distill_runner.models.encoders import EncoderShape
from distill_runner.models.features import FeatureRequest, Features


@dataclass(frozen=True)
class Progress:
    """Current epoch and step of training, for schedules of layers or temperatures.

    ``epoch`` counts from 0; ``step`` counts optimiser steps from 0 over all epochs.
    """

    epoch: int
    step: int
    num_epochs: int
    num_steps: int


class LossTerm(nn.Module, ABC):
    """One loss term of a method. Subclasses set their needs in ``bind``; the optimiser also trains their parameters.

    Attributes:
        version: number to raise when the meaning of the term changes, so that stored results are not reused for it.
        reads_teacher: whether the term needs a teacher.
        reads_labels: names of the batch's own labels that the term reads: ``labels``, ``is_next``.
        mean_over: unit that the term is a mean over. It decides how much each batch of an update counts, so that the
            batches add up to the mean over the update.
    """

    version: ClassVar[int] = 1
    reads_teacher: ClassVar[bool] = True
    reads_labels: ClassVar[frozenset[str]] = frozenset()
    mean_over: Unit = "example"

    def __init__(self) -> None:
        super().__init__()
        self.student_needs = FeatureRequest()
        self.teacher_needs = FeatureRequest()
        self.observed: dict[str, Tensor] = {}
        """Detached scalars of the last forward, logged beside the losses."""

    @classmethod
    def ignored_arguments(cls, outputs: Outputs) -> frozenset[str]:
        """Return the arguments that have no effect for these outputs and so do not distinguish runs."""
        return frozenset()

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        """Set ``student_needs`` and ``teacher_needs``, and build projections, for this pair of models.

        Args:
            student, teacher: shapes of the two models; ``teacher`` is None in a stage without a teacher.
            outputs: meaning of the heads' outputs, with the losses on them.
        Raises:
            UserError: the term does not work for this pair of models. A key that begins with a dot is relative to the
                configuration of the term.
        """

    @abstractmethod
    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        """Return the unweighted term: a scalar, the mean over the batch's units ``mean_over``."""


class LayeredTerm(LossTerm):
    """Sum or mean over student layers, each compared with the teacher layers that a mapping assigns to it.

    A schedule can restrict the term to some of the student layers. Subclasses build their trained parameters in
    ``build``, declare what given layers read in ``needs_of``, and compare the layers of ``supervised`` in ``forward``.

    Args:
        mapping: which teacher layers belong to which student layer.
        over_layers: ``sum`` or ``mean`` over the supervised layers.
    """

    def __init__(self, mapping: LayerMapping, over_layers: Literal["sum", "mean"]) -> None:
        super().__init__()
        self.mapping, self.over_layers = mapping, over_layers
        self.layers: dict[int, list[int]] = {}
        """Teacher layers of each student layer that can be supervised; empty before ``bind``."""
        self.supervised: dict[int, list[int]] = {}
        """The entries of ``layers`` that are compared in the current epoch."""

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        if teacher is None:
            raise UserError(
                "teacher", None, "an intermediate loss needs a teacher", "A method without a teacher: method=nkd."
            )
        for side, shape in (("student", student), ("teacher", teacher)):
            shape.require(FeatureRequest(cls=frozenset({1})), side)
        layers = self.mapping.between(student.num_layers, teacher.num_layers)
        if not any(layers):
            raise UserError(
                ".mapping",
                layers,
                f"supervises no layer of a {student.num_layers}-layer student",
                "The last layer is left out by default; mapping.supervise_last=true includes it.",
            )
        self.layers = {j: entry for j, entry in enumerate(layers, start=1) if entry}
        self.build(layers, student, teacher)
        self.supervise(self.layers)

    def build(self, layers: list[list[int]], student: EncoderShape, teacher: EncoderShape) -> None:
        """Build the parameters for the comparison of these layers, and check that the two models fit.

        Args:
            layers: the resolved mapping.
        Raises:
            UserError: the term does not work for this pair of models.
        """

    @abstractmethod
    def needs_of(self, layers: Mapping[int, list[int]]) -> tuple[FeatureRequest, FeatureRequest]:
        """Return what the comparison of these layers reads of the student and of the teacher.

        Args:
            layers: teacher layers by student layer.
        """

    def supervise(self, layers: Collection[int]) -> None:
        """Compare only these student layers from now on, and update the needs accordingly."""
        self.supervised = {j: entry for j, entry in self.layers.items() if j in layers}
        self.student_needs, self.teacher_needs = self.needs_of(self.supervised)

    def reduced(self, values: list[Tensor]) -> Tensor:
        """Reduce the values of the supervised layers to their sum or mean."""
        stacked = torch.stack(values)
        return stacked.sum() if self.over_layers == "sum" else stacked.mean()


class Method(nn.Module):
    """Weighted sum of named loss terms. A term of weight 0 is dropped, and its features are not computed.

    Args:
        terms: name -> term, in the order of logging.
        weights: name -> weight, not negative.
    """

    needs: tuple[FeatureRequest, FeatureRequest]
    """Features that the next ``forward`` reads of the student and of the teacher."""

    def __init__(self, terms: Mapping[str, LossTerm], weights: Mapping[str, float]) -> None:
        super().__init__()
        self.weights = {name: float(weight) for name, weight in weights.items() if weight}
        self.terms = nn.ModuleDict({name: terms[name] for name in self.weights})

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> "Method":
        """Bind every term, and set ``needs`` to all features that the terms read of the student and of the teacher.

        Raises:
            UserError: a term does not work for this pair of models.
        """
        for name, term in self.by_name().items():
            with within(f".method.terms.{name}"):
                term.bind(student, teacher, outputs)
                student.require(term.student_needs, "student")
                if teacher is not None:
                    teacher.require(term.teacher_needs, "teacher")
        self.needs = self.union(self.active())
        return self

    def check_epochs(self, num_epochs: int) -> None:
        """Check, after ``bind``, that a method that changes during training has all the epochs that it needs.

        Raises:
            UserError: ``num_epochs`` epochs are too few.
        """

    def begin_epoch(self, progress: Progress) -> None:
        """Prepare for the updates of an epoch; called again when training resumes within the epoch.

        A method that changes during training changes here: the terms that ``running`` returns, and ``needs``, the
        features that the next ``forward`` reads.
        """

    def end_update(self, means: Mapping[str, Tensor], num_examples: int) -> None:
        """Receive the values of the terms after every update, for methods that keep statistics of them.

        ``forward`` is not the place for statistics: with gradient accumulation or several processes it sees only a part
        of an update.

        Args:
            means: unweighted terms by name, as means over the whole update.
            num_examples: number of examples of the update.
        """

    def reads_teacher(self) -> bool:
        """Return whether any term of non-zero weight needs a teacher."""
        return any(term.reads_teacher for term in self.active())

    def reads_labels(self) -> frozenset[str]:
        """Return the names of the batch's own labels that the terms read: ``labels``, ``is_next``."""
        return frozenset().union(*(term.reads_labels for term in self.active()))

    def by_name(self) -> dict[str, LossTerm]:
        """Return the terms by name, in the order of logging."""
        return {name: term for name, term in self.terms.items() if isinstance(term, LossTerm)}

    def active(self) -> list[LossTerm]:
        return list(self.by_name().values())

    def running(self) -> dict[str, LossTerm]:
        """Return the terms that the next ``forward`` computes, by name."""
        return self.by_name()

    @staticmethod
    def union(terms: Iterable[LossTerm]) -> tuple[FeatureRequest, FeatureRequest]:
        """Return all features that these terms read of the student and of the teacher."""
        student, teacher = FeatureRequest(), FeatureRequest()
        for term in terms:
            student, teacher = student | term.student_needs, teacher | term.teacher_needs
        return student, teacher

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        """Return this batch's contribution to each unweighted term, by name.

        The contributions of all batches of an update add up to the mean over the update.
        """
        return {
            name: batch.weights.get(term.mean_over, 1.0) * term(student, teacher, batch, progress)
            for name, term in self.running().items()
        }

    def weighted(self, means: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weighted losses by name. Their sum is the training loss, so the logged losses add up to it."""
        return {name: self.weights[name] * mean for name, mean in means.items()}

    def observed(self) -> dict[str, Tensor]:
        """Return the detached scalars that the running terms log beside their losses, by ``<term>/<name>``."""
        return {f"{name}/{key}": value for name, term in self.running().items() for key, value in term.observed.items()}
