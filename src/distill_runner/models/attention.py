"""Attention within each sequence of a pack: without padding on a recent GPU, else in groups padded for the attention.

Shapes: a pack has T tokens in B sequences; there are N heads of d features; a group has n sequences padded to L tokens.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear, pad, scaled_dot_product_attention

from distill_runner.datasets.batches import Batch, DropoutMasks
from distill_runner.models.families import Weights

_HEAD_SIZES = range(8, 129, 8)
"""Features of a head that the kernels of all GPUs since Ampere take, forward and backward."""


class PackedAttention:
    """Multi-head attention over the sequences of a batch, by matrix products over all sequences of a group.

    Args:
        num_heads: number of heads, which divide the features of a token among them.
        dropout: dropout masks for attention probabilities; None uses torch's own generator.
    """

    def __init__(self, batch: Batch, num_heads: int, dropout: DropoutMasks | None) -> None:
        self.groups, self.num_heads, self.dropout = batch.groups, num_heads, dropout
        self.ragged = RaggedAttention.for_batch(batch)
        self.masks: dict[tuple[int | None, torch.dtype], list[Tensor]] = {}

    def attend(self, qkv: Tensor, p: float, site: int, window: int | None = None) -> Tensor:
        """Return the contexts (T, H) of all tokens.

        Args:
            qkv: queries, keys and values, concatenated: (T, 3 * H).
            p: dropout probability of attention probabilities.
            site: number of this dropout's place in the model.
            window: maximum distance between a token and the tokens it attends to; None for all tokens.
        """
        if self.ragged is not None and qkv.shape[1] // (3 * self.num_heads) in _HEAD_SIZES:
            q, k, v = qkv.unflatten(1, (3, self.num_heads, -1)).unbind(1)
            return self.ragged.attend(q, k, v, p, window)
        contexts = []
        for group, mask in zip(self.groups, self._masks(window, qkv.dtype), strict=True):
            rows = qkv[group.tokens].index_select(0, group.gather.flatten())
            parts = rows.view(*group.gather.shape, 3, self.num_heads, -1)  # the output of padding is not used
            queries, keys, values = parts.permute(2, 0, 3, 1, 4).contiguous()  # (n, heads, L, d) each
            if p and self.dropout is not None:
                scores = _scores(queries.flatten(0, 1), keys.flatten(0, 1), mask, queries.shape[-1])
                probabilities = scores.softmax(-1).unflatten(0, queries.shape[:2])
                context = self.dropout.drop_attention(probabilities, group, p, site) @ values
            else:
                context = scaled_dot_product_attention(queries, keys, values, mask[:, None], dropout_p=p)
            rows = context.transpose(1, 2).flatten(2).flatten(0, 1)
            contexts.append(rows.index_select(0, group.padded_positions))
        context_TH = torch.cat(contexts)
        missing = len(qkv) - len(context_TH)  # tokens that belong to no group
        return pad(context_TH, (0, 0, 0, missing)) if missing else context_TH

    def attend_first(self, h_TH: Tensor, q_BH: Tensor, key: Weights, value: Weights, p: float, site: int) -> Tensor:
        """Return the contexts (B, H) of the first tokens; on padded groups, without keys and values of all tokens.

        q (W h) = (q W) h: the key weights multiply the few queries instead of every state. The value weights multiply
        the attention's weighted mean of the states. The key bias adds the same number to all scores of a query. Softmax
        cancels this number, so the key bias has no gradient.

        Args:
            h_TH: states of all tokens, the input of the projections.
            q_BH: queries of the first tokens.
            key, value: weight and bias of the key projection and of the value projection.
        """
        size = q_BH.shape[1] // self.num_heads
        if self.ragged is not None and size in _HEAD_SIZES:  # few kernels take less time than few products
            q, k, v = (x.unflatten(1, (-1, size)) for x in (q_BH, linear(h_TH, *key), linear(h_TH, *value)))
            return self.ragged.attend(q, k, v, p)
        key_NdH, value_NdH = (weight.unflatten(0, (-1, size)) for weight, _ in (key, value))
        queries_BNH = (q_BH.unflatten(1, (-1, size)).transpose(0, 1) @ key_NdH).transpose(0, 1)
        means, sums = [], []
        group_queries = queries_BNH.split([len(group.is_token) for group in self.groups])
        for group, queries, mask in zip(self.groups, group_queries, self._masks(None, h_TH.dtype), strict=True):
            states = h_TH[group.tokens].index_select(0, group.gather.flatten()).view(*group.gather.shape, -1)
            probabilities = _scores(queries, states, mask, size).softmax(-1)[:, :, None]
            if self.dropout is None:
                probabilities = dropout(probabilities, p)
            else:
                probabilities = self.dropout.drop_attention(probabilities, group, p, site)
            means.append(probabilities.squeeze(2) @ states)
            sums.append(probabilities.sum(-1))
        context_NBd = torch.cat(means).transpose(0, 1) @ value_NdH.transpose(1, 2)
        context_BH, bias = context_NBd.transpose(0, 1).flatten(1), value[1]
        return context_BH if bias is None else context_BH + (torch.cat(sums) * bias.view(-1, size)).flatten(1)

    def _masks(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        """Return the mask of each group to add to its scores, made once for all layers.

        It is 0 for the keys that a query attends to, and minus infinity for the others: (n, L, L), or (n, 1, L) if all
        queries attend to the same keys. A padded query, whose output is not used, attends to all real keys, because a
        row without any key gives NaN.
        """
        if (window, dtype) in self.masks:
            return self.masks[window, dtype]
        masks = self.masks[window, dtype] = []
        for group in self.groups:
            key_mask, length = group.is_token[:, None], group.is_token.shape[1]
            if window is not None and length > window + 1:
                positions = torch.arange(length, device=key_mask.device)
                in_window = (positions[:, None] - positions).abs() <= window
                key_mask = key_mask & (in_window | ~group.is_token[:, :, None])
            masks.append(torch.zeros_like(key_mask, dtype=dtype).masked_fill_(~key_mask, -torch.inf))
        return masks


def _scores(queries: Tensor, keys: Tensor, mask: Tensor, size: int) -> Tensor:
    """Return masked attention scores (n * heads, L, L) from queries and keys (n * heads, L, d).

    With one query per head (n, heads, H) and states (n, L, H), the scores are (n, heads, L). ``size`` is d, the number
    of features of a head. The mask is added, which is faster on a CPU than filling.
    """
    if (num_heads := len(keys) // len(mask)) > 1:
        mask = mask.repeat_interleave(num_heads, 0)
    return torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=size**-0.5)


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
        return cls(batch.bounds.int(), max(group.is_token.shape[1] for group in batch.groups))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, p: float, window: int | None = None) -> Tensor:
        """Return the contexts of all tokens (T, H), or of one query of each sequence (B, H).

        Args:
            queries: (T, N, d), or (B, N, d).
            keys, values: (T, N, d).
        """
        bounds, longest = self.bounds, self.longest
        if len(queries) < len(keys):
            bounds, longest = torch.arange(len(bounds), dtype=torch.int32, device=bounds.device), 1
        context, *_ = torch.ops.aten._flash_attention_forward(  # private: public ones lack dropout
            *(queries, keys, values, bounds, self.bounds, longest, self.longest, p, False, False),
            window_size_left=window,
            window_size_right=window,
        )
        return context.flatten(1)


@cache
def _has_kernels(device: torch.device) -> bool:
    """Try attention with dropout, gradients and a window, since builds of torch differ in their kernels."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    # The bounds are made there: a copy would make the host wait.
    attention = RaggedAttention(2 * torch.arange(2, dtype=torch.int32, device=device), 2)
    try:
        with torch.random.fork_rng([device]), torch.inference_mode(False), torch.enable_grad():
            for window in (None, 1):
                token = torch.zeros(2, 1, 8, dtype=torch.bfloat16, device=device, requires_grad=True)
                attention.attend(token, token, token, 0.1, window).sum().backward()
    except (AttributeError, RuntimeError):
        return False
    return True
