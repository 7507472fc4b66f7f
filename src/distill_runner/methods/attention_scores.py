"""Distillation of attention scores before the softmax (TinyBERT, Eq. 7), computed from a layer's queries and keys.

Shapes: n sequences of one length group padded to L tokens, A heads.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from torch import Tensor

from distill_runner.common.errors import UserError
from distill_runner.common.readings import Reading
from distill_runner.datasets.batches import Batch, LengthGroup
from distill_runner.methods.base import LayeredTerm, Progress
from distill_runner.methods.layer_mapping import LayerMapping, single
from distill_runner.models.encoders import EncoderShape
from distill_runner.models.features import FeatureRequest, Features


def attention_scores(features: Features, layer: int, heads: int, group: LengthGroup) -> Tensor:
    """Return the scores Q K^T / sqrt(d) of every head, (n, A, L, L); scores of padding are meaningless.

    Their softmax over the real keys (``group.real``) gives the layer's attention probabilities before dropout. A window
    of local attention is not applied.
    """
    query, key = (
        features.projections[name, layer][group.tokens][group.gather].unflatten(-1, (heads, -1)).transpose(1, 2)
        for name in ("query", "key")
    )
    return query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5


PADDING = Reading("pairs with padding are left out; the paper's code counts them, with scores of 0", "TinyBERT Eq. 7")


class AttentionScoreLoss(LayeredTerm):
    """Squared error between the attention scores of student and teacher, head by head.

    Both models must have the same number of heads. The mean is over the heads and all token pairs of a sequence, then
    over the batch. TinyBERT's code also counts pairs with padding, with scores of 0 for both models, so its loss
    depends on the padding of the batch.

    Args:
        mapping: which teacher layer belongs to which student layer.
        over_layers: ``sum`` (TinyBERT, Eq. 11) or ``mean`` over the supervised layers.
    """

    def __init__(self, mapping: LayerMapping, over_layers: Annotated[Literal["sum", "mean"], PADDING] = "sum") -> None:
        super().__init__(mapping, over_layers)

    def build(self, layers: list[list[int]], student: EncoderShape, teacher: EncoderShape) -> None:
        single(layers)
        self.heads = student.num_heads
        if student.num_heads != teacher.num_heads:
            problem = (
                f"it has {student.num_heads} attention heads, the teacher {teacher.num_heads}; "
                "heads are compared one to one"
            )
            raise UserError("student", None, problem, "Take a student with as many heads, or weight 0 for this term.")

    def needs_of(self, layers: Mapping[int, list[int]]) -> tuple[FeatureRequest, FeatureRequest]:
        def of(numbers: list[int]) -> FeatureRequest:
            return FeatureRequest(projections=frozenset((name, k) for k in numbers for name in ("query", "key")))

        return of(list(layers)), of([k for entry in layers.values() for k in entry])

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        return self.reduced([self._layer(student, teacher, j, k, batch) for j, (k,) in self.supervised.items()])

    def _layer(self, student: Features, teacher: Features, j: int, k: int, batch: Batch) -> Tensor:
        of_groups = []
        for group in batch.groups:
            sides = (attention_scores(side, layer, self.heads, group) for side, layer in ((student, j), (teacher, k)))
            mine, target = sides
            pairs = group.real[:, None, :, None] & group.real[:, None, None, :]
            squares = (mine - target).square().masked_fill(~pairs, 0.0).sum((1, 2, 3))
            of_groups.append((squares / (self.heads * group.real.sum(1).square())).sum())
        return torch.stack(of_groups).sum() / batch.size
