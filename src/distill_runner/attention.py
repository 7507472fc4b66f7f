"""Attention within each sequence of a pack. The sequences are taken in groups, each padded for the attention alone.

T tokens of a pack, heads of d features; n sequences of a group padded to L; Q queries, L or 1 a sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import scaled_dot_product_attention

from distill_runner.batches import Batch, Group
from distill_runner.dropout import Noise


class Heads:
    """The heads of a batch's sequences, laid out for matrix products over all of them.

    Args:
        num_heads: among which the features of a token are divided.
        noise: that drops attention probabilities; torch's own generator if None.
    """

    def __init__(self, batch: Batch, num_heads: int, noise: Noise | None) -> None:
        self.groups, self.num_heads, self.noise = batch.groups, num_heads, noise
        self.layouts: dict[int, list[_Layout]] = {}

    def attend(self, projected: Tensor, q: Tensor | None, p: float, site: int) -> Tensor:
        """Contexts (T, H) of all tokens, or (B, H) where ``q`` has the queries of the first token of each sequence.

        Args:
            projected: queries, keys and values (T, 3 * H) side by side, or keys and values (T, 2 * H) beside ``q``.
            q: queries (B, H).
            p: probability with which an attention probability is dropped.
            site: of the dropout.
        """
        contexts = []
        for group, layout, back in zip(
            self.groups, self._layouts(2 if q is not None else 3), self._layouts(1), strict=True
        ):
            *queries, keys, values = _Pad.apply(projected[group.tokens], layout)
            if q is not None:
                queries = [q[group.sequences].unflatten(-1, (self.num_heads, -1))[:, :, None]]
            if p and self.noise is not None:
                probabilities = self.noise.attention(_probabilities(queries[0], keys, group), group, p, site)
                context = probabilities @ values
            else:
                # A single query is doubled because the CPU kernel splits its keys by the size of the batch, and
                # the result of an example would depend on its neighbours.
                doubled = queries[0] if q is None else queries[0].expand(-1, -1, 2, -1)
                context = scaled_dot_product_attention(doubled, keys, values, group.real[:, None, None], dropout_p=p)
            contexts.append(_Unpad.apply(context, back) if q is None else context[:, :, 0].flatten(1))
        return torch.cat(contexts)

    def _layouts(self, parts: int) -> list["_Layout"]:
        if parts not in self.layouts:
            self.layouts[parts] = [_Layout.of(group, parts, self.num_heads) for group in self.groups]
        return self.layouts[parts]


def _probabilities(queries: Tensor, keys: Tensor, group: Group) -> Tensor:
    """(n, heads, Q, L); the mask is added, which on a CPU is faster than filling."""
    mask = torch.zeros_like(group.real, dtype=keys.dtype).masked_fill_(~group.real, -torch.inf)
    n, heads, length, size = keys.shape
    scores = torch.baddbmm(
        mask[:, None].expand(n, heads, length).reshape(n * heads, 1, length),
        queries.flatten(0, 1),
        keys.flatten(0, 1).transpose(1, 2),
        alpha=size**-0.5,
    )
    return scores.softmax(-1).unflatten(0, (n, heads))


@dataclass(frozen=True)
class _Layout:
    """Between (tokens, parts, heads) of a group and (parts, n, heads, L): where each of the one lies in the other.

    Whole rows of d features are moved, so that padding and bringing parts and heads to the front are one copy.
    """

    gather: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, group: Group, parts: int, num_heads: int) -> "_Layout":
        n, length = group.gather.shape
        part, head = (torch.arange(count, device=group.gather.device) for count in (parts, num_heads))
        sequence, column = (group.tokens_padded // length)[:, None, None], (group.tokens_padded % length)[:, None, None]
        return cls(
            (group.gather[:, None] * parts + part[:, None, None, None]) * num_heads + head[:, None],
            ((part[:, None] * n + sequence) * num_heads + head) * length + column,
        )


class _Pad(Function):
    """(tokens, parts * H) -> (parts, n, heads, L, d). Nobody reads what is made of padding: its gradient is zero."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, layout: _Layout) -> Tensor:
        ctx.layout = layout
        return _take(states.view(layout.scatter.numel(), -1), layout.gather)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _take(gradients[0].flatten(0, -2), ctx.layout.scatter).flatten(1), None


class _Unpad(Function):
    """(n, heads, L, d) -> (tokens, H)."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, layout: _Layout) -> Tensor:
        ctx.layout = layout
        return _take(padded.flatten(0, -2), layout.scatter).flatten(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gather, scatter = ctx.layout.gather[0], ctx.layout.scatter
        rows = gradients[0].reshape(scatter.numel(), -1)
        padded = rows.new_zeros(gather.numel(), rows.shape[1]).index_copy_(0, scatter.flatten(), rows)
        return padded.unflatten(0, gather.shape), None


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """Rows (R, d) at an index of any shape, as (*index, d)."""
    return rows.index_select(0, index.flatten()).unflatten(0, index.shape)
