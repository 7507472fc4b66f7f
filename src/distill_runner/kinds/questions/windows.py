"""Read questions as windows of tokens, memory-mapped from the files that ``cutting`` writes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from distill_runner.datasets.batches import LENGTH_MULTIPLE, Batch, Tokens
from distill_runner.kinds.questions.reading import Question

OUTSIDE = -1
"""Character offset of tokens that are not in the context."""
FILES = {
    "ids": np.int32,
    "segments": np.int8,
    "offsets": np.int64,
    "begins": np.int32,
    "ends": np.int32,
    "may_start": np.bool_,
    "labels": np.int32,
    "windows": np.int64,
    "context_of": np.int64,
}


class Windows(Tokens):
    """The windows of a split, memory-mapped from a folder that ``write_windows`` has written.

    Shapes: W windows with T tokens in total, of Q questions.

    Attributes:
        labels: (W, 2), first and last token of the answer in the window, both 0 ([CLS]) if the answer is not completely
            in the window; None for a split without labels.
        begins, ends: (T,), range of characters of the context that a token covers; ``OUTSIDE`` for other tokens.
        may_start: (T,), whether an answer may begin at the token.
        windows: (Q + 1,), the windows of question ``q`` are ``windows[q]`` to ``windows[q + 1]``, the latter excluded.
        contexts: (Q,), index of the context of each question.
        language: language of the contexts for MLQA's rules of scoring, or None.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begins, self.ends, self.may_start, self.windows = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("begins", "ends", "may_start", "windows")
        )
        if self.labels is not None:
            self.labels = self.labels.reshape(-1, 2)
        self._asked, self._contexts = StoredTexts(folder / "questions"), StoredTexts(folder / "contexts")
        self.contexts = np.load(folder / "context_of.npy", mmap_mode="r")
        self.language: str | None = json.loads((folder / "language.json").read_text())

    @property
    def num_outputs(self) -> int:
        """Number of tokens T, since the head gives one output of two logits for each token."""
        return len(self.ids)

    @property
    def num_questions(self) -> int:
        return len(self.windows) - 1

    def question(self, number: int) -> Question:
        """Read a question and its context from disk."""
        identity, question, context, answers, starts, *_ = json.loads(self._asked[number])  # older files have a title
        return Question(identity, question, self._contexts[context], tuple(answers), tuple(starts))

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = LENGTH_MULTIPLE) -> Batch:
        """Return a batch as ``Tokens.batch`` does, with a head that reads every token and with ``labels`` (B, 2)."""
        batch = super().batch(index, length_multiple)
        labels = None if batch.labels is None else batch.labels.long()
        chosen = batch.index.numpy()
        places = np.repeat(self.offsets[chosen], np.diff(self.offsets)[chosen]) + batch.positions.numpy()
        rows = torch.arange(len(batch.input_ids))
        return replace(batch, rows=rows, labels=labels, output_rows=torch.from_numpy(places))


class StoredTexts:
    """Texts by index, read from memory-mapped files."""

    def __init__(self, file: Path) -> None:
        self.ends = np.load(file.with_suffix(".ends.npy"), mmap_mode="r")
        self.bytes = np.load(file.with_suffix(".bytes.npy"), mmap_mode="r")

    def __getitem__(self, number: int) -> str:
        start = int(self.ends[number - 1]) if number else 0
        return bytes(self.bytes[start : int(self.ends[number])]).decode()
