"""Training and evaluation data of a stage, the updates of an epoch, and the examples of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch

from distill_runner.datasets.batches import PADDING, Batch
from distill_runner.datasets.held_out import HeldOut
from distill_runner.datasets.split import Split
from distill_runner.kinds import Task
from distill_runner.kinds.splits import HELD_OUT
from distill_runner.training.config import Optim
from distill_runner.training.devices import Device
from distill_runner.training.evaluate import predict
from distill_runner.training.processes import ALONE, ProcessGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Evaluation = tuple[dict[str, float], dict[str, np.ndarray]]
"""Metrics by name, and predictions by split. The first metric selects the epoch to keep, and higher is better; without
metrics, the last epoch is kept."""


class Data(Protocol):
    """Training examples of a stage in batches, and its evaluation."""

    @property
    def num_evaluated(self) -> int:
        """Number of examples in one evaluation."""

    @property
    def token_ids(self) -> np.ndarray | None:
        """Sorted ids (U,) of the tokens that occur in any batch; None if any token may occur."""

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each example, (N,)."""

    def __len__(self) -> int: ...

    def batch(self, index: np.ndarray, epoch: int) -> Batch: ...

    def evaluate(self, model: PreTrainedModel) -> Evaluation: ...

    def judge(self, kept: Callable[[], PreTrainedModel]) -> Evaluation:
        """Evaluate the kept model once, after training; the result is empty if ``evaluate`` covers all splits."""


@dataclass(frozen=True)
class Update:
    """The batches of one update that one process computes.

    ``num_examples`` counts the examples of the whole update, over all processes. ``shares`` holds the weight of each
    batch; the weights of all processes sum to 1. ``noise`` is the update's dropout seed, equal in all processes.
    """

    num_examples: int
    batches: list[Batch]
    shares: list[float]
    noise: int


def steps(
    data: Data, optim: Optim, seed: int, epoch: int, first: int = 0, group: ProcessGroup = ALONE
) -> Iterator[Update]:
    """Yield the updates of one epoch, from number ``first`` (counted from 0); processes divide each update's batches.

    An update has ``optim.accumulation`` batches, rounded up to a multiple of the number of processes. An update with
    fewer examples than that, at the end of an epoch, has one batch per example. Processes with one batch less than the
    others also compute a batch of another process at weight 0: all then have gradients of the same parameters, and
    call ``SharedBatchNorm2d``, which waits for all processes, equally often.
    """
    batch_size = optim.batch_size
    if optim.bucketing:
        order = bucketed_order(data.lengths, batch_size, seed, epoch)
    else:
        order = epoch_order(len(data), seed, epoch)
    passes = -(-optim.accumulation // group.size) * group.size
    for start in range(first * batch_size, len(order), batch_size):
        update = order[start : start + batch_size]
        parts = np.array_split(update, min(passes, len(update)))
        mine = parts[group.rank :: group.size]
        count = -(-len(parts) // group.size)
        batches = [data.batch(part, epoch) for part in [*mine, parts[0]][:count]]
        shares = [*(len(part) / len(update) for part in mine), 0.0][:count]
        noise = int(np.random.default_rng([seed, epoch, start]).integers(2**63))
        yield Update(len(update), batches, shares, noise)


def weighed(update: Update, group: ProcessGroup = ALONE) -> list[Batch]:
    """Return the batches of ``update`` with its dropout seed and with their weights in the means over the update.

    Each unit (example, output, token) has separate weights, because examples differ in their number of masked tokens.
    All processes of ``group`` must call this function together, since it sums their counts.
    """
    shares_N1 = torch.tensor(update.shares, dtype=torch.float64)[:, None]
    counts_N2 = torch.tensor([[batch.num_outputs, batch.num_tokens] for batch in update.batches]) * (shares_N1 > 0)
    totals_2 = counts_N2.sum(0)
    group.add_up([totals_2])
    weights_N3 = torch.cat([shares_N1, (counts_N2.double() / totals_2).nan_to_num()], dim=1)
    return [
        replace(batch, weights=dict(zip(("example", "output", "token"), weights, strict=True)), noise=update.noise)
        for batch, weights in zip(update.batches, weights_N3.tolist(), strict=True)
    ]


def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the examples in one epoch; it depends only on the arguments, so a resumed run rebuilds it."""
    return np.random.default_rng([seed, epoch]).permutation(size)


def bucketed_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Return an order with similar lengths within each batch, grouped as by the ``Trainer`` of ``transformers``."""
    from transformers.trainer_pt_utils import get_length_grouped_indices

    generator = torch.Generator().manual_seed(int(np.random.default_rng([seed, epoch]).integers(2**63)))
    return np.array(get_length_grouped_indices(lengths.tolist(), batch_size, generator=generator))


def share_of(num_examples: int, share: float, held_out: Sequence[int] | np.ndarray = ()) -> np.ndarray:
    """Return the sorted numbers of a share of the examples without ``held_out``. Larger shares contain smaller ones."""
    order = np.random.default_rng(0).permutation(num_examples)
    order = order[~np.isin(order, held_out)]
    return np.sort(order[: max(1, round(share * len(order)))])


class TaskData:
    """Training split of a task, or a share of it, and the splits for evaluation.

    Args:
        validation: splits to evaluate a model on. They also select the epoch to keep, unless ``selecting`` is given.
        selecting: held-out set of training examples that selects the epoch to keep, and is never trained on. The
            ``validation`` splits are then evaluated only once, after training.
        seed: seed of everything that differs between epochs, such as image augmentation, except the order of examples.
    """

    def __init__(
        self,
        task: Task,
        train: Split,
        validation: Mapping[str, Split],
        device: Device,
        share: float = 1.0,
        selecting: HeldOut | None = None,
        seed: int = 0,
    ) -> None:
        self.task, self.train, self.validation, self.device = task, train, validation, device
        self.selecting, self.seed = selecting, seed
        held_out = selecting.chosen if selecting is not None and selecting.split is train else ()
        # Indices into the whole split, so that a cache of teacher targets serves every smaller share.
        self.chosen = share_of(len(train), share, held_out)

    @property
    def num_evaluated(self) -> int:
        if self.selecting is not None:
            return len(self.selecting)
        return sum(map(len, self.validation.values()))

    @property
    def token_ids(self) -> np.ndarray | None:
        splits = (self.train, *self.validation.values(), *([self.selecting.split] if self.selecting else []))
        occurring = [split.token_ids for split in splits]
        known = [ids for ids in occurring if ids is not None]
        return reduce(np.union1d, known, np.array([PADDING])) if len(known) == len(occurring) else None

    @property
    def lengths(self) -> np.ndarray:
        return self.train.lengths[self.chosen]

    def __len__(self) -> int:
        return len(self.chosen)

    def batch(self, index: np.ndarray, epoch: int) -> Batch:
        return self.train.training_batch(self.chosen[index], self.seed, epoch, self.device.length_multiple)

    def evaluate(self, model: PreTrainedModel) -> Evaluation:
        """Return scores, which are not percentages, and predictions by split.

        Scores of splits that do not select are named ``<split>/<metric>``, such as MNLI's mismatched. Scores of the
        held-out set are also named so, and come without predictions.
        """
        if self.selecting is None:
            return self._of_validation(model)
        part = cast(Split, self.selecting)  # it has every attribute of a Split that evaluation reads
        outputs = predict(model, part, self.device)
        scores = self.task.score(outputs, part)
        return {f"{HELD_OUT}/{metric}": value for metric, value in scores.items()}, {}

    def judge(self, kept: Callable[[], PreTrainedModel]) -> Evaluation:
        return ({}, {}) if self.selecting is None else self._of_validation(kept())

    def _of_validation(self, model: PreTrainedModel) -> Evaluation:
        outputs = {name: predict(model, split, self.device) for name, split in self.validation.items()}
        scores = {name: self.task.score(outputs[name], split) for name, split in self.validation.items()}
        return self.task.named(scores), outputs
