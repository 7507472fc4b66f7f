"""Held-out set: training examples that are not trained on, but select the best epoch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from distill_runner.datasets.batches import Batch
from distill_runner.datasets.split import Split

ORDER_SEED, STRATA = 0, 10
"""Constants, so that the held-out set depends on the data alone and all runs select on the same examples."""


def held_out_rows(labels: np.ndarray, share: float) -> np.ndarray:
    """Return the sorted numbers of the held-out examples: at least one from each stratum, but never a whole stratum.

    The strata are the classes, or ten ranges of the score with equally many examples. Nothing is held out from a
    stratum of one example, unless all strata are so small: they then form one stratum.

    Args:
        labels: (N,), class indices or scores; labels of any other shape form one stratum.
        share: share of each stratum that is held out.
    """
    rng = np.random.default_rng(ORDER_SEED)
    if np.issubdtype(labels.dtype, np.integer) and labels.ndim == 1:
        groups = [np.flatnonzero(labels == one) for one in np.unique(labels)]
    elif labels.ndim == 1:
        groups = [part for part in np.array_split(np.argsort(labels, kind="stable"), STRATA) if len(part)]
    else:
        groups = [np.arange(len(labels))]
    if max(map(len, groups)) == 1:
        groups = [np.arange(len(labels))]
    counts = [min(max(1, round(share * len(group))), len(group) - 1) for group in groups]
    return np.sort(np.concatenate([rng.permutation(g)[:count] for g, count in zip(groups, counts, strict=True)]))


class HeldOut:
    """Selected examples of a split, as a separate split for evaluation.

    Args:
        split: the split that contains the examples.
        chosen: sorted numbers of the examples in ``split``.
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
