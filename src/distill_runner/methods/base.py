"""The extension point: a method is a weighted sum of terms, and the loop knows nothing else.

A term says what it reads (``FeatureRequest``), builds what it trains in ``bind``, and returns a scalar in ``forward``.
A new method is a term in a file of this folder, or only a new combination of terms in ``conf/method/``.
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
    """Where training stands; schedules of layers or temperatures read it.

    ``epoch`` counts from 0; ``step`` counts optimiser steps from 0 over all epochs.
    """

    epoch: int
    step: int
    num_epochs: int
    num_steps: int


class LossTerm(nn.Module, ABC):
    """One term of a loss. Subclasses set their needs in ``bind``; their parameters join the optimiser.

    ``version`` is raised when a term's meaning changes, so that stored results are not mistaken for it;
    ``reads_teacher`` is False for a term that needs none, and ``reads_labels`` names what it reads of a batch's own:
    ``labels``, ``is_next``. ``mean_over`` is what it is a mean of, so that the update's comes out right from its parts.
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
        """Arguments without a meaning for such outputs: runs that differ in them alone are the same."""
        return frozenset()

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        """Set the needs and build projections for this pair of models.

        Args:
            student, teacher: shapes of the two models; ``teacher`` is None in a stage without one.
            outputs: what the heads give, with the losses on it.
        Raises:
            UserError: the term is impossible for this pair; keys that begin with a dot are the term's own.
        """

    @abstractmethod
    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        """The unweighted term: a scalar, mean over what the batch has of ``mean_over``."""


class LayeredTerm(LossTerm):
    """A sum or mean over student layers, each compared with teacher layers that a mapping names.

    A schedule can restrict it to some of them. Subclasses build what they train in ``build``, say in ``needs_of`` what
    some of the layers read, and compare the layers in ``supervised`` in ``forward``.
    """

    def __init__(self, mapping: LayerMapping, over_layers: Literal["sum", "mean"]) -> None:
        super().__init__()
        self.mapping, self.over_layers = mapping, over_layers
        self.layers: dict[int, list[int]] = {}
        """Teacher layers by student layer, all that can be supervised; known once bound."""
        self.supervised: dict[int, list[int]] = {}
        """Those of ``layers`` that are compared at present."""

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        if teacher is None:
            raise UserError("teacher", None, "an intermediate loss needs one", "Without one: method=nkd.")
        for side, shape in (("student", student), ("teacher", teacher)):
            shape.require(FeatureRequest(cls=frozenset({1})), side)
        layers = self.mapping.between(student.num_layers, teacher.num_layers)
        if not any(layers):
            raise UserError(
                ".mapping",
                layers,
                f"supervises no layer of a student of {student.num_layers}",
                "The last layer is left out by default; mapping.supervise_last=true includes it.",
            )
        self.layers = {j: entry for j, entry in enumerate(layers, start=1) if entry}
        self.build(layers, student, teacher)
        self.supervise(self.layers)

    def build(self, layers: list[list[int]], student: EncoderShape, teacher: EncoderShape) -> None:
        """Make what the comparison of these layers needs.

        Args:
            layers: the resolved mapping.
        Raises:
            UserError: the term is impossible for this pair of models.
        """

    @abstractmethod
    def needs_of(self, layers: Mapping[int, list[int]]) -> tuple[FeatureRequest, FeatureRequest]:
        """What comparing these student layers reads of the student and of the teacher."""

    def supervise(self, layers: Collection[int]) -> None:
        """Compare these of the student's layers from now on, and no others; the needs follow."""
        self.supervised = {j: entry for j, entry in self.layers.items() if j in layers}
        self.student_needs, self.teacher_needs = self.needs_of(self.supervised)

    def reduced(self, values: list[Tensor]) -> Tensor:
        """One number for those of all supervised layers."""
        stacked = torch.stack(values)
        return stacked.sum() if self.over_layers == "sum" else stacked.mean()


class Method(nn.Module):
    """A weighted sum of named terms. A term of weight 0 is dropped, with everything that it would have read.

    Args:
        terms: name -> term, in the order of logging.
        weights: name -> weight, not negative.
    """

    needs: tuple[FeatureRequest, FeatureRequest]
    """What the next forward reads of the student and of the teacher."""

    def __init__(self, terms: Mapping[str, LossTerm], weights: Mapping[str, float]) -> None:
        super().__init__()
        self.weights = {name: float(weight) for name, weight in weights.items() if weight}
        self.terms = nn.ModuleDict({name: terms[name] for name in self.weights})

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> "Method":
        """Bind every term; ``needs`` is then what training reads in all, of the student and of the teacher."""
        for name, term in self.by_name().items():
            with within(f".method.terms.{name}"):
                term.bind(student, teacher, outputs)
                student.require(term.student_needs, "student")
                if teacher is not None:
                    teacher.require(term.teacher_needs, "teacher")
        self.needs = self.union(self.active())
        return self

    def begin_epoch(self, progress: Progress) -> None:
        """Called before the updates of an epoch, and again when an interrupted one is taken up.

        A method that changes as training goes on does so here: the terms that ``running`` names, and ``needs``, which
        is what the next forward reads of the student and of the teacher.
        """

    def end_update(self, means: Mapping[str, Tensor], num_examples: int) -> None:
        """Called after every update; a method that keeps account of its terms does so here.

        ``forward`` sees a part of an update where it is accumulated or shared by several processes.

        Args:
            means: the unweighted terms by name, over the whole update.
        """

    def reads_teacher(self) -> bool:
        """Whether any term of non-zero weight needs a teacher."""
        return any(term.reads_teacher for term in self.active())

    def reads_labels(self) -> frozenset[str]:
        """All that its terms read of a batch's own labels."""
        return frozenset().union(*(term.reads_labels for term in self.active()))

    def by_name(self) -> dict[str, LossTerm]:
        """The terms, in the order of logging."""
        return {name: term for name, term in self.terms.items() if isinstance(term, LossTerm)}

    def active(self) -> list[LossTerm]:
        return list(self.by_name().values())

    def running(self) -> dict[str, LossTerm]:
        """The terms that the next forward computes."""
        return self.by_name()

    @staticmethod
    def union(terms: Iterable[LossTerm]) -> tuple[FeatureRequest, FeatureRequest]:
        """What these terms together read of the student and of the teacher."""
        student, teacher = FeatureRequest(), FeatureRequest()
        for term in terms:
            student, teacher = student | term.student_needs, teacher | term.teacher_needs
        return student, teacher

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        """The unweighted terms by name, each as the batch's part of the update's mean: parts add up to the mean."""
        return {
            name: batch.weights.get(term.mean_over, 1.0) * term(student, teacher, batch, progress)
            for name, term in self.running().items()
        }

    def weighted(self, means: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Losses by name; the training loss is their sum, so what is logged adds up."""
        return {name: self.weights[name] * mean for name, mean in means.items()}

    def observed(self) -> dict[str, Tensor]:
        """Detached scalars that the terms want to see logged, by ``<term>/<name>``."""
        return {f"{name}/{key}": value for name, term in self.running().items() for key, value in term.observed.items()}
