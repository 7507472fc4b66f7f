"""Random numbers that belong to examples, and dropout whose masks are made of them.

A mask is a function of the update, the example, the token's position, the place in the model and the feature, and of
nothing else: alone or beside others, whole or in parts, in one process or in several, an example meets the same zeros
(in families that run packed, on a CPU). The numbers come from a counter-based generator (SplitMix64's finaliser, Steele
et al. 2014), four 16-bit ones from each 64-bit hash, which on a CPU takes a third of the time of ``bernoulli_``.
"""

import torch
from torch import Tensor

from distill_runner.datasets.batches import Batch, LengthGroup

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""Step of SplitMix64's counter: keys that are told apart by a number get that many of it before ``split_mix``."""
_PER_SITE = 2**20
"""Hashes that a token may take at one place of the model: more than heads times keys, or features, over four."""
_PER_HEAD = 2**10
"""Hashes of a head, four keys each, so that its numbers do not depend on how far the keys are padded."""
_BEYOND = 2**40
"""Where the hashes of a head's next 4,096 keys begin: behind those of all heads and places."""


def split_mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele et al. 2014) on int64, in place: a random number of its own for each number.

    Shifts of int64 bring in the sign, which has to go.
    """
    high = torch.empty_like(z)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, None)):
        z ^= torch.bitwise_right_shift(z, shift, out=high).bitwise_and_(2 ** (64 - shift) - 1)
        if factor is not None:
            z *= factor
    return z


class DropoutMasks:
    """The dropout of one batch. Its ``seed`` is that of the update; probabilities are rounded to 1/65536."""

    def __init__(self, seed: int, batch: Batch) -> None:
        lengths = torch.diff(batch.starts, append=batch.starts.new_tensor([len(batch.positions)]))
        examples = split_mix(batch.index * GOLDEN + seed)
        self.tokens = split_mix(examples.repeat_interleave(lengths) + batch.positions * GOLDEN)
        self.starts = batch.starts

    @classmethod
    def of(cls, batch: Batch) -> "DropoutMasks | None":
        """None where torch's own dropout is to be used: on a GPU, whose kernels draw as they go."""
        return cls(batch.noise, batch) if batch.noise is not None and batch.input_ids.is_cpu else None

    def rows(self, x_RH: Tensor, p: float, site: int) -> Tensor:
        """Drop features of all tokens, R = T, or of the first tokens of sequences, R = B."""
        if not p:
            return x_RH
        keys = self.tokens if len(x_RH) == len(self.tokens) else self.tokens[self.starts]
        counters = torch.arange(-(-x_RH.shape[1] // 4), device=keys.device) + site * _PER_SITE
        return x_RH * _kept(keys[:, None], counters, p, x_RH.dtype)[:, : x_RH.shape[1]]

    def attention(self, probabilities: Tensor, group: LengthGroup, p: float, site: int) -> Tensor:
        """Drop attention probabilities (n, heads, Q, L) of a group, of all its queries, Q = L, or of the first ones."""
        if not p:
            return probabilities
        heads, queries, length = probabilities.shape[1:]
        first = self.tokens[self.starts[group.sequences], None]
        keys = first if queries == 1 else self.tokens[group.tokens][group.gather]
        columns = torch.arange(-(-length // 4), device=keys.device)
        columns = columns % _PER_HEAD + columns // _PER_HEAD * _BEYOND
        counters = columns + torch.arange(heads, device=keys.device)[:, None, None] * _PER_HEAD + site * _PER_SITE
        kept = _kept(keys[:, None, :, None], counters, p, probabilities.dtype)
        return probabilities * kept[..., :length]


def _kept(keys: Tensor, counters: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """0 with probability ``p`` and 1 / (1 - p) otherwise, four numbers for each key and counter."""
    dropped = round(p * 2**16)
    draws = split_mix(keys + counters * GOLDEN).view(torch.int16)
    # In place the comparison is of one type and vectorised; by way of bool it takes ten times as long.
    return draws.ge_(dropped - 2**15).to(dtype).mul_(2**16 / (2**16 - dropped))
