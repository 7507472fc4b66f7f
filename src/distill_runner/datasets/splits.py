"""Splits: numbered examples from which batches are made. Those of images are in ``image_splits``."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill_runner.common.errors import UserError
from distill_runner.datasets.batches import LENGTH_MULTIPLE, Batch, length_groups, rounded_up
from distill_runner.datasets.tokenization import Examples, array_files, array_in, uses_segment_ids

HOLD_OUT_SEED, SCORE_RANGES = 0, 10
"""Constants, so that the held-out set depends on the data alone and all runs select on the same examples."""
WEIGHTS = "weights"
TOKENS_PER_COUNT = 2**24
"""Tokens that are counted at once: counting takes 8 bytes for each."""
EXAMPLES_PER_CALL = 2000
"""Examples per tokenizer call: the lists of a tokenizer take a hundred times the memory of the saved arrays."""


class Split(ABC):
    """Examples of one split, from which batches are made; independent of the task type.

    A subclass defines ``__len__``, ``lengths`` and ``batch``. The other members fit examples that look the same in each
    epoch and have one output each.
    """

    labels: Any = None
    """Labels of the examples, one row for each example; None if the split has no labels."""
    example_weights: Any = None
    """Weights of the examples (N,) in losses, as the data have them; None if all count the same."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def num_examples(self) -> int:
        """Number of rows of the data that the examples were made from."""
        return len(self)

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the head for all examples: one per example, or one per token."""
        return len(self)

    @property
    @abstractmethod
    def lengths(self) -> np.ndarray:
        """Cost of each example, in tokens."""

    @property
    def token_ids(self) -> np.ndarray | None:
        """Sorted token ids (U,) that occur in the examples; None if every token id may occur."""
        return None

    @abstractmethod
    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = LENGTH_MULTIPLE) -> Batch:
        """Return the examples with the numbers ``index``; the batch may have another order.

        Args:
            length_multiple: see ``length_groups``.
        """

    def training_batch(self, index: np.ndarray, seed: int, epoch: int, length_multiple: int | None) -> Batch:
        """Return the examples ``index`` as training with ``seed`` uses them in ``epoch``, counted from 0."""
        return self.batch(index, length_multiple)

    def teacher_numbers(self, index: np.ndarray) -> np.ndarray:
        """Return the numbers of the examples ``index`` in ``teacher_inputs``, if every view of them counts once."""
        return index

    def teacher_batch(self, batch: Batch, multiple: int, length_multiple: int | None) -> Batch:
        """Return a live teacher's batch: the examples of ``batch``, some repeated up to a multiple of ``multiple``."""
        index = batch.index.numpy()
        return self.batch(np.resize(index, rounded_up(len(index), multiple)), length_multiple)

    @property
    def teacher_inputs(self) -> "Split":
        """Split of all inputs that a teacher reads in training; its outputs for them can be cached.

        It exists only if these inputs are finitely many (``Task.is_endless``).
        """
        return self


class TokenSplit(Split):
    """Tokenized examples of one split, memory-mapped from a folder that ``write`` made.

    Without the file ``segments.npy``, all segment ids are 0.
    """

    def __init__(self, folder: Path) -> None:
        self.ids, self.offsets = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("ids", "offsets"))
        self.segments, self.labels = array_in(folder, "segments"), array_in(folder, "labels")
        self.example_weights = array_in(folder, WEIGHTS)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each example."""
        lengths: np.ndarray = np.diff(self.offsets)
        return lengths

    @property
    def token_ids(self) -> np.ndarray:
        starts = range(0, len(self.ids), TOKENS_PER_COUNT)
        parts = [np.flatnonzero(np.bincount(self.ids[start : start + TOKENS_PER_COUNT])) for start in starts]
        return np.unique(np.concatenate(parts))

    @staticmethod
    def write(folder: Path, examples: Examples, tokenizer: Any, max_length: int) -> int:
        """Tokenize ``examples`` and save them in ``folder``.

        Inputs above ``max_length`` tokens lose tokens from the longer text first, as in BERT's own recipe.

        Returns:
            The number of examples that lost tokens.
        """
        cut = 0
        options = {"truncation": True, "max_length": max_length, "return_attention_mask": False}
        with array_files(folder, {"ids": np.int32, "segments": np.int8, "offsets": np.int64}) as files:
            ids, segments, offsets = files.values()
            offsets.append([0])
            for first in range(0, len(examples), EXAMPLES_PER_CALL):
                columns = [texts[first : first + EXAMPLES_PER_CALL] for texts in examples.texts]
                encoded = tokenizer(*columns, return_token_type_ids=True, **options)
                if [] in encoded["input_ids"]:  # decoders have no special tokens that an empty text would get
                    row = first + encoded["input_ids"].index([])
                    problem = f"row {row} is an empty text, of which the tokenizer makes no tokens"
                    raise UserError("task.columns", None, problem, "Remove such rows, or take another model.")
                if full := [row for row, tokens in enumerate(encoded["input_ids"]) if len(tokens) >= max_length]:
                    ids_only = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
                    uncut = tokenizer(*([texts[row] for row in full] for texts in columns), **ids_only)["input_ids"]
                    cut += sum(len(tokens) > max_length for tokens in uncut)
                offsets.append(ids.size + np.cumsum([len(example) for example in encoded["input_ids"]]))
                ids.append(np.concatenate(encoded["input_ids"]))
                segments.append(np.concatenate(encoded["token_type_ids"]) * uses_segment_ids(tokenizer))
        if examples.labels is not None:
            np.save(folder / "labels.npy", examples.labels)
        if examples.weights is not None:
            np.save(folder / WEIGHTS, examples.weights)
        return cut

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = LENGTH_MULTIPLE) -> Batch:
        """Pack the examples with the numbers ``index``, shortest first; without ``length_multiple`` into one group."""
        index = np.asarray(index, dtype=np.int64)
        lengths = self.offsets[index + 1] - self.offsets[index]
        order = np.argsort(lengths, kind="stable")
        index, lengths = index[order], lengths[order]
        starts = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        source = np.repeat(self.offsets[index], lengths) + positions
        return Batch(
            input_ids=torch.from_numpy(self.ids[source].astype(np.int64)),
            segments=torch.from_numpy(
                np.zeros(len(source), np.int64) if self.segments is None else self.segments[source].astype(np.int64)
            ),
            positions=torch.from_numpy(positions),
            starts=torch.from_numpy(starts),
            index=torch.from_numpy(index),
            groups=tuple(length_groups(lengths, starts, length_multiple)),
            labels=None if self.labels is None else torch.from_numpy(np.asarray(self.labels[index])),
        )


class CorpusSplit(TokenSplit):
    """Examples without labels; for pairs, ``is_next`` (N,) are the labels of next sentence prediction (0: follows)."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_next, self.labels = self.labels, None

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = LENGTH_MULTIPLE) -> Batch:
        batch = super().batch(index, length_multiple)
        if self.is_next is None:
            return batch
        return replace(batch, is_next=torch.from_numpy(np.asarray(self.is_next[batch.index.numpy()])))


class HeldOutSplit(Split):
    """Training examples that are not trained on, as a separate split that selects the best epoch.

    Args:
        split: the split that contains the examples.
        numbers: sorted numbers of the examples in ``split``.
    """

    def __init__(self, split: Split, numbers: np.ndarray) -> None:
        self.split, self.numbers = split, numbers
        self.labels = np.asarray(split.labels)[numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def lengths(self) -> np.ndarray:
        lengths: np.ndarray = self.split.lengths[self.numbers]
        return lengths

    @property
    def token_ids(self) -> np.ndarray | None:
        return self.split.token_ids

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = LENGTH_MULTIPLE) -> Batch:
        batch = self.split.batch(self.numbers[np.asarray(index)], length_multiple)
        return replace(batch, index=torch.from_numpy(np.searchsorted(self.numbers, batch.index.numpy())))


def held_out_examples(labels: np.ndarray, share: float) -> np.ndarray:
    """Return the sorted numbers of the held-out examples: at least one from each stratum, but never all of a stratum.

    The strata are the classes, or ten ranges of the score with equally many examples. Nothing is held out from a
    stratum of one example, unless all strata are so small: they then form one stratum.

    Args:
        labels: (N,), class indices or scores; labels of any other shape form one stratum.
        share: share of each stratum that is held out.
    """
    rng = np.random.default_rng(HOLD_OUT_SEED)
    if np.issubdtype(labels.dtype, np.integer) and labels.ndim == 1:
        strata = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    elif labels.ndim == 1:
        strata = [part for part in np.array_split(np.argsort(labels, kind="stable"), SCORE_RANGES) if len(part)]
    else:
        strata = [np.arange(len(labels))]
    if max(map(len, strata)) == 1:
        strata = [np.arange(len(labels))]
    counts = [min(max(1, round(share * len(stratum))), len(stratum) - 1) for stratum in strata]
    rows = [rng.permutation(stratum)[:count] for stratum, count in zip(strata, counts, strict=True)]
    return np.sort(np.concatenate(rows))
