"""Batches of tokenized examples without padding, with a stable number for each example.

A batch is one row of tokens: its sequences are concatenated, shortest first. All layers except attention process this
row without padding.

For attention, the length of each sequence is rounded up to a multiple of ``LENGTH_MULTIPLE``. Sequences of equal
rounded length form a group. The padded length of a sequence therefore depends on that sequence alone. A model then
computes the same values for an example, bit for bit, whatever other examples are in its batch. This holds on a CPU for
batches of a multiple of 16 examples, which ``training.teachers`` ensures.

Dropout masks are a function of the update, the example, the token's position, the site in the model and the feature
alone. An example therefore has the same mask in any batch, for any gradient accumulation and any number of processes.
This holds on a CPU, for model families that run packed. The random numbers come from a counter-based generator,
SplitMix64's finalizer (Steele et al. 2014). Each 64-bit hash gives four 16-bit numbers. On a CPU this takes a third of
the time of ``bernoulli_``.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

LENGTH_MULTIPLE = 16
PADDING = 0
"""Token id of the padding in ``Batch.to_padded``; attention masks it out."""

AnyInteger = TypeVar("AnyInteger", int, np.ndarray)
Unit = Literal["example", "output", "token"]
"""Unit that a loss is averaged over: examples, outputs of the head (several per example if token-wise) or tokens."""


@dataclass(frozen=True)
class LengthGroup:
    """n consecutive sequences of a batch that one attention call processes, each padded to the same length L.

    Attributes:
        sequences: range of the group's sequences in the batch.
        tokens: range of the group's tokens in the batch.
        gather: (n, L), index of each token within ``tokens``; padding points at the last token of its sequence.
        is_token: (n, L), True for tokens and False for padding.
        padded_positions: positions of the tokens among the n * L padded positions.
    """

    sequences: slice
    tokens: slice
    gather: Tensor
    is_token: Tensor
    padded_positions: Tensor


def rounded_up(number: AnyInteger, multiple: int) -> AnyInteger:
    """Return an integer, or an array of them, rounded up to a multiple of ``multiple``."""
    return -(-number // multiple) * multiple


def length_groups(
    lengths: np.ndarray, starts: np.ndarray, length_multiple: int | None, longest: int | None = None
) -> Iterator[LengthGroup]:
    """Divide sequences into groups of neighbors of equal rounded length.

    Args:
        starts: position of the first token of each sequence.
        length_multiple: lengths are rounded up to a multiple of this number; None puts all sequences into one group.
        longest: padded length of that one group; None takes the longest sequence.
    """
    if length_multiple is None:
        padded_lengths = np.full_like(lengths, longest or lengths.max())
    else:
        padded_lengths = rounded_up(lengths, length_multiple)
    cuts = [0, *(np.flatnonzero(np.diff(padded_lengths)) + 1), len(lengths)]
    for first, last in itertools.pairwise(cuts):
        lengths_n1, columns = lengths[first:last, None], np.arange(padded_lengths[first])
        gather = (starts[first:last] - starts[first])[:, None] + np.minimum(columns, lengths_n1 - 1)
        tokens = slice(int(starts[first]), int(starts[last - 1] + lengths[last - 1]))
        is_token = columns < lengths_n1
        indices = (torch.from_numpy(values) for values in (gather, is_token, np.flatnonzero(is_token)))
        yield LengthGroup(slice(first, last), tokens, *indices)


class AnyBatch:
    """What batches of texts and batches of images have in common."""

    index: Tensor
    output_numbers: Tensor | None
    labels: Tensor | None
    example_weights: Tensor | None = None
    weights_of_tokens: Tensor | None = None
    weights_of_outputs: Tensor | None = None

    @property
    def output_weights(self) -> Tensor | None:
        """Weight of each output of the head, (O,): of its example unless outputs have their own; None if all are 1."""
        return self.example_weights if self.weights_of_outputs is None else self.weights_of_outputs

    @property
    def gold(self) -> Tensor:
        """The labels, of a batch that has some."""
        assert self.labels is not None
        return self.labels

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(self.index)

    @property
    def output_index(self) -> np.ndarray:
        """Number of each output of the batch among all outputs of the split."""
        numbers: np.ndarray = (self.index if self.output_numbers is None else self.output_numbers).numpy()
        return numbers


@dataclass(frozen=True)
class Batch(AnyBatch):
    """B sequences with T tokens in total, concatenated without padding.

    Attributes:
        input_ids, segments, positions: (T,), token ids, segment ids and positions within the sequence.
        starts: (B,), position of the first token ([CLS]) of each sequence.
        index: (B,), number of each example in its split; always on the host.
        groups: the sequences by padded length, for attention.
        labels: targets of the head's outputs.
        head_tokens: positions of the tokens that a token-wise head reads; None for a head on [CLS].
        is_next: (B,), labels of next sentence prediction.
        skipped: (B,), number of first tokens of each sequence, those of a prompt, that a pooling may leave out; None if
            there is no prompt.
        texts_of_rows: (R, k), positions of the k texts of each row of the data, where a row has several texts that are
            examples of their own; ``labels`` are then those of the rows.
        dropout_seed: seed of the update's dropout masks; None uses torch's own generator.
        output_numbers: number of each output of the head among all outputs of the split; on the host. None if it is
            the number of the example.
        shares: for each unit, the weight of this batch's mean in the mean over the update.
        example_weights: (B,), weights of the examples in the losses, with a mean of 1 over all
            training examples; None if all are 1.
        weights_of_tokens, weights_of_outputs: (T,) and (O,), the same for tokens and outputs of the head where they are
            not those of their examples: in batches that are filled up.
    """

    input_ids: Tensor
    segments: Tensor
    positions: Tensor
    starts: Tensor
    index: Tensor
    groups: tuple[LengthGroup, ...]
    labels: Tensor | None = None
    head_tokens: Tensor | None = None
    is_next: Tensor | None = None
    skipped: Tensor | None = None
    texts_of_rows: Tensor | None = None
    dropout_seed: int | None = None
    output_numbers: Tensor | None = None
    shares: Mapping[Unit, float | Tensor] = field(default_factory=dict)
    example_weights: Tensor | None = None
    weights_of_tokens: Tensor | None = None
    weights_of_outputs: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the head."""
        return self.size if self.head_tokens is None else len(self.head_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def bounds(self) -> Tensor:
        """Position of the first token of each sequence, followed by T, (B + 1,)."""
        return torch.nn.functional.pad(self.starts, (0, 1), value=self.num_tokens)

    @property
    def sequence_lengths(self) -> Tensor:
        """Number of tokens of each sequence, (B,)."""
        return self.bounds.diff()

    def means(self, states_TH: Tensor, skipped_B: Tensor | None = None) -> Tensor:
        """Return the mean of the states of each sequence's tokens, (B, H), without the first ``skipped_B`` ones."""
        lengths_B, sequences = self.sequence_lengths, torch.arange(self.size, device=states_TH.device)
        sequence_T = sequences.repeat_interleave(lengths_B, output_size=self.num_tokens)
        if skipped_B is not None:
            states_TH = states_TH * (self.positions >= skipped_B[sequence_T])[:, None]
            lengths_B = lengths_B - skipped_B
        sums_BH = states_TH.new_zeros(self.size, states_TH.shape[1]).index_add(0, sequence_T, states_TH)
        return sums_BH / lengths_B[:, None]

    @property
    def token_weights(self) -> Tensor | None:
        """Return the weight of each token, (T,): of its example unless tokens have their own; None if all are 1."""
        if self.weights_of_tokens is not None or self.example_weights is None:
            return self.weights_of_tokens
        return self.example_weights.repeat_interleave(self.sequence_lengths, output_size=self.num_tokens)

    def round_up(self) -> "Batch":
        """Append tokens that belong to no sequence, so that batches have few different numbers of tokens.

        The number is rounded up to a multiple of 16. From 1,024 tokens on, the multiple is larger, which adds about 3 %
        at most.
        """
        size = len(self.input_ids)
        step = max(16, 2 ** (size.bit_length() - 6))
        ids, segments, positions = (
            torch.nn.functional.pad(part, (0, -size % step)) for part in (self.input_ids, self.segments, self.positions)
        )
        return replace(self, input_ids=ids, segments=segments, positions=positions)

    def to_padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``input_ids``, ``segments`` and ``attention_mask``, each (B, L), for models that need padding."""
        lengths = self.sequence_lengths
        # Reading the maximum from a GPU would make the host wait. There, the only group is padded to this maximum.
        longest = int(lengths.max()) if lengths.is_cpu else self.groups[-1].gather.shape[1]
        columns = torch.arange(longest, device=lengths.device)
        is_token = columns < lengths[:, None]
        gather = self.starts[:, None] + torch.minimum(columns, lengths[:, None] - 1)
        return self.input_ids[gather] * is_token, self.segments[gather] * is_token, is_token.long()

    def from_padded(self, states: Tensor) -> Tensor:
        """Return the tokens (T, ...) of padded ``states`` (B, L, ...)."""
        sequences = torch.arange(self.size, device=states.device)
        first = (sequences * states.shape[1]).repeat_interleave(self.sequence_lengths, output_size=self.num_tokens)
        return states.flatten(0, 1)[first + self.positions]


# Dropout

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
    """Dropout masks of one batch, for the ``seed`` of its update; probabilities are rounded to 1/65536.

    They are computed on the CPU; a GPU's kernels generate the numbers themselves.
    """

    def __init__(self, seed: int, batch: Batch) -> None:
        examples = split_mix(batch.index * GOLDEN + seed)
        self.tokens = split_mix(examples.repeat_interleave(batch.sequence_lengths) + batch.positions * GOLDEN)
        self.starts = batch.starts

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
    threshold = round(p * 2**16)
    draws = split_mix(keys + counters * GOLDEN).view(torch.int16)
    # In place, the comparison stays int16 and is vectorized; with a bool result it takes ten times as long.
    return draws.ge_(threshold - 2**15).to(dtype).mul_(2**16 / (2**16 - threshold))
