"""Tokenised examples, and padding-free batches of them with a stable example index.

Examples are tokenised once. A batch is one row of tokens: its sequences are concatenated, shortest first. All layers
except the attention process this row without padding.

For the attention, the length of each sequence is rounded up to a multiple of ``LENGTH_MULTIPLE``. Sequences of equal
rounded length form a group. The padded length of a sequence therefore depends on that sequence alone. A model then
computes the same values for an example, bit for bit, whatever other examples are in its batch. This holds on a CPU for
batches of a multiple of 16 examples, which ``training.teachers`` ensures.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from distill_runner.datasets.array_file import ArrayFile

if TYPE_CHECKING:
    from distill_runner.datasets.examples import Examples

LENGTH_MULTIPLE = 16
TEXTS_AT_ONCE = 2000
"""Examples per tokenizer call: the lists of a tokenizer take a hundred times the memory of the saved arrays."""
PADDING = 0
"""Token id of the padding in ``Batch.padded``; the attention masks it out."""

Unit = Literal["example", "output", "token"]
"""Unit that a loss is averaged over: examples, outputs of the head (several per example if token-wise) or tokens."""


@dataclass(frozen=True)
class LengthGroup:
    """n consecutive sequences of a batch that one attention call processes, each padded to the same length L.

    Attributes:
        sequences: range of the group's sequences in the batch.
        tokens: range of the group's tokens in the batch.
        gather: (n, L), index of each token within ``tokens``; padding points at the last token of its sequence.
        real: (n, L), True for tokens and False for padding.
        tokens_padded: positions of the tokens among the n * L padded positions.
    """

    sequences: slice
    tokens: slice
    gather: Tensor
    real: Tensor
    tokens_padded: Tensor


@dataclass(frozen=True)
class Batch:
    """B sequences with T tokens in total, concatenated without padding.

    Attributes:
        input_ids, segments, positions: (T,), token ids, segment ids and positions within the sequence.
        starts: (B,), position of the first token ([CLS]) of each sequence.
        index: (B,), number of each example in its split; always on the host.
        groups: the sequences by padded length, for the attention.
        labels: targets of the head's outputs.
        rows: positions of the tokens that a token-wise head reads; None for a head on [CLS].
        is_next: (B,), labels of next sentence prediction.
        noise: dropout seed of the update.
        output_rows: row of each output of the head among all outputs of the split; on the host. None if the row is
            the number of the example.
        weights: for each unit, the weight of this batch's mean in the mean over the update (``training.data.weighed``).
    """

    input_ids: Tensor
    segments: Tensor
    positions: Tensor
    starts: Tensor
    index: Tensor
    groups: tuple[LengthGroup, ...]
    labels: Tensor | None = None
    rows: Tensor | None = None
    is_next: Tensor | None = None
    noise: int | None = None
    output_rows: Tensor | None = None
    weights: Mapping[Unit, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.index)

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the head."""
        return self.size if self.rows is None else len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def sequence_lengths(self) -> Tensor:
        """Number of tokens of each sequence, (B,)."""
        return torch.diff(self.starts, append=self.starts.new_full((1,), self.num_tokens))

    @property
    def places(self) -> np.ndarray:
        """Row of each output of the head among all outputs of the split."""
        places: np.ndarray = (self.index if self.output_rows is None else self.output_rows).numpy()
        return places

    def rounded(self) -> "Batch":
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

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``input_ids``, ``segments`` and ``attention_mask``, each (B, L), for models that need padding."""
        lengths = self.sequence_lengths
        # Reading the maximum from a GPU would make the host wait. There, the only group is padded to this maximum.
        longest = int(lengths.max()) if lengths.is_cpu else self.groups[-1].gather.shape[1]
        columns = torch.arange(longest, device=lengths.device)
        real = columns < lengths[:, None]
        gather = self.starts[:, None] + torch.minimum(columns, lengths[:, None] - 1)
        return self.input_ids[gather] * real, self.segments[gather] * real, real.long()

    def unpadded(self, states: Tensor) -> Tensor:
        """Return the tokens (T, ...) of padded ``states`` (B, L, ...)."""
        sequences = torch.arange(self.size, device=states.device)
        first = (sequences * states.shape[1]).repeat_interleave(self.sequence_lengths, output_size=self.num_tokens)
        return states.flatten(0, 1)[first + self.positions]


class Tokens:
    """Tokenised examples of one split, memory-mapped from a folder that ``write`` made."""

    def __init__(self, folder: Path) -> None:
        def read(name: str) -> Any:
            return np.load(folder / f"{name}.npy", mmap_mode="r")

        self.ids, self.segments, self.offsets = read("ids"), read("segments"), read("offsets")
        self.labels = read("labels") if (folder / "labels.npy").exists() else None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_outputs(self) -> int:
        return len(self)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each example."""
        lengths: np.ndarray = np.diff(self.offsets)
        return lengths

    @property
    def token_ids(self) -> np.ndarray:
        return np.flatnonzero(np.bincount(self.ids))

    def training_batch(self, index: np.ndarray, seed: int, epoch: int, length_multiple: int | None) -> Batch:
        return self.batch(index, length_multiple)

    @property
    def taught(self) -> "Tokens":
        return self

    def teacher_batch(self, batch: Batch, multiple: int, length_multiple: int | None) -> Batch:
        index = batch.index.numpy()
        return self.batch(np.resize(index, -(-len(index) // multiple) * multiple), length_multiple)

    @staticmethod
    def write(folder: Path, examples: "Examples", tokenizer: Any, max_length: int) -> None:
        """Tokenise ``examples`` and save them in ``folder``.

        Inputs above ``max_length`` tokens lose tokens from the longer text first, as in BERT's own recipe.
        """
        how = {"truncation": True, "max_length": max_length, "return_attention_mask": False}
        with (
            ArrayFile(folder / "ids.npy", np.int32) as ids,
            ArrayFile(folder / "segments.npy", np.int8) as segments,
            ArrayFile(folder / "offsets.npy", np.int64) as offsets,
        ):
            offsets.append([0])
            for first in range(0, len(examples), TEXTS_AT_ONCE):
                some = [texts[first : first + TEXTS_AT_ONCE] for texts in examples.texts]
                encoded = tokenizer(*some, return_token_type_ids=True, **how)
                offsets.append(ids.size + np.cumsum([len(one) for one in encoded["input_ids"]]))
                ids.append(np.concatenate(encoded["input_ids"]))
                of_texts = np.concatenate(encoded["token_type_ids"])
                segments.append(of_texts * gives_segments(tokenizer))
        if examples.labels is not None:
            np.save(folder / "labels.npy", examples.labels)

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = LENGTH_MULTIPLE) -> Batch:
        """Pack the examples with the numbers ``index``, shortest first; without ``length_multiple`` into one group."""
        index = np.asarray(index, dtype=np.int64)
        lengths = self.offsets[index + 1] - self.offsets[index]
        order = np.argsort(lengths, kind="stable")
        index, lengths = index[order], lengths[order]
        starts = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        source = np.repeat(self.offsets[index], lengths) + positions
        labels = None if self.labels is None else torch.from_numpy(np.asarray(self.labels[index]))
        return Batch(
            input_ids=torch.from_numpy(self.ids[source].astype(np.int64)),
            segments=torch.from_numpy(self.segments[source].astype(np.int64)),
            positions=torch.from_numpy(positions),
            starts=torch.from_numpy(starts),
            index=torch.from_numpy(index),
            groups=tuple(_groups(lengths, starts, length_multiple)),
            labels=labels,
        )


def gives_segments(tokenizer: Any) -> bool:
    """Whether a tokenizer tells its model two texts apart by segment ids; if not, the model was trained on zeros."""
    return any(tokenizer("a", "a").get("token_type_ids", ()))


def _groups(lengths: np.ndarray, starts: np.ndarray, length_multiple: int | None) -> Iterator[LengthGroup]:
    """Divide sequences, sorted by length, into groups of equal rounded length."""
    padded = (
        np.full_like(lengths, lengths.max())
        if length_multiple is None
        else -(-lengths // length_multiple) * length_multiple
    )
    cuts = [0, *(np.flatnonzero(np.diff(padded)) + 1), len(lengths)]
    for first, last in itertools.pairwise(cuts):
        here, columns = lengths[first:last, None], np.arange(padded[first])
        gather = (starts[first:last] - starts[first])[:, None] + np.minimum(columns, here - 1)
        tokens = slice(int(starts[first]), int(starts[last - 1] + lengths[last - 1]))
        real = columns < here
        indices = (torch.from_numpy(values) for values in (gather, real, np.flatnonzero(real)))
        yield LengthGroup(slice(first, last), tokens, *indices)
