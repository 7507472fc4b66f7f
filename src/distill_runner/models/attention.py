"""Attention within each sequence of a pack. Sequences are processed in groups, which are padded only for the attention.

Shapes: a pack has T tokens in B sequences; there are N heads of d features; a group has n sequences padded to L tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import dropout, scaled_dot_product_attention

from distill_runner.datasets.batches import Batch, LengthGroup
from distill_runner.datasets.noise import DropoutMasks
from distill_runner.models.ragged import RaggedAttention


class PackedAttention:
    """Multi-head attention over the sequences of a batch, by matrix products over all sequences of a group.

    Args:
        num_heads: number of heads, which divide the features of a token among them.
        noise: dropout masks for attention probabilities; None uses torch's own generator.
    """

    def __init__(self, batch: Batch, num_heads: int, noise: DropoutMasks | None) -> None:
        self.groups, self.noise = batch.groups, noise
        self.heads = (None,) * num_heads  # a compiled graph has a length as a constant, but a number as a variable
        self.ragged = RaggedAttention.of(batch)
        self.layouts: dict[tuple[int, int], list[_Layout]] = {}

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    def attend(self, projected: Tensor, p: float, site: int, window: int | None = None) -> Tensor:
        """Return the contexts (T, H) of all tokens.

        Args:
            projected: queries, keys and values (T, 3 * H) side by side.
            p: dropout probability of attention probabilities.
            site: number of this dropout's place in the model.
            window: maximum distance between a token and the tokens it attends to; None for all tokens.
        """
        if self.ragged is not None and self.ragged.takes(projected.shape[1] // (3 * self.num_heads)):
            return self.ragged.attend(projected, self.num_heads, p, window)
        contexts = []
        for group, (queries, keys, values) in zip(self.groups, self._pad(projected, 3, self.num_heads), strict=True):
            allowed = _allowed(group, window)
            if p and self.noise is not None:
                scores = _scores(queries.flatten(0, 1), keys.flatten(0, 1), allowed, queries.shape[-1])
                probabilities = scores.softmax(-1).unflatten(0, queries.shape[:2])
                contexts.append(self.noise.attention(probabilities, group, p, site) @ values)
            else:
                contexts.append(scaled_dot_product_attention(queries, keys, values, allowed[:, None], dropout_p=p))
        context_TH: Tensor = _Unpad.apply(self._layouts(1, self.num_heads), len(projected), *contexts)
        return context_TH

    def attend_first_projected(
        self, projected: Tensor, q_BH: Tensor, p: float, site: int, window: int | None = None
    ) -> Tensor:
        """Return the contexts (B, H) of the first tokens, given their queries ``q_BH``.

        Args:
            projected: keys and values (T, 2 * H) of all tokens, side by side.
        """
        size, contexts = q_BH.shape[1] // self.num_heads, []
        of_groups = q_BH.unflatten(1, (-1, size)).split([len(group.real) for group in self.groups])
        sides = self._pad(projected, 2, self.num_heads)
        for group, queries, (keys, values) in zip(self.groups, of_groups, sides, strict=True):
            allowed = _allowed(group, window)[:, :1]
            scores = _scores(queries.flatten(0, 1)[:, None], keys.flatten(0, 1), allowed, size)
            probabilities = self._dropped(scores.softmax(-1).unflatten(0, queries.shape[:2]), group, p, site)
            contexts.append((probabilities @ values).flatten(1))
        return torch.cat(contexts)

    def _dropped(self, probabilities: Tensor, group: LengthGroup, p: float, site: int) -> Tensor:
        if self.noise is None:
            return dropout(probabilities, p)
        return self.noise.attention(probabilities, group, p, site)

    def attend_first(
        self,
        h_TH: Tensor,
        q_BH: Tensor,
        key: tuple[Tensor, Tensor | None],
        value: tuple[Tensor, Tensor | None],
        p: float,
        site: int,
    ) -> Tensor:
        """Return the contexts (B, H) of the first tokens without computing keys and values of all tokens.

        q (W h) = (q W) h: the key weights multiply the few queries instead of every state. The value weights multiply
        the attention's weighted mean of the states. The key bias adds the same number to all scores of a query. Softmax
        cancels this number, so the key bias has no gradient.

        Args:
            h_TH: states of all tokens, the input of the projections.
            q_BH: queries of the first tokens.
            key, value: weight and bias of the key projection and of the value projection.
        """
        size = q_BH.shape[1] // self.num_heads
        key_NdH, value_NdH = (weight.unflatten(0, (-1, size)) for weight, _ in (key, value))
        queries_BNH = (q_BH.unflatten(1, (-1, size)).transpose(0, 1) @ key_NdH).transpose(0, 1)
        means, sums = [], []
        of_groups = queries_BNH.split([len(group.real) for group in self.groups])
        for group, queries, padded in zip(self.groups, of_groups, self._pad(h_TH, 1, 1), strict=True):
            states = padded[0, :, 0]
            scores = _scores(queries, states, _allowed(group, None), size)
            probabilities = self._dropped(scores.softmax(-1)[:, :, None], group, p, site)
            means.append(probabilities[:, :, 0] @ states)
            sums.append(probabilities.sum(-1))
        context_NBd = torch.cat(means).transpose(0, 1) @ value_NdH.transpose(1, 2)
        context_BH, bias = context_NBd.transpose(0, 1).flatten(1), value[1]
        return context_BH if bias is None else context_BH + (torch.cat(sums) * bias.view(-1, size)).flatten(1)

    def _pad(self, states: Tensor, parts: int, num_heads: int) -> tuple[Tensor, ...]:
        """Return the states (T, parts * H) as (parts, n, heads, L, d) for each group."""
        padded: tuple[Tensor, ...] = _Pad.apply(states, self._layouts(parts, num_heads))
        return padded

    def _layouts(self, parts: int, num_heads: int) -> list["_Layout"]:
        if torch.compiler.is_compiling():  # the graph computes indices where it copies, without memory for them
            return [_Layout.of(group, parts, num_heads) for group in self.groups]
        if (parts, num_heads) not in self.layouts:
            self.layouts[parts, num_heads] = [_Layout.of(group, parts, num_heads) for group in self.groups]
        return self.layouts[parts, num_heads]


def _allowed(group: LengthGroup, window: int | None) -> Tensor:
    """Return which keys each query attends to, (n, L, L), or (n, 1, L) if all queries attend to the same keys.

    A padded query, whose output is not used, attends to all real keys, because a row without any key gives NaN.
    """
    length = group.real.shape[1]
    real = group.real[:, None]
    if window is None or length <= window + 1:
        return real
    places = torch.arange(length, device=real.device)
    near = (places[:, None] - places).abs() <= window
    return real & (near | ~group.real[:, :, None])


def _scores(queries: Tensor, keys: Tensor, allowed: Tensor, size: int) -> Tensor:
    """Return masked attention scores (n * heads, L, L) from queries and keys (n * heads, L, d).

    With one query per head (n, heads, H) and states (n, L, H), the scores are (n, heads, L). ``size`` is d, the number
    of features of a head. The mask is added, which is faster on a CPU than filling.
    """
    mask = torch.zeros_like(allowed, dtype=keys.dtype).masked_fill_(~allowed, -torch.inf)
    mask = mask.repeat_interleave(len(keys) // len(mask), 0)
    return torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=size**-0.5)


@dataclass(frozen=True)
class _Layout:
    """Row indices to copy between the layout (T, parts, heads) of a pack and (parts, n, heads, L) of a group.

    ``gather`` holds the pack's row for each place of the group, and ``scatter`` the group's row for each token.
    Whole rows of d features are copied, so a single copy both pads and moves parts and heads to the front.
    """

    gather: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, group: LengthGroup, parts: int, num_heads: int) -> "_Layout":
        n, length = group.gather.shape
        part, head = (torch.arange(count, device=group.gather.device) for count in (parts, num_heads))
        sequence, column = (group.tokens_padded // length)[:, None, None], (group.tokens_padded % length)[:, None, None]
        tokens = group.gather + group.tokens.start
        return cls(
            (tokens[:, None] * parts + part[:, None, None, None]) * num_heads + head[:, None],
            ((part[:, None] * n + sequence) * num_heads + head) * length + column,
        )

    def rows(self, states: Tensor) -> Tensor:
        """Return the states (T, parts * H) as rows (T * parts * heads, d)."""
        parts, _, heads, _ = self.gather.shape
        return states.reshape(len(states) * parts * heads, -1)


class _Pad(Function):
    """(T, parts * H) -> (parts, n, heads, L, d) of each group.

    The output of padding is not used, so its gradient counts as zero.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, layouts: Sequence[_Layout]) -> tuple[Tensor, ...]:
        ctx.layouts, ctx.num_tokens = layouts, len(states)
        rows = layouts[0].rows(states)
        return tuple(
            rows.index_select(0, layout.gather.flatten()).unflatten(0, layout.gather.shape) for layout in layouts
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _tokens(gradients, ctx.layouts, ctx.num_tokens), None


class _Unpad(Function):
    """(n, heads, L, d) of each group -> (T, H)."""

    @staticmethod
    def forward(ctx: Any, layouts: Sequence[_Layout], num_tokens: int, *padded: Tensor) -> Tensor:
        ctx.layouts = layouts
        return _tokens(padded, layouts, num_tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        padded: list[Tensor | None] = [None, None]
        *of_groups, _ = _of_groups(ctx.layouts[0].rows(gradient), ctx.layouts)
        for layout, part in zip(ctx.layouts, of_groups, strict=True):
            gather = layout.gather[0]
            zeros = part.new_zeros(gather.numel(), part.shape[1])
            padded.append(zeros.index_copy_(0, layout.scatter.flatten(), part).unflatten(0, gather.shape))
        return tuple(padded)


def _tokens(padded: Sequence[Tensor], layouts: Sequence[_Layout], num_tokens: int) -> Tensor:
    """Return the rows of all groups' tokens as (T, parts * H), with zeros for tokens that belong to no group."""
    parts, _, heads, _ = layouts[0].gather.shape
    rows = padded[0].new_empty(num_tokens * parts * heads, padded[0].shape[-1])
    *of_groups, others = _of_groups(rows, layouts)
    for states, layout, part in zip(padded, layouts, of_groups, strict=True):
        torch.index_select(states.flatten(0, -2), 0, layout.scatter.flatten(), out=part)
    if len(others):
        others.zero_()
    return rows.view(num_tokens, -1)


def _of_groups(rows: Tensor, layouts: Sequence[_Layout]) -> tuple[Tensor, ...]:
    """Split ``rows`` by group; the last part holds the rows of tokens that belong to no group."""
    sizes = [layout.scatter.numel() for layout in layouts]
    return rows.split([*sizes, len(rows) - sum(sizes)])
