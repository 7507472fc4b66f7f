"""What a stage trains on and is judged by, the updates of an epoch, and the examples of a task."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol, cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import get_length_grouped_indices

from distill_runner.datasets.batches import PADDING, Batch
from distill_runner.datasets.held_out import HeldOut
from distill_runner.datasets.split import Split
from distill_runner.kinds import Task
from distill_runner.kinds.splits import HELD_OUT
from distill_runner.training.config import Optim
from distill_runner.training.devices import Device
from distill_runner.training.evaluate import predict
from distill_runner.training.processes import ALONE, ProcessGroup

Evaluation = tuple[dict[str, float], dict[str, np.ndarray]]
"""Metrics by name, the first of which selects, higher being better (none: the last epoch); predictions by split."""


class Data(Protocol):
    """The training examples of a stage in batches, and its evaluation."""

    @property
    def num_evaluated(self) -> int:
        """Examples of one evaluation."""

    @property
    def token_ids(self) -> np.ndarray | None:
        """The token ids (U,), sorted, that occur in any batch; None if any may."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example."""

    def __len__(self) -> int: ...

    def batch(self, index: np.ndarray, epoch: int) -> Batch: ...

    def evaluate(self, model: PreTrainedModel) -> Evaluation: ...

    def judge(self, kept: Callable[[], PreTrainedModel]) -> Evaluation:
        """What is looked at once, of the model that is kept; nothing where each evaluation has it all."""


@dataclass(frozen=True)
class Update:
    """One process's batches of an update of ``num_examples``; ``shares`` are their weights, 1 over all processes.

    ``noise`` is the seed of its dropout, in all processes.
    """

    num_examples: int
    batches: list[Batch]
    shares: list[float]
    noise: int


def steps(
    data: Data, optim: Optim, seed: int, epoch: int, first: int = 0, group: ProcessGroup = ALONE
) -> Iterator[Update]:
    """The updates of one epoch from the ``first`` on, counted from 0; processes share their batches out.

    Each is in ``optim.accumulation`` batches, fewer at the epoch's end; in more where they do not divide evenly, so
    that each process has as many. One that is left without an example stands in with another's at no weight: all have
    then gradients of the same parameters.
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
        shares = [len(part) / len(update) for part in mine]
        noise = int(np.random.default_rng([seed, epoch, start]).integers(2**63))
        yield Update(len(update), [data.batch(part, epoch) for part in mine or parts[:1]], shares or [0.0], noise)


def weighed(update: Update, group: ProcessGroup = ALONE) -> list[Batch]:
    """The batches of an update with its dropout, and with what their means weigh in the update's.

    Examples differ in how many masked tokens they have: the mean over those of the update is not that of the batches'
    means by examples. All processes of the group call this together, to add up what each has.
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
    """The order of examples in one epoch: a function of its arguments alone, so that a resumed run can rebuild it."""
    return np.random.default_rng([seed, epoch]).permutation(size)


def bucketed_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """An order whose batches have examples of similar lengths, as the ``Trainer`` of ``transformers`` groups them."""
    generator = torch.Generator().manual_seed(int(np.random.default_rng([seed, epoch]).integers(2**63)))
    return np.array(get_length_grouped_indices(lengths.tolist(), batch_size, generator=generator))


class TaskData:
    """A task's training split, or a share of it, and what selects and judges.

    Args:
        validation: the splits that a model is judged by; the first one selects as well, unless there is
        selecting: a part of training data that selects instead, and is never trained on. The others are then looked at
            once, when training is through.
        seed: of what differs between epochs, beside the order of the examples.
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
        # Numbers in the whole split, so that a teacher's targets serve every share.
        order = np.random.default_rng(0).permutation(len(train))
        if selecting is not None and selecting.split is train:
            order = order[~np.isin(order, selecting.chosen)]
        self.chosen = np.sort(order[: max(1, round(share * len(order)))])

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
        """Scores in 0..1; those of further splits are named ``<split>/<metric>`` (MNLI's mismatched, held-out ones)."""
        if self.selecting is None:
            return self._of_validation(model)
        part = cast(Split, self.selecting)  # all of one that an evaluation reads
        outputs = predict(model, part, self.device)
        scores = self.task.score(outputs, part)
        return {f"{HELD_OUT}/{metric}": value for metric, value in scores.items()}, {}

    def judge(self, kept: Callable[[], PreTrainedModel]) -> Evaluation:
        return ({}, {}) if self.selecting is None else self._of_validation(kept())

    def _of_validation(self, model: PreTrainedModel) -> Evaluation:
        outputs = {name: predict(model, split, self.device) for name, split in self.validation.items()}
        scores = {name: self.task.score(outputs[name], split) for name, split in self.validation.items()}
        return self.task.named(scores), outputs
