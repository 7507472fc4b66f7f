"""What a stage trains on and is judged by, and the examples of a task."""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Protocol, cast

import numpy as np
from transformers import PreTrainedModel

from distill_runner.datasets.batches import PADDING, Batch, Split
from distill_runner.datasets.held_out import HeldOut
from distill_runner.kinds import Task
from distill_runner.kinds.task import HELD_OUT
from distill_runner.training.devices import Device
from distill_runner.training.evaluate import predict

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
