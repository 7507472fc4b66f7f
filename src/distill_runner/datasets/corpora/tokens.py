"""Tokenised text of a corpus, read from files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from distill_runner.datasets.batches import LENGTH_MULTIPLE, Batch, Tokens


class CorpusTokens(Tokens):
    """Examples without labels; for pairs, ``is_next`` (N,) are the labels of next sentence prediction (0: follows)."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_next, self.labels = self.labels, None

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = LENGTH_MULTIPLE) -> Batch:
        batch = super().batch(index, length_multiple)
        if self.is_next is None:
            return batch
        return replace(batch, is_next=torch.from_numpy(np.asarray(self.is_next[batch.index.numpy()])))
