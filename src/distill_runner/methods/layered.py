"""Terms that supervise a student layer by layer, so that a schedule can restrict them to some layers."""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Literal

import torch
from torch import Tensor

from distill_runner.common.errors import UserError
from distill_runner.methods.base import LossTerm
from distill_runner.methods.layer_mapping import LayerMapping
from distill_runner.methods.outputs import Outputs
from distill_runner.models.encoders import EncoderShape
from distill_runner.models.features import FeatureRequest


class LayeredTerm(LossTerm):
    """A sum or mean over student layers, each compared with teacher layers that a mapping names.

    Subclasses build what they train in ``build``, say in ``needs_of`` what some of the layers read, and compare the
    layers in ``supervised`` in ``forward``.
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
