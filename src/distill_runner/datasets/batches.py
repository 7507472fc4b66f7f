"""Tokenise once, then padding-free batches with a stable example index.

A batch is one row of tokens: its sequences lie end to end, shortest first, and every layer but the attention works
on them as they are. For the attention the sequences are taken in groups of equal length after rounding up to a
multiple of ``LENGTH_MULTIPLE``; a sequence's padded length then depends on nothing but the sequence, so that what a
model computes for an example is the same, bit for bit, whatever other examples share its batch (on CPU, with a multiple
of 16 of them: ``teachers`` sees to that).
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
"""Are tokenised: a tokenizer's lists take a hundred times the memory of what is kept of them."""
PADDING = 0
"""Token id under the padding of ``Batch.padded``; no attention sees it."""

Unit = Literal["example", "output", "token"]
"""What a loss is a mean over: examples, outputs of the head (several an example, if it is token-wise), or tokens."""


@dataclass(frozen=True)
class LengthGroup:
    """Consecutive sequences of a pack that are attended together, each padded to the same length L.

    ``sequences`` and ``tokens`` are the group's ranges in the batch and in the pack; ``gather`` (n, L) indexes the
    group's tokens, padding pointing at some real token, ``real`` (n, L) is True where there is a token, and
    ``tokens_padded`` are the places of the tokens among these n * L.
    """

    sequences: slice
    tokens: slice
    gather: Tensor
    real: Tensor
    tokens_padded: Tensor


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens in all, packed.

    ``input_ids``, ``segments`` and ``positions`` are (T,); ``starts`` (B,) are the rows of the first tokens ([CLS]);
    ``index`` (B,), always on the host, is the example's number in its split; ``rows`` are the tokens that a token-wise
    head reads, None for a head on [CLS]; ``labels`` belong to what the head reads; ``is_next`` (B,) are those of next
    sentence prediction. ``noise`` is the seed of the update's dropout.
    ``weights`` is what its means over each unit weigh in those of its update (``data.weighed``).
    ``output_rows``, on the host, are the places of the head's outputs among those of the split, where they are not the
    examples' own numbers.
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
        """Of the head."""
        return self.size if self.rows is None else len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def sequence_lengths(self) -> Tensor:
        """Tokens of each sequence (B,)."""
        return torch.diff(self.starts, append=self.starts.new_full((1,), self.num_tokens))

    @property
    def places(self) -> np.ndarray:
        """Of the head's outputs among all outputs of the split."""
        places: np.ndarray = (self.index if self.output_rows is None else self.output_rows).numpy()
        return places

    def rounded(self) -> "Batch":
        """With tokens of no sequence behind the others, so that batches have few different numbers of tokens.

        Up to the next multiple of 16, or, of more than 1,024 tokens, 3 % more at most.
        """
        size = len(self.input_ids)
        step = max(16, 2 ** (size.bit_length() - 6))
        ids, segments, positions = (
            torch.nn.functional.pad(part, (0, -size % step)) for part in (self.input_ids, self.segments, self.positions)
        )
        return replace(self, input_ids=ids, segments=segments, positions=positions)

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """``input_ids``, ``segments`` and ``attention_mask``, each (B, L), for backbones that need padding."""
        lengths = self.sequence_lengths
        # On a GPU, which all would wait for, the one group is as long as its longest sequence.
        longest = int(lengths.max()) if lengths.is_cpu else self.groups[-1].gather.shape[1]
        columns = torch.arange(longest, device=lengths.device)
        real = columns < lengths[:, None]
        gather = self.starts[:, None] + torch.minimum(columns, lengths[:, None] - 1)
        return self.input_ids[gather] * real, self.segments[gather] * real, real.long()

    def unpadded(self, states: Tensor) -> Tensor:
        """The tokens (T, ...) of what was computed padded, (B, L, ...)."""
        sequences = torch.arange(self.size, device=states.device)
        first = (sequences * states.shape[1]).repeat_interleave(self.sequence_lengths, output_size=self.num_tokens)
        return states.flatten(0, 1)[first + self.positions]


class Tokens:
    """The tokenised examples of one split, memory-mapped from a folder that ``write`` made."""

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
        """Of the examples, in tokens."""
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
        """Tokenise and save. Long inputs lose tokens from the longer text first, as in BERT's own recipe."""
        # A tokenizer that is saved with a model is used as it is: segments that it does not give are not trained on.
        has_segments = "token_type_ids" in getattr(tokenizer, "model_input_names", ("token_type_ids",))
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
                segments.append(of_texts if has_segments else np.zeros_like(of_texts))
        if examples.labels is not None:
            np.save(folder / "labels.npy", examples.labels)

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = LENGTH_MULTIPLE) -> Batch:
        """Pack the examples of these numbers, shortest first; without ``length_multiple`` all are in one group."""
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


def _groups(lengths: np.ndarray, starts: np.ndarray, length_multiple: int | None) -> Iterator[LengthGroup]:
    """Cut sequences, sorted by length, where the rounded length changes."""
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
