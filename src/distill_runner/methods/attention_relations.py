"""Distillation of self-attention: one loss term for attention maps (internal representations), MiniLM and MiniLMv2.

``conf/method/{internal,minilm,minilmv2}.yaml`` choose the relations and the layers of each method.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor

from distill_runner.common.errors import UserError
from distill_runner.common.readings import Reading
from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import LayeredTerm, Progress
from distill_runner.methods.layer_mapping import LayerMapping, single
from distill_runner.methods.relation_kl import Rows, relation_kl, row_weights
from distill_runner.models.encoders import EncoderShape
from distill_runner.models.features import FeatureRequest, Features, Projection

Pair = Literal["QQ", "QK", "QV", "KQ", "KK", "KV", "VQ", "VK", "VV"]
LETTERS: dict[str, Projection] = {"Q": "query", "K": "key", "V": "value"}


class AttentionRelationLoss(LayeredTerm):
    """KL divergence between the teacher's and the student's relations of queries, keys and values.

    The divergence is summed over the pairs (MiniLMv2, Eq. 5: each alpha is 0 or 1) and averaged over the heads.
    With the pair QK and the models' own heads, the relations are the attention probabilities before dropout (internal
    representations, Eq. 2).

    Args:
        mapping: which teacher layer belongs to which student layer.
        pairs: projections that each relation compares; ``QK`` is a distribution over the keys for each query.
        heads: number of heads into which the projections are split, regardless of the models' own heads. None takes
            the models' own heads; both models must then have the same number.
        over_layers: ``mean`` over the supervised layers (internal representations, Exp3.0), or ``sum`` (Algorithm 1 of
            the same paper).
        over_rows: ``sequence`` takes the mean over the tokens of each sequence, then over the batch (internal
            representations, Eq. 2 and Algorithm 1); ``token`` takes the mean over all tokens of the batch.
    """

    def __init__(
        self,
        mapping: LayerMapping,
        pairs: list[Pair],
        heads: int | None = None,
        over_layers: Annotated[
            Literal["sum", "mean"],
            Reading("the mean over layers, as in the text on Exp3.0; Algorithm 1 sums", "internal representations"),
        ] = "mean",
        over_rows: Annotated[
            Rows,
            Reading("mean over each sequence's tokens, then over the batch; Eq. 6 has one sequence", "MiniLMv2 Eq. 6"),
        ] = "sequence",
    ) -> None:
        super().__init__(mapping, over_layers)
        if not pairs or len(set(pairs)) < len(pairs) or not set(pairs) <= set(get_args(Pair)):
            raise UserError(".pairs", pairs, "must be different pairs of Q, K and V", "For example: [QQ, KK, VV]")
        self.pairs = [(LETTERS[pair[0]], LETTERS[pair[1]]) for pair in pairs]
        self.given_heads, self.over_rows = heads, over_rows
        self.mean_over = "token" if over_rows == "token" else "example"

    def build(self, layers: list[list[int]], student: EncoderShape, teacher: EncoderShape) -> None:
        single(layers)
        self.heads = self.given_heads or student.num_heads
        if self.given_heads is None and student.num_heads != teacher.num_heads:
            raise UserError(
                "student",
                None,
                f"it has {student.num_heads} attention heads, the teacher {teacher.num_heads}; "
                "heads are compared one to one",
                "Take a student with as many heads, or relations that do not depend on them: method=minilmv2.",
            )
        for name, shape in (("student", student), ("teacher", teacher)):
            width = shape.projection_width or shape.width
            if self.heads < 1 or width % self.heads:
                problem = f"must divide the width of the {name}, {width}"
                raise UserError(".heads", self.heads, problem)

    def needs_of(self, layers: Mapping[int, list[int]]) -> tuple[FeatureRequest, FeatureRequest]:
        names = set(chain.from_iterable(self.pairs))
        student = frozenset((name, j) for j in layers for name in names)
        return FeatureRequest(projections=student), FeatureRequest(
            projections=frozenset((name, k) for entry in layers.values() for k in entry for name in names)
        )

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        weights = row_weights(batch, self.over_rows)

        def divergence(x: Projection, y: Projection, j: int, k: int) -> Tensor:
            taught = teacher.projections[x, k], teacher.projections[y, k]
            learnt = student.projections[x, j], student.projections[y, j]
            return relation_kl(taught, learnt, self.heads, batch.groups, weights)

        return self.reduced(
            [torch.stack([divergence(x, y, j, k) for x, y in self.pairs]).sum() for j, (k,) in self.supervised.items()]
        )
