"""Distillation of the mean states of layers, the loss term of RAIL-KD (Haidar et al. 2022, arXiv 2109.10164).

RAIL-KD draws the teacher layers anew in each epoch. That is a mapping (``conf/mapping/rail.yaml``), which any term
takes that supervises layers, and this term takes any mapping of single layers.

Shapes: B examples, T tokens, H features.
"""

from collections.abc import Collection
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from distill_runner.common.assumptions import Assumption
from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import LayeredTerm, Progress
from distill_runner.methods.hidden_states import normalized_squared_distance
from distill_runner.methods.layer_mapping import LayerMapping
from distill_runner.models.features import EncoderShape, FeatureRequest, Features


class PooledStateLoss(LayeredTerm):
    """Squared distance of the normalized mean states of layers, after trained linear maps of both sides to one width.

    Args:
        mapping: which teacher layer belongs to which student layer.
        compare: ``layers`` compares each student layer with its teacher layer (RAIL-KD, layer-wise); ``concatenation``
            compares the concatenation of all supervised student layers with that of their teacher layers, after one map
            each.
        width: number of features after the maps; None takes the student's width.
        over_layers: ``sum`` or ``mean`` over the supervised layers; it has no effect on ``concatenation``.
    """

    weighs_examples = True

    def __init__(
        self,
        mapping: LayerMapping,
        compare: Annotated[
            Literal["layers", "concatenation"],
            Assumption("the layer-wise variant; the paper has both", "RAIL-KD", "layers"),
        ] = "layers",
        width: Annotated[
            int | None,
            Field(ge=1),
            Assumption("the maps keep the student's width, and have biases", "RAIL-KD", None),
        ] = None,
        over_layers: Annotated[
            Literal["sum", "mean"], Assumption("the losses of layers have equal weights and are added", "RAIL-KD")
        ] = "sum",
    ) -> None:
        super().__init__(mapping, over_layers)
        self.compare, self.width = compare, width

    def build(self, student: EncoderShape, teacher: EncoderShape) -> None:
        width = self.width or student.width
        self.student_maps = nn.ModuleDict({str(j): nn.Linear(student.width, width) for j in self.layers})
        self.teacher_maps = nn.ModuleDict({str(j): nn.Linear(teacher.width, width) for j in self.layers})

    def layer_needs(self, layers: Collection[int]) -> FeatureRequest:
        return FeatureRequest(states=frozenset(layers))

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        sides = [
            torch.stack([maps[str(j)](batch.means(states)) for j, states in layers.items()])
            for maps, layers in (
                (self.student_maps, {j: student.states[j] for j in self.current_layers}),
                (self.teacher_maps, {j: teacher.states[k] for j, (k,) in self.current_layers.items()}),
            )
        ]
        if self.compare == "concatenation":  # the map of a concatenation is the sum of maps of its parts
            sides = [states_LBW.sum(0, keepdim=True) for states_LBW in sides]
        weights = batch.example_weights
        pairs = zip(*sides, strict=True)
        return self.reduce_layers([normalized_squared_distance(state, target, weights) for state, target in pairs])
