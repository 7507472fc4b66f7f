"""``aten::_flash_attention_forward`` and its backward for packed sequences, one after the other, by the formulas."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def forward(*args: Any, window_size_left: int | None = None, window_size_right: int | None = None) -> tuple[Any, ...]:
    """As strict as the kernel about types, strides and the bounds of sequences; the third output is the seed."""
    q, k, v, bounds, ends, longest, too, p, causal, debug = args
    assert bounds.dtype == ends.dtype == torch.int32
    for marks, rows, most in ((bounds, q, longest), (ends, k, too)):
        assert (int(marks[0]), int(marks[-1])) == (0, len(rows))
        assert 0 < marks.diff().min() <= marks.diff().max() <= most
    assert bounds.equal(ends) or window_size_left is None
    assert q.shape[-1] % 8 == 0
    assert {one.stride(-1) for one in (q, k, v)} == {1}
    assert (causal, debug, window_size_left) == (False, False, window_size_right)
    seed = torch.randint(2**31, (2,)).to(torch.uint64)
    contexts = [
        torch.einsum("nqk,knd->qnd", weights * kept, v[there].to(weights.dtype))
        for _here, there, weights, kept in _weights(q, k, bounds, ends, p, seed, window_size_left)
    ]
    unread = q.new_zeros(q.shape[1], len(q)).float()
    return torch.cat(contexts).to(q.dtype), unread, seed, seed[0].clone(), q.new_zeros(0)


def backward(gradient: Tensor, *args: Any, window_size_left: int | None = None, **_: Any) -> tuple[Tensor, ...]:
    """The gradients of `forward` with the same dropout and window, by the formulas."""
    q, k, v, _out, _lse, bounds, ends, _longest, _too, p, _causal, seed, _unused = args
    parts = []
    for here, there, weights, kept in _weights(q, k, bounds, ends, p, seed, window_size_left):
        d_context, queries = (one[here].to(weights.dtype) for one in (gradient, q))
        keys, values = (one[there].to(weights.dtype) for one in (k, v))
        d_weights = torch.einsum("qnd,knd->nqk", d_context, values) * kept
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        parts.append(
            (
                torch.einsum("nqk,knd->qnd", d_scores, keys),
                torch.einsum("nqk,qnd->knd", d_scores, queries),
                torch.einsum("nqk,qnd->knd", weights * kept, d_context),
            )
        )
    return tuple(torch.cat(side).to(q.dtype) for side in zip(*parts, strict=True))


def _weights(
    q: Tensor, k: Tensor, bounds: Tensor, ends: Tensor, p: float, seed: Tensor, window: int | None
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Of each sequence: its queries, its keys, its probabilities (heads, queries, keys) in float32 at least, and the
    factors of its dropout."""
    random, dtype = torch.Generator().manual_seed(int(seed[0])), torch.promote_types(q.dtype, torch.float32)
    for own, other in zip(pairwise(bounds.tolist()), pairwise(ends.tolist()), strict=True):
        here, there = slice(*own), slice(*other)
        places = torch.arange(other[1] - other[0])
        near = (places[: own[1] - own[0], None] - places).abs() <= (len(places) if window is None else window)
        scores = torch.einsum("qnd,knd->nqk", q[here].to(dtype), k[there].to(dtype)) * q.shape[-1] ** -0.5
        weights = scores.where(near, -torch.inf).softmax(-1)
        yield here, there, weights, (torch.rand(weights.shape, generator=random) >= p) / weights.new_tensor(1 - p)
