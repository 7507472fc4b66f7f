"""Dropout masks made of random numbers that depend on the example, not on its batch.

A mask is a function of the update, the example, the token's position, the site in the model and the feature alone. An
example therefore has the same mask in any batch, for any gradient accumulation and any number of processes. This holds
on a CPU, for model families that run packed.

The numbers come from a counter-based generator, SplitMix64's finalizer (Steele et al. 2014). Each 64-bit hash gives
four 16-bit numbers. On a CPU this takes a third of the time of ``bernoulli_``.
"""

import torch
from torch import Tensor

from distill_runner.datasets.batches import Batch, LengthGroup

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""Increment of SplitMix64's counter, as int64; the number n is hashed as ``split_mix(n * GOLDEN + key)``."""
_PER_SITE = 2**20
"""Hashes reserved for a token at one site in the model; more than heads * keys / 4 and features / 4."""
_PER_HEAD = 2**10
"""Hashes reserved for a head, each for four keys, so that its numbers do not depend on the padding of the keys."""
_PER_4096_KEYS = 2**40
"""Offset of the hashes for each further 4,096 keys of a head; larger than the hashes of all heads and sites."""


def split_mix(z: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer (Steele et al. 2014) to int64 ``z`` in place; distinct inputs give distinct outputs.

    A right shift of int64 copies the sign bit, so the bits shifted in are masked out.
    """
    high = torch.empty_like(z)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, None)):
        z ^= torch.bitwise_right_shift(z, shift, out=high).bitwise_and_(2 ** (64 - shift) - 1)
        if factor is not None:
            z *= factor
    return z


class DropoutMasks:
    """Dropout masks of one batch, for the ``seed`` of its update; probabilities are rounded to 1/65536."""

    def __init__(self, seed: int, batch: Batch) -> None:
        lengths = torch.diff(batch.starts, append=batch.starts.new_tensor([len(batch.positions)]))
        examples = split_mix(batch.index * GOLDEN + seed)
        self.tokens = split_mix(examples.repeat_interleave(lengths) + batch.positions * GOLDEN)
        self.starts = batch.starts

    @classmethod
    def for_batch(cls, batch: Batch) -> "DropoutMasks | None":
        """Return the masks of ``batch``, or None if torch's own dropout is used.

        That is the case without ``batch.dropout_seed``, and on a GPU, whose kernels generate the numbers themselves.
        """
        return cls(batch.dropout_seed, batch) if batch.dropout_seed is not None and batch.input_ids.is_cpu else None

    def drop_features(self, x_RH: Tensor, p: float, site: int, rows_R: Tensor | None = None) -> Tensor:
        """Drop features of the first token of each sequence (R = B), or of all tokens, which padding may follow.

        Args:
            rows_R: positions of other tokens, which ``x_RH`` has instead.
        """
        if not p:
            return x_RH
        if rows_R is not None:
            keys = self.tokens[rows_R]
        else:
            keys = self.tokens[self.starts] if len(x_RH) == len(self.starts) else self.tokens[: len(x_RH)]
        counters = torch.arange(-(-x_RH.shape[1] // 4), device=keys.device) + site * _PER_SITE
        return x_RH * _dropout_factors(keys[:, None], counters, p, x_RH.dtype)[:, : x_RH.shape[1]]

    def drop_attention(self, probabilities: Tensor, group: LengthGroup, p: float, site: int) -> Tensor:
        """Drop attention probabilities (n, heads, Q, L) of a group, for all queries (Q = L) or the first (Q = 1)."""
        if not p:
            return probabilities
        heads, queries, length = probabilities.shape[1:]
        first = self.tokens[self.starts[group.sequences], None]
        keys = first if queries == 1 else self.tokens[group.tokens][group.gather]
        columns = torch.arange(-(-length // 4), device=keys.device)
        columns = columns % _PER_HEAD + columns // _PER_HEAD * _PER_4096_KEYS
        counters = columns + torch.arange(heads, device=keys.device)[:, None, None] * _PER_HEAD + site * _PER_SITE
        factors = _dropout_factors(keys[:, None, :, None], counters, p, probabilities.dtype)
        return probabilities * factors[..., :length]


def _dropout_factors(keys: Tensor, counters: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """Return factors that are 0 with probability ``p`` and 1 / (1 - p) otherwise, four for each key and counter."""
    draw = _draw_in_graph if torch.compiler.is_compiling() else _draw_factors
    return draw(keys, counters, round(p * 2**16), dtype)


def _draw_factors(keys: Tensor, counters: Tensor, threshold: int, dtype: torch.dtype) -> Tensor:
    draws = split_mix(keys + counters * GOLDEN).view(torch.int16)
    # In place, the comparison stays int16 and is vectorized; with a bool result it takes ten times as long.
    return draws.ge_(threshold - 2**15).to(dtype).mul_(2**16 / (2**16 - threshold))


_draw_in_graph = torch.library.custom_op("distill_runner::draw_dropout_factors", _draw_factors, mutates_args=())
"""``_draw_factors`` as one operation of a compiled graph, since inductor cannot compile the 64-bit constants."""


@_draw_in_graph.register_fake
def _empty_factors(keys: Tensor, counters: Tensor, threshold: int, dtype: torch.dtype) -> Tensor:
    *rows, columns = torch.broadcast_shapes(keys.shape, counters.shape)
    return keys.new_empty(*rows, 4 * columns, dtype=dtype)
