"""Examples as texts, and what is needed to save them as arrays of token ids. This module does not import torch."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from distill_runner.common.errors import UserError


@dataclass(frozen=True)
class Examples:
    """Texts and labels of one split, before tokenization.

    Attributes:
        texts: one list of N strings for each text column (one or two).
        labels: (N,) int64 indices into the task's ``labels`` for classification, or (N,) float32 scores for regression;
            (N, C) float32 of 0 and 1 for multi-label tasks; ``None`` if the split has no labels.
        weights: (N,) float64, weights of the examples in losses; None if all count the same.
    """

    texts: list[list[str]]
    labels: np.ndarray | None
    weights: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.texts[0])

    def first(self, count: int) -> "Examples":
        """Return the first examples, without what belongs to others; a plan tokenizes them to tell lengths."""
        return Examples([texts[:count] for texts in self.texts], None if self.labels is None else self.labels[:count])


class ArrayFile(AbstractContextManager["ArrayFile"]):
    """One-dimensional array that grows on disk, so that it may be larger than memory.

    The file is a valid ``.npy`` file once it is closed.

    Args:
        size: number of values to keep of a file that an interrupted process left.
    """

    def __init__(self, file: Path, dtype: type, size: int = 0) -> None:
        self.stream, self.dtype, self.size = file.open("r+b" if size else "wb"), np.dtype(dtype), size
        self._write_header()
        self.stream.truncate(self.stream.tell() + size * self.dtype.itemsize)
        self.stream.seek(0, os.SEEK_END)

    def append(self, values: Any) -> None:
        array = np.asarray(values, dtype=self.dtype)
        self.stream.write(array.tobytes())
        self.size += len(array)

    def flush(self) -> None:
        """Hand all values to the operating system, which keeps them if this process is killed."""
        self.stream.flush()

    def _write_header(self) -> None:
        """Write the header for the current size.

        numpy pads the header for the largest size, so that a later header fits over an earlier one.
        """
        description = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.size,)}
        np.lib.format.write_array_header_1_0(self.stream, description)

    def __exit__(self, *_exception: object) -> None:
        self.stream.seek(0)
        self._write_header()
        self.stream.close()


@contextmanager
def array_files(folder: Path, dtypes: Mapping[str, Any]) -> Iterator[dict[str, ArrayFile]]:
    """Yield a growing array for each name, in ``<name>.npy``; the files are complete at the end of the context."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(ArrayFile(folder / f"{name}.npy", dtype)) for name, dtype in dtypes.items()}


def array_in(folder: Path, name: str) -> np.ndarray | None:
    """Return the array ``<name>.npy`` of a folder, memory-mapped; None if it has none of the name."""
    file = folder / f"{name}.npy"
    return np.load(file, mmap_mode="r") if file.exists() else None


def save_tokenizer(tokenizer: Any, folder: Path, max_length: int | None) -> None:
    """Save a tokenizer that truncates as its model was trained and evaluated, and does not pad.

    Args:
        max_length: maximum number of tokens of an example; None if the model was trained on plain text.
    """
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        backend.no_padding()
        backend.no_truncation()
        if max_length is not None:
            backend.enable_truncation(max_length, direction=tokenizer.truncation_side)
    tokenizer.model_max_length = max_length or tokenizer.model_max_length
    tokenizer.padding_side = "right"  # padding before a text would shift its positions
    tokenizer.save_pretrained(folder)


def require_offsets(tokenizer: Any) -> None:
    """Raise a UserError if a tokenizer does not give the characters of each token."""
    if not tokenizer.is_fast:
        problem = "its tokenizer does not give the characters of each token"
        raise UserError(".model.tokenizer", None, problem, "Take a model with a fast tokenizer (tokenizer.json).")


def uses_segment_ids(tokenizer: Any) -> bool:
    """Return whether a tokenizer gives the second text of a pair another segment id than the first.

    If not, its model was trained with segment ids of 0 only.
    """
    return any(tokenizer("a", "a").get("token_type_ids", ()))


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens that a tokenizer adds to one text or to a pair of texts.

    Attributes:
        single: ids before and after a single text.
        pair: ids before the first text, between the two texts, and after the second.
        segment_ids: whether the second text has segment id 1; if not, all segment ids are 0.
    """

    single: tuple[list[int], list[int]]
    pair: tuple[list[int], list[int], list[int]]
    segment_ids: bool

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> Self:
        """Return the special tokens of ``tokenizer``.

        Raises:
            UserError: it adds no special token before a text, or none between two texts.
        """

        def special_ids(*texts: str) -> list[list[int]]:
            encoded = tokenizer(*texts, return_special_tokens_mask=True)
            runs: list[list[int]] = [[]]
            for token, is_special in zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True):
                if is_special:
                    runs[-1].append(token)
                elif runs[-1]:
                    runs.append([])
            return runs

        single, pair = special_ids("a"), special_ids("a", "a")
        if (len(single), len(pair)) != (2, 3):
            problem = "adds no special token before a text, or none between two texts"
            remedy = "Use a tokenizer with tokens like [CLS] and [SEP]."
            raise UserError(".model.tokenizer", tokenizer.name_or_path, problem, remedy)
        return cls(tuple(single), tuple(pair), uses_segment_ids(tokenizer))  # type: ignore[arg-type]

    def add_to(self, first: np.ndarray, second: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a text or a pair of texts with special tokens, and its segment ids (0 or 1)."""
        if second is None:
            prefix, suffix = self.single
            ids = np.concatenate([prefix, first, suffix])
            return ids, np.zeros(len(ids), dtype=np.int8)
        prefix, separator, suffix = self.pair
        ids = np.concatenate([prefix, first, separator, second, suffix])
        segments = np.zeros(len(ids), dtype=np.int8)
        segments[-len(second) - len(suffix) :] = self.segment_ids
        return ids, segments

    def max_text_tokens(self, max_length: int, pair: bool) -> int:
        """Return how many tokens of text fit into ``max_length`` tokens next to the special tokens."""
        return max_length - sum(map(len, self.pair if pair else self.single))


def cut_windows(size: int, capacity: int, step: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield the windows of a text of ``size`` tokens: first token, last token + 1, and which tokens are its own.

    A token is owned by the window in which it has most context (run_squad's ``_check_is_max_context``).

    Args:
        capacity: number of tokens of a window; only the last window reaches the end of the text.
        step: tokens between the starts of two windows; at least a quarter of ``capacity``, and at most all of it.
    """
    step = min(max(step, capacity // 4, 1), capacity)
    firsts = np.arange(1 + -(-max(0, size - capacity) // step)) * step
    windows = [(first, min(first + capacity, size)) for first in firsts.tolist()]
    best, owners = np.full(size, -np.inf), np.zeros(size, dtype=np.int64)
    for number, (first, last) in enumerate(windows):
        position = np.arange(last - first)
        score = np.minimum(position, position[::-1]) + 0.01 * (last - first)
        better = score > best[first:last]
        best[first:last][better], owners[first:last][better] = score[better], number
    for number, (first, last) in enumerate(windows):
        yield first, last, owners[first:last] == number
