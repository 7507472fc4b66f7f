"""Attention within each sequence of a pack: without padding on a recent GPU, else in groups padded for the attention.

Shapes: a pack has T tokens in B sequences; there are N heads of d features; a group has n sequences padded to L tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import dropout, pad, scaled_dot_product_attention

from distill_runner.datasets.batches import Batch, LengthGroup
from distill_runner.datasets.dropout import DropoutMasks

_HEAD_SIZES = range(8, 129, 8)
"""Features of a head that the kernels of all GPUs since Ampere take, forward and backward."""


class PackedAttention:
    """Multi-head attention over the sequences of a batch, by matrix products over all sequences of a group.

    Args:
        num_heads: number of heads, which divide the features of a token among them.
        noise: dropout masks for attention probabilities; None uses torch's own generator.
    """

    def __init__(self, batch: Batch, num_heads: int, noise: DropoutMasks | None) -> None:
        self.groups, self.noise = batch.groups, noise
        self.heads = (None,) * num_heads  # a compiled graph has a length as a constant, but a number as a variable
        self.ragged = RaggedAttention.for_batch(batch)
        self.layouts: dict[tuple[int, int], list[_Layout]] = {}
        self.masks: dict[tuple[int | None, torch.dtype], list[Tensor]] = {}

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    def attend(self, qkv: Tensor, p: float, site: int, window: int | None = None) -> Tensor:
        """Return the contexts (T, H) of all tokens.

        Args:
            qkv: queries, keys and values, concatenated: (T, 3 * H).
            p: dropout probability of attention probabilities.
            site: number of this dropout's place in the model.
            window: maximum distance between a token and the tokens it attends to; None for all tokens.
        """
        if self.ragged is not None and qkv.shape[1] // (3 * self.num_heads) in _HEAD_SIZES:
            return self.ragged.attend(qkv, self.num_heads, p, window)
        contexts = []
        sides, masks = self._pad(qkv, 3, self.num_heads), self._masks(window, qkv.dtype)
        for group, (queries, keys, values), mask in zip(self.groups, sides, masks, strict=True):
            if p and self.noise is not None:
                scores = _scores(queries.flatten(0, 1), keys.flatten(0, 1), mask, queries.shape[-1])
                probabilities = scores.softmax(-1).unflatten(0, queries.shape[:2])
                contexts.append(self.noise.drop_attention(probabilities, group, p, site) @ values)
            else:
                contexts.append(scaled_dot_product_attention(queries, keys, values, mask[:, None], dropout_p=p))
        return _Unpad.apply(self._layouts(1, self.num_heads), len(qkv), *contexts)

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
        group_queries = queries_BNH.split([len(group.is_token) for group in self.groups])
        sides, masks = self._pad(h_TH, 1, 1), self._masks(None, h_TH.dtype)
        for group, queries, padded_states, mask in zip(self.groups, group_queries, sides, masks, strict=True):
            states = padded_states.view(*group.gather.shape, -1)
            scores = _scores(queries, states, mask, size)
            probabilities = scores.softmax(-1)[:, :, None]
            if self.noise is None:
                probabilities = dropout(probabilities, p)
            else:
                probabilities = self.noise.drop_attention(probabilities, group, p, site)
            means.append(probabilities.squeeze(2) @ states)
            sums.append(probabilities.sum(-1))
        context_NBd = torch.cat(means).transpose(0, 1) @ value_NdH.transpose(1, 2)
        context_BH, bias = context_NBd.transpose(0, 1).flatten(1), value[1]
        return context_BH if bias is None else context_BH + (torch.cat(sums) * bias.view(-1, size)).flatten(1)

    def _pad(self, states: Tensor, parts: int, num_heads: int) -> tuple[Tensor, ...]:
        """Return the states (T, parts * H) as (parts, n, heads, L, d) for each group."""
        return _Pad.apply(states, self._layouts(parts, num_heads))

    def _layouts(self, parts: int, num_heads: int) -> list["_Layout"]:
        if torch.compiler.is_compiling():  # the graph computes indices where it copies, without memory for them
            return [_Layout.for_group(group, parts, num_heads) for group in self.groups]
        if (parts, num_heads) not in self.layouts:
            self.layouts[parts, num_heads] = [_Layout.for_group(group, parts, num_heads) for group in self.groups]
        return self.layouts[parts, num_heads]

    def _masks(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        """Return the mask of each group to add to its scores, once for all layers."""
        if torch.compiler.is_compiling():
            return [_added_mask(group, window, dtype) for group in self.groups]
        if (window, dtype) not in self.masks:
            self.masks[window, dtype] = [_added_mask(group, window, dtype) for group in self.groups]
        return self.masks[window, dtype]


def _added_mask(group: LengthGroup, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return 0 for the keys that each query attends to, and minus infinity for the others.

    The shape is (n, L, L), or (n, 1, L) if all queries attend to the same keys. A padded query, whose output is not
    used, attends to all real keys, because a row without any key gives NaN.
    """
    key_mask, length = group.is_token[:, None], group.is_token.shape[1]
    if window is not None and length > window + 1:
        positions = torch.arange(length, device=key_mask.device)
        in_window = (positions[:, None] - positions).abs() <= window
        key_mask = key_mask & (in_window | ~group.is_token[:, :, None])
    return torch.zeros_like(key_mask, dtype=dtype).masked_fill_(~key_mask, -torch.inf)


def _scores(queries: Tensor, keys: Tensor, mask: Tensor, size: int) -> Tensor:
    """Return masked attention scores (n * heads, L, L) from queries and keys (n * heads, L, d).

    With one query per head (n, heads, H) and states (n, L, H), the scores are (n, heads, L). ``size`` is d, the number
    of features of a head. The mask is added, which is faster on a CPU than filling.
    """
    if (num_heads := len(keys) // len(mask)) > 1:
        mask = mask.repeat_interleave(num_heads, 0)
    return torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=size**-0.5)


@dataclass(frozen=True)
class _Layout:
    """Row indices to copy between the layout (T, parts, heads) of a pack and (parts, n, heads, L) of a group.

    ``gather`` holds the pack's row for each position of the group, and ``scatter`` the group's row for each token.
    Whole rows of d features are copied, so a single copy both pads and moves parts and heads to the front.
    """

    gather: Tensor
    scatter: Tensor

    @classmethod
    def for_group(cls, group: LengthGroup, parts: int, num_heads: int) -> "_Layout":
        n, length = group.gather.shape
        device, per_token = group.gather.device, parts * num_heads
        first = group.tokens.start * per_token
        part_head = torch.arange(first, first + per_token, device=device).view(parts, 1, num_heads, 1)
        scatter = group.padded_positions[:, None, None]
        if num_heads > 1:
            scatter = torch.add(scatter, scatter // length, alpha=(num_heads - 1) * length)
            scatter = torch.add(scatter, torch.arange(num_heads, device=device), alpha=length)
        if parts > 1:
            scatter = torch.add(scatter, torch.arange(parts, device=device)[:, None], alpha=n * num_heads * length)
        return cls(torch.add(part_head, group.gather[:, None], alpha=per_token), scatter)

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
    def forward(ctx: Any, layouts: Sequence[_Layout], num_tokens: int, *padded_contexts: Tensor) -> Tensor:
        ctx.layouts = layouts
        return _tokens(padded_contexts, layouts, num_tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None, None]
        *group_rows, _ = _split_by_group(ctx.layouts[0].rows(gradient), ctx.layouts)
        for layout, part in zip(ctx.layouts, group_rows, strict=True):
            gather = layout.gather[0]
            zeros = part.new_zeros(gather.numel(), part.shape[1])
            gradients.append(zeros.index_copy_(0, layout.scatter.flatten(), part).unflatten(0, gather.shape))
        return tuple(gradients)


def _tokens(padded_parts: Sequence[Tensor], layouts: Sequence[_Layout], num_tokens: int) -> Tensor:
    """Return the rows of all groups' tokens as (T, parts * H), with zeros for tokens that belong to no group."""
    parts, _, heads, _ = layouts[0].gather.shape
    rows = padded_parts[0].new_empty(num_tokens * parts * heads, padded_parts[0].shape[-1])
    *group_rows, others = _split_by_group(rows, layouts)
    for states, layout, part in zip(padded_parts, layouts, group_rows, strict=True):
        torch.index_select(states.flatten(0, -2), 0, layout.scatter.flatten(), out=part)
    if len(others):
        others.zero_()
    return rows.view(num_tokens, -1)


def _split_by_group(rows: Tensor, layouts: Sequence[_Layout]) -> tuple[Tensor, ...]:
    """Split ``rows`` by group; the last part holds the rows of tokens that belong to no group."""
    sizes = [layout.scatter.numel() for layout in layouts]
    return rows.split([*sizes, len(rows) - sum(sizes)])


@dataclass(frozen=True)
class RaggedAttention:
    """Attention over the sequences of a batch without padding, by flash attention on a GPU since Ampere (sm_80).

    It runs in bf16 or fp16. ``torch.nn.attention.varlen`` calls the same operation, but without dropout.

    Attributes:
        bounds: (B + 1,), int32, where each sequence begins and the last one ends.
        longest: number of tokens of the longest sequence, at most.
    """

    bounds: Tensor
    longest: int

    @classmethod
    def for_batch(cls, batch: Batch) -> "RaggedAttention | None":
        """Return the attention for ``batch``, or None where it must be padded."""
        device = batch.starts.device
        if device.type != "cuda" or not torch.is_autocast_enabled("cuda") or not _has_kernels(device):
            return None
        bounds = pad(batch.starts.int(), (0, 1), value=batch.num_tokens)
        return cls(bounds, max(group.is_token.shape[1] for group in batch.groups))

    def attend(self, qkv: Tensor, num_heads: int, p: float, window: int | None) -> Tensor:
        """Return the contexts (T, H), as ``PackedAttention.attend`` does."""
        queries, keys, values = qkv.unflatten(1, (3, num_heads, -1)).unbind(1)
        context, *_ = torch.ops.aten._flash_attention_forward(
            *(queries, keys, values, self.bounds, self.bounds, self.longest, self.longest, p, False, False),
            window_size_left=window,
            window_size_right=window,
        )
        return context.flatten(1)


@cache
def _has_kernels(device: torch.device) -> bool:
    """Try attention with dropout, gradients and a window, since builds of torch differ in their kernels."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    bounds = 2 * torch.arange(2, dtype=torch.int32, device=device)  # made there: a copy would make the host wait
    attention = RaggedAttention(bounds, 2)
    try:
        with torch.random.fork_rng([device]), torch.inference_mode(False), torch.enable_grad():
            for window in (None, 1):
                qkv = torch.zeros(2, 3 * 8, dtype=torch.bfloat16, device=device, requires_grad=True)
                attention.attend(qkv, 1, 0.1, window).sum().backward()
    except (AttributeError, RuntimeError):
        return False
    return True
