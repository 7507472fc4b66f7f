"""Batches of tokenized examples without padding, with a stable number for each example.

A batch is one row of tokens: its sequences are concatenated, shortest first. All layers except attention process this
row without padding.

For attention, the length of each sequence is rounded up to a multiple of ``LENGTH_MULTIPLE``. Sequences of equal
rounded length form a group. The padded length of a sequence therefore depends on that sequence alone. A model then
computes the same values for an example, bit for bit, whatever other examples are in its batch. This holds on a CPU for
batches of a multiple of 16 examples, which ``training.teachers`` ensures.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

LENGTH_MULTIPLE = 16
PADDING = 0
"""Token id of the padding in ``Batch.to_padded``; attention masks it out."""

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


def length_groups(
    lengths: np.ndarray, starts: np.ndarray, length_multiple: int | None, longest: int | None = None
) -> Iterator[LengthGroup]:
    """Divide sequences, sorted by length, into groups of equal rounded length.

    Args:
        starts: position of the first token of each sequence.
        length_multiple: lengths are rounded up to a multiple of this number; None puts all sequences into one group.
        longest: padded length of that one group; None takes the longest sequence.
    """
    padded_lengths = (
        np.full_like(lengths, longest or lengths.max())
        if length_multiple is None
        else -(-lengths // length_multiple) * length_multiple
    )
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
    output_rows: Tensor | None
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
        """Row of each output of the batch among all outputs of the split."""
        rows: np.ndarray = (self.index if self.output_rows is None else self.output_rows).numpy()
        return rows


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
        rows: (R, k), positions of the k texts of each row of the data, where a row has several texts that are examples
            of their own; ``labels`` are then those of the rows.
        dropout_seed: seed of the update's dropout masks; None uses torch's own generator.
        output_rows: row of each output of the head among all outputs of the split; on the host. None if the row is
            the number of the example.
        weights: for each unit, the weight of this batch's mean in the mean over the update.
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
    rows: Tensor | None = None
    dropout_seed: int | None = None
    output_rows: Tensor | None = None
    weights: Mapping[Unit, float | Tensor] = field(default_factory=dict)
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
    def sequence_lengths(self) -> Tensor:
        """Number of tokens of each sequence, (B,)."""
        return torch.diff(self.starts, append=self.starts.new_full((1,), self.num_tokens))

    def means(self, states_TH: Tensor) -> Tensor:
        """Return the mean of the states of each sequence's tokens, (B, H)."""
        lengths_B, sequences = self.sequence_lengths, torch.arange(self.size, device=states_TH.device)
        sequence_T = sequences.repeat_interleave(lengths_B, output_size=self.num_tokens)
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


def packed_texts(texts: Sequence[Sequence[int]]) -> Batch:
    """Return a batch of texts without labels, from the token ids of each; they are sorted by length."""
    lengths = np.array([len(tokens) for tokens in texts])
    starts = np.cumsum(lengths) - lengths
    return Batch(
        input_ids=torch.tensor([token for tokens in texts for token in tokens]),
        segments=torch.zeros(int(lengths.sum()), dtype=torch.long),
        positions=torch.cat([torch.arange(length) for length in lengths.tolist()]),
        starts=torch.from_numpy(starts),
        index=torch.arange(len(texts)),
        groups=tuple(length_groups(lengths, starts, None)),
    )
