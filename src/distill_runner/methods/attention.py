"""Distillation of self-attention: relations of queries, keys and values, and attention scores before the softmax.

``AttentionRelationLoss`` is one term for attention maps (internal representations), MiniLM and MiniLMv2;
``AttentionScoreLoss`` is TinyBERT's. ``conf/method/{internal,minilm,minilmv2,tinybert}.yaml`` choose relations and
layers. ``relation_kl`` computes the divergence of relations in memory linear in the number of tokens.

The relation of two projections X and Y, split into A heads of d features each, is softmax(X Y^T / sqrt(d)): one
distribution over the keys per head and query. If X are the queries, Y the keys and A the attention's own number of
heads, the relation is the attention itself (internal representations, Eq. 2). Any pair of projections and any A give
the relations of MiniLMv2 (Eqs. 6 to 8).

Shapes: T tokens of B packed sequences, n sequences of one length group padded to L, H features, A heads of D features.
"""

from collections.abc import Collection, Sequence
from itertools import chain, product
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import Function

from distill_runner.common.errors import UserError, override
from distill_runner.common.schema import Assumption
from distill_runner.datasets.batches import Batch, LengthGroup
from distill_runner.methods.base import LayeredTerm, Progress
from distill_runner.methods.layer_mapping import LayerMapping
from distill_runner.models.families import Projection
from distill_runner.models.features import EncoderShape, FeatureRequest, Features

Pair = Literal["QQ", "QK", "QV", "KQ", "KK", "KV", "VQ", "VK", "VV"]
Rows = Literal["sequence", "token"]
LETTERS: dict[str, Projection] = {"Q": "query", "K": "key", "V": "value"}
BLOCK_SIZE = {"cpu": 2**20, "cuda": 2**25}
"""Elements of a (pairs, L, L) tensor computed at once, by device type; five such tensors are in memory together."""
MASKED = -1e9
"""Score of a padding key. It is finite, so that 0 * log 0 is 0, and its exp is exactly 0."""
HEADS_REASON = "; heads are compared one to one"


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
        over_layers: ``sum`` over the supervised layers (internal representations, Algorithm 1; ``method=internal``), or
            ``mean`` (the same paper's text on Exp3.0).
        over_rows: ``sequence`` takes the mean over the tokens of each sequence, then over the batch (internal
            representations, Eq. 2 and Algorithm 1); ``token`` takes the mean over all tokens of the batch.
    """

    weighs_examples = True

    def __init__(
        self,
        mapping: LayerMapping,
        pairs: list[Pair],
        heads: int | None = None,
        over_layers: Annotated[
            Literal["sum", "mean"],
            Assumption(
                "Algorithm 1 adds the losses of layers; the text on Exp3.0 averages", "internal representations"
            ),
        ] = "mean",
        over_rows: Annotated[
            Rows,
            Assumption(
                "mean over each sequence's tokens, then over the batch; Eq. 6 has one sequence",
                "MiniLMv2 Eq. 6",
                "sequence",
            ),
        ] = "sequence",
    ) -> None:
        super().__init__(mapping, over_layers)
        if not pairs or len(set(pairs)) < len(pairs) or not set(pairs) <= set(get_args(Pair)):
            raise UserError(".pairs", pairs, "must be different pairs of Q, K and V", "For example: [QQ, KK, VV]")
        self.pairs = [(LETTERS[pair[0]], LETTERS[pair[1]]) for pair in pairs]
        self.relation_heads, self.over_rows = heads, over_rows
        self.mean_over = "token" if over_rows == "token" else "example"

    def build(self, student: EncoderShape, teacher: EncoderShape) -> None:
        if self.relation_heads is None:
            remedy = "Take a student with as many heads, or relations without heads: " + override("method", "minilmv2")
            self.require_equal("num_heads", student, teacher, HEADS_REASON, remedy)
        self.heads = self.relation_heads or student.num_heads
        for name, shape in (("student", student), ("teacher", teacher)):
            width = shape.projection_width or shape.width
            if self.heads < 1 or width % self.heads:
                raise UserError(".heads", self.heads, f"must divide the width of the {name}, {width}")

    def layer_needs(self, layers: Collection[int]) -> FeatureRequest:
        return FeatureRequest(projections=frozenset(product(chain.from_iterable(self.pairs), layers)))

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        weights = row_weights(batch, self.over_rows)

        def divergence(x: Projection, y: Projection, j: int, k: int) -> Tensor:
            teacher_sides = teacher.projections[x, k], teacher.projections[y, k]
            student_sides = student.projections[x, j], student.projections[y, j]
            return relation_kl(teacher_sides, student_sides, self.heads, batch.groups, weights)

        layers = self.current_layers.items()
        return self.reduce_layers(
            [torch.stack([divergence(x, y, j, k) for x, y in self.pairs]).sum() for j, (k,) in layers]
        )


class AttentionScoreLoss(LayeredTerm):
    """Squared error between the attention scores of student and teacher, head by head (TinyBERT, Eq. 7).

    Both models must have the same number of heads. The mean is over the heads and all token pairs of a sequence, then
    over the batch. TinyBERT's code also counts pairs with padding, with scores of 0 for both models, so its loss
    depends on the padding of the batch.

    Args:
        mapping: which teacher layer belongs to which student layer.
        over_layers: ``sum`` (TinyBERT, Eq. 11) or ``mean`` over the supervised layers.
    """

    weighs_examples = True

    def __init__(
        self,
        mapping: LayerMapping,
        over_layers: Annotated[
            Literal["sum", "mean"],
            Assumption(
                "pairs with padding are left out; the paper's code counts them, with scores of 0", "TinyBERT Eq. 7"
            ),
        ] = "sum",
    ) -> None:
        super().__init__(mapping, over_layers)

    def build(self, student: EncoderShape, teacher: EncoderShape) -> None:
        remedy = "Take a student with as many heads, or weight 0 for this term."
        self.require_equal("num_heads", student, teacher, HEADS_REASON, remedy)
        self.heads = student.num_heads

    def layer_needs(self, layers: Collection[int]) -> FeatureRequest:
        names: tuple[Projection, ...] = ("query", "key")
        return FeatureRequest(projections=frozenset(product(names, layers)))

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        layers = self.current_layers.items()
        return self.reduce_layers([self._layer_loss(student, teacher, j, k, batch) for j, (k,) in layers])

    def _layer_loss(self, student: Features, teacher: Features, j: int, k: int, batch: Batch) -> Tensor:
        group_sums = []
        for group in batch.groups:
            student_scores = attention_scores(student, j, self.heads, group)
            teacher_scores = attention_scores(teacher, k, self.heads, group)
            pairs = group.is_token[:, None, :, None] & group.is_token[:, None, None, :]
            squares = (student_scores - teacher_scores).square().masked_fill(~pairs, 0.0).sum((1, 2, 3))
            means = squares / (self.heads * group.is_token.sum(1).square())
            if batch.example_weights is not None:
                means = means * batch.example_weights[group.sequences].to(means)
            group_sums.append(means.sum())
        return torch.stack(group_sums).sum() / batch.size


def attention_scores(features: Features, layer: int, heads: int, group: LengthGroup) -> Tensor:
    """Return the scores Q K^T / sqrt(d) of every head, (n, A, L, L); scores of padding are meaningless.

    Their softmax over the real keys (``group.is_token``) gives the attention probabilities before dropout. A window
    of local attention is not applied.
    """
    query, key = (
        features.projections[name, layer][group.tokens][group.gather].unflatten(-1, (heads, -1)).transpose(1, 2)
        for name in ("query", "key")
    )
    return query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5


Sides = tuple[Tensor, Tensor]
"""X and Y of one model, each (T, H)."""


def relation_kl(teacher: Sides, student: Sides, heads: int, groups: Sequence[LengthGroup], weight_T: Tensor) -> Tensor:
    """Weighted sum over the queries of KL(teacher's relation || student's relation), mean over the heads.

    Padding is left out from the queries and the keys.

    The relations of both models are computed block by block and not kept. The forward pass also computes the gradients,
    whose size is linear in the number of tokens. The backward pass thus need not compute the relations again, which is
    possible because the result is a scalar. Only the student gets gradients.

    Args:
        teacher, student: projections X and Y of each model, (T, H). The widths H of the two models may differ; each is
            split into ``heads`` heads and scaled by its own d.
        groups: length groups of the packed sequences.
        weight_T: weight of each query, for example from ``row_weights``.
    """
    assert all(side.shape[1] % heads == 0 for side in (*teacher, *student)), "heads divide the widths"
    return _RelationKL.apply(*student, *teacher, heads, groups, weight_T)


def row_weights(batch: Batch, rows: Rows) -> Tensor:
    """Return weights (T,) that sum to 1, times the weights of the examples if the batch has any.

    With ``token`` all tokens weigh the same. With ``sequence`` all sequences weigh the same, and so do the tokens of
    one sequence.
    """
    num_tokens = len(batch.positions)
    if rows == "token":
        weights = batch.starts.new_full((num_tokens,), 1 / num_tokens, dtype=torch.float64)
        return weights if batch.token_weights is None else weights * batch.token_weights.to(weights)
    lengths = batch.sequence_lengths
    weights_B = 1 / (batch.size * lengths.double())
    if batch.example_weights is not None:
        weights_B = weights_B * batch.example_weights.to(weights_B)
    return weights_B.repeat_interleave(lengths, output_size=num_tokens)


class _RelationKL(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        y_TH: Tensor,
        teacher_x_TH: Tensor,
        teacher_y_TH: Tensor,
        heads: int,
        groups: Sequence[LengthGroup],
        weight_T: Tensor,
    ) -> Tensor:
        differentiable = any(ctx.needs_input_grad[:2])
        gradients = [torch.empty_like(side) if differentiable else None for side in (x_TH, y_TH)]
        total = x_TH.new_zeros(())
        for group in groups:
            sides = [_split(side, group, heads) for side in (x_TH, y_TH, teacher_x_TH, teacher_y_TH)]
            weight_nL = weight_T[group.tokens][group.gather].to(x_TH) * group.is_token / heads
            padded_gradients = [torch.empty_like(side) for side in sides[:2]] if differentiable else []
            length, pairs = group.is_token.shape[1], len(sides[0])
            size = max(1, BLOCK_SIZE[x_TH.device.type] // length**2)
            for start in range(0, pairs, size):
                part = slice(start, min(start + size, pairs))
                sequence = torch.arange(part.start, part.stop, device=x_TH.device) // heads
                total += _divergence(
                    [side[part] for side in sides],
                    group.is_token[sequence],
                    weight_nL[sequence],
                    [side[part] for side in padded_gradients],
                )
            for gradient, side in zip(gradients, padded_gradients, strict=False):
                assert gradient is not None
                gradient[group.tokens] = _merge(side, group, heads)
        ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        student_sides = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return (*(gradients[0] * saved if needed else None for saved, needed in student_sides), *[None] * 5)


def _divergence(sides: Sequence[Tensor], real_pL: Tensor, weight_pL: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum of the divergences of p pairs of sequence and head.

    Args:
        sides: x and y of the student, x and y of the teacher, each (p, L, D).
        real_pL: which keys are no padding.
        weight_pL: weights of the queries.
        gradients: receives the gradients of the sum with respect to the student's x and y, unless it is empty.
    """
    x, y, teacher_x, teacher_y = sides
    log_teacher, log_student = _log_relation(teacher_x, teacher_y, real_pL), _log_relation(x, y, real_pL)
    teacher = log_teacher.exp()
    total = (log_teacher.sub_(log_student).mul_(teacher).sum(-1) * weight_pL).sum()
    if gradients:
        # The gradient with respect to the student's scores is the difference of the two distributions.
        by_score = log_student.exp_().sub_(teacher).mul_((weight_pL / x.shape[-1] ** 0.5)[..., None])
        torch.bmm(by_score, y, out=gradients[0])
        torch.bmm(by_score.transpose(1, 2), x, out=gradients[1])
    return total


def _log_relation(x: Tensor, y: Tensor, real_pL: Tensor) -> Tensor:
    scores = torch.bmm(x * x.shape[-1] ** -0.5, y.transpose(1, 2)).masked_fill_(~real_pL[:, None], MASKED)
    return scores.log_softmax(-1)


def _split(side_TH: Tensor, group: LengthGroup, heads: int) -> Tensor:
    """Pad the sequences of a group and split them into heads: (n * A, L, D)."""
    return side_TH[group.tokens][group.gather].unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1)


def _merge(parts: Tensor, group: LengthGroup, heads: int) -> Tensor:
    """Undo ``_split``: merge the heads and pack the tokens of the group again."""
    return parts.unflatten(0, (-1, heads)).transpose(1, 2).flatten(2).flatten(0, 1)[group.padded_positions]
