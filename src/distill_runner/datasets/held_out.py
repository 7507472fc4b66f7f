"""A part of the training examples that is kept from training, to choose by."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from distill_runner.datasets.batches import Batch
from distill_runner.datasets.split import Split

ORDER_SEED, STRATA = 0, 10
"""Which examples are held out depends on the data alone, so that all runs choose by the same ones."""


def held_out_rows(labels: np.ndarray, share: float) -> np.ndarray:
    """Numbers, rising, of a share of the examples, one of each stratum at least.

    Strata are the classes; of scores, ten ranges with equally many examples.

    Args:
        labels: (N,), class indices or scores; of any other shape there is one stratum.
    """
    rng = np.random.default_rng(ORDER_SEED)
    if np.issubdtype(labels.dtype, np.integer) and labels.ndim == 1:
        groups = [np.flatnonzero(labels == one) for one in np.unique(labels)]
    elif labels.ndim == 1:
        groups = [part for part in np.array_split(np.argsort(labels, kind="stable"), STRATA) if len(part)]
    else:
        groups = [np.arange(len(labels))]
    return np.sort(np.concatenate([rng.permutation(group)[: max(1, round(share * len(group)))] for group in groups]))


class HeldOut:
    """Some examples of a split, as a split of their own to evaluate on.

    Args:
        chosen: their numbers, rising.
    """

    def __init__(self, split: Split, chosen: np.ndarray) -> None:
        self.split, self.chosen = split, chosen
        self.labels: Any = np.asarray(split.labels)[chosen]

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def num_outputs(self) -> int:
        return len(self)

    @property
    def lengths(self) -> np.ndarray:
        lengths: np.ndarray = self.split.lengths[self.chosen]
        return lengths

    @property
    def token_ids(self) -> np.ndarray | None:
        return self.split.token_ids

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = None) -> Batch:
        batch = self.split.batch(self.chosen[np.asarray(index)], length_multiple)
        return replace(batch, index=torch.from_numpy(np.searchsorted(self.chosen, batch.index.numpy())))
