"""What every split of examples offers, of texts, pictures or questions: batches of them by their numbers."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from distill_runner.datasets.batches import Batch


class Split(Protocol):
    """The examples of one split, ready for batches, whatever they are made of."""

    labels: Any
    """What the examples are judged by, one row for each; None without labels."""

    def __len__(self) -> int: ...

    @property
    def num_outputs(self) -> int:
        """Outputs of a head for all examples: one each, or one for each token."""

    @property
    def lengths(self) -> np.ndarray:
        """What each example costs, in tokens."""

    @property
    def token_ids(self) -> np.ndarray | None:
        """The token ids (U,), sorted, that occur; None if any may."""

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = ...) -> Batch:
        """The examples of these numbers, in an order of the batch's own."""

    def training_batch(self, index: np.ndarray, seed: int, epoch: int, length_multiple: int | None) -> Batch:
        """The same as an epoch of training sees them, counted from 0, under this seed."""

    def teacher_batch(self, batch: Batch, multiple: int, length_multiple: int | None) -> Batch:
        """What a live teacher runs on for ``batch``: the same examples, some repeated to fill ``multiple``."""

    @property
    def taught(self) -> "Split":
        """All that a teacher is asked about in training, of what has an end, so that its outputs can be cached."""
