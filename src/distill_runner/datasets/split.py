"""Common interface of the splits of all kinds of tasks: texts, images and questions."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from distill_runner.datasets.batches import Batch


class Split(Protocol):
    """Examples of one split, which batches are made of; independent of the kind of task."""

    labels: Any
    """Labels of the examples, one row for each example; None if the split has no labels."""

    def __len__(self) -> int: ...

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the head for all examples: one per example, or one per token."""

    @property
    def lengths(self) -> np.ndarray:
        """Cost of each example, in tokens."""

    @property
    def token_ids(self) -> np.ndarray | None:
        """Sorted token ids (U,) that occur in the examples; None if every token id may occur."""

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = ...) -> Batch:
        """Return the examples with the numbers ``index``; the batch may have another order."""

    def training_batch(self, index: np.ndarray, seed: int, epoch: int, length_multiple: int | None) -> Batch:
        """Return the examples ``index`` as training with ``seed`` uses them in ``epoch``, counted from 0."""

    def teacher_batch(self, batch: Batch, multiple: int, length_multiple: int | None) -> Batch:
        """Return a live teacher's batch: the examples of ``batch``, some repeated up to a multiple of ``multiple``."""

    @property
    def taught(self) -> "Split":
        """Split of all inputs that a teacher reads in training; its outputs for them can be cached.

        It exists only if these inputs are finitely many (``Task.is_endless``).
        """
