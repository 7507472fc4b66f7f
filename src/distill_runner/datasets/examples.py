"""The examples of one split, as they are read."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Examples:
    """The examples of one split.

    Attributes:
        texts: one list of strings per text column (one or two), all of equal length N.
        labels: shape (N,); int64 indices into ``Task.labels`` for classification, float32 scores for
            regression, ``None`` where the split has no labels; float32 (N, C) of 0 and 1 for multi-label tasks.
    """

    texts: list[list[str]]
    labels: np.ndarray | None

    def __len__(self) -> int:
        return len(self.texts[0])
