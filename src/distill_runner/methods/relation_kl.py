"""KL divergence between self-attention relations of teacher and student, in memory linear in the number of tokens.

The relation of two projections X and Y, split into A heads of d features each, is softmax(X Y^T / sqrt(d)): one
distribution over the keys per head and query. If X are the queries, Y the keys and A the attention's own number of
heads, the relation is the attention itself (internal representations, Eq. 2). Any pair of projections and any A give
the relations of MiniLMv2 (Eqs. 6 to 8).

Shapes: T tokens of B packed sequences, n sequences of one group padded to L, H features, A heads of D features each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from distill_runner.datasets.batches import Batch, LengthGroup

BLOCK = {"cpu": 2**20, "cuda": 2**25}
"""Relations (elements of a (pairs, L, L) tensor) held at once, by device type; five such tensors are held together."""
MASKED = -1e9
"""Score of a padding key. It is finite, so that 0 * log 0 is 0, and its exp is exactly 0."""

Rows = Literal["sequence", "token"]
Sides = tuple[Tensor, Tensor]
"""X and Y of one model, each (T, H)."""


def relation_kl(
    teacher: Sides,
    student: Sides,
    heads: int,
    groups: Sequence[LengthGroup],
    weight_T: Tensor,
    block: int | None = None,
) -> Tensor:
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
        block: number of elements of a block's relations; None takes the default of the device.
    """
    assert all(side.shape[1] % heads == 0 for side in (*teacher, *student)), "heads divide the widths"
    result: Tensor = _RelationKL.apply(*student, *teacher, heads, groups, weight_T, block)
    return result


def row_weights(batch: Batch, over: Rows) -> Tensor:
    """Return weights (T,) that sum to 1.

    With ``token`` all tokens weigh the same. With ``sequence`` all sequences weigh the same, and so do the tokens of
    one sequence.
    """
    num_tokens = len(batch.positions)
    if over == "token":
        return batch.starts.new_full((num_tokens,), 1 / num_tokens, dtype=torch.float64)
    lengths = batch.sequence_lengths
    return (1 / (batch.size * lengths.double())).repeat_interleave(lengths, output_size=num_tokens)


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
        block: int | None,
    ) -> Tensor:
        differentiable = any(ctx.needs_input_grad[:2])
        gradients = [torch.empty_like(side) if differentiable else None for side in (x_TH, y_TH)]
        total = x_TH.new_zeros(())
        for group in groups:
            sides = [_split(side, group, heads) for side in (x_TH, y_TH, teacher_x_TH, teacher_y_TH)]
            weight_nL = weight_T[group.tokens][group.gather].to(x_TH) * group.real / heads
            found = [torch.empty_like(side) if differentiable else None for side in sides[:2]]
            for part in _blocks(group, heads, block or BLOCK[x_TH.device.type]):
                which = torch.arange(part.start, part.stop, device=x_TH.device) // heads
                x, y, teacher_x, teacher_y = (side[part] for side in sides)
                cut = _Block(x, y, teacher_x, teacher_y, group.real[which], weight_nL[which])
                total += cut.kl(None if found[0] is None else [side[part] for side in found if side is not None])
            for whole, side in zip(gradients, found, strict=True):
                if whole is not None and side is not None:
                    whole[group.tokens] = _merge(side, group, heads)
        ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return (*(gradients[0] * saved if wants else None for saved, wants in wanted), *[None] * 6)


@dataclass
class _Block:
    """Block of p pairs of sequence and head: projections (p, L, D), real keys (p, L) and query weights (p, L)."""

    x: Tensor
    y: Tensor
    teacher_x: Tensor
    teacher_y: Tensor
    real: Tensor
    weight: Tensor

    def kl(self, gradients: list[Tensor] | None) -> Tensor:
        """Return the weighted sum of the divergences; write d(sum)/dx and d(sum)/dy into ``gradients``, if given."""
        log_taught = self._log_relation(self.teacher_x, self.teacher_y)
        log_learnt = self._log_relation(self.x, self.y)
        taught = log_taught.exp()
        total = (log_taught.sub_(log_learnt).mul_(taught).sum(-1) * self.weight).sum()
        if gradients is not None:
            # The gradient with respect to the student's scores is the difference of the two distributions.
            by_score = log_learnt.exp_().sub_(taught).mul_((self.weight / self.x.shape[-1] ** 0.5)[..., None])
            torch.bmm(by_score, self.y, out=gradients[0])
            torch.bmm(by_score.transpose(1, 2), self.x, out=gradients[1])
        return total

    def _log_relation(self, x: Tensor, y: Tensor) -> Tensor:
        scores = torch.bmm(x * x.shape[-1] ** -0.5, y.transpose(1, 2)).masked_fill_(~self.real[:, None], MASKED)
        return scores.log_softmax(-1)


def _split(side_TH: Tensor, group: LengthGroup, heads: int) -> Tensor:
    """Pad the sequences of a group and split them into heads: (n * A, L, D)."""
    return side_TH[group.tokens][group.gather].unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1)


def _merge(parts: Tensor, group: LengthGroup, heads: int) -> Tensor:
    """Undo ``_split``: merge the heads and pack the tokens of the group again."""
    return parts.unflatten(0, (-1, heads)).transpose(1, 2).flatten(2).flatten(0, 1)[group.tokens_padded]


def _blocks(group: LengthGroup, heads: int, block: int) -> Iterator[slice]:
    pairs, length = group.real.shape[0] * heads, group.real.shape[1]
    size = max(1, block // length**2)
    for start in range(0, pairs, size):
        yield slice(start, min(start + size, pairs))
