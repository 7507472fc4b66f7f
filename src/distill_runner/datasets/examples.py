"""Examples of one split as read from the data, before tokenisation."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Examples:
    """Texts and labels of one split.

    Attributes:
        texts: one list of N strings for each text column (one or two).
        labels: (N,) int64 indices into ``Task.labels`` for classification, or (N,) float32 scores for regression;
            (N, C) float32 of 0 and 1 for multi-label tasks; ``None`` if the split has no labels.
    """

    texts: list[list[str]]
    labels: np.ndarray | None

    def __len__(self) -> int:
        return len(self.texts[0])
