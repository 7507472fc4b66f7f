"""Data of a stage: training examples of a task or a corpus, their batches in each update, and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from distill_runner.common.errors import UserError
from distill_runner.datasets.batches import PADDING, Batch, rounded_up
from distill_runner.datasets.corpora import Corpus
from distill_runner.datasets.pretraining import continuations, mask_draws, mask_tokens
from distill_runner.datasets.splits import HeldOutSplit, Split
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest, has_next_sentence_head
from distill_runner.tasks import Task
from distill_runner.tasks.task_splits import HELD_OUT
from distill_runner.training.config import Optim
from distill_runner.training.devices import Device
from distill_runner.training.processes import SINGLE_PROCESS, ProcessGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 65536}
"""Approximate number of tokens of a batch without gradients, by device type."""
MAX_MASKED_TOKENS = 16384
"""The same at most where some tokens have an output for each word of the vocabulary."""
Evaluation = tuple[dict[str, float], dict[str, np.ndarray]]
"""Metrics by name, and predictions by split.

The first metric selects the epoch to keep, and higher is better; without metrics, the last epoch is kept.
"""


@dataclass(frozen=True)
class Update:
    """The batches of one update that one process computes.

    ``num_examples`` counts the examples of the whole update, over all processes. ``shares`` holds the weight of each
    batch; the weights of all processes sum to 1. ``dropout_seed`` is equal in all
    processes.
    """

    num_examples: int
    batches: list[Batch]
    shares: list[float]
    dropout_seed: int

    @property
    def counts(self) -> Tensor:
        """Number of outputs and of tokens, (N, 2), of the batches; 0 for those with a weight of 0."""
        counts_N2 = torch.tensor([[batch.num_outputs, batch.num_tokens] for batch in self.batches])
        return counts_N2 * (torch.tensor(self.shares)[:, None] > 0)


def epoch_updates(
    data: Data, optim: Optim, seed: int, epoch: int, first_step: int = 0, group: ProcessGroup = SINGLE_PROCESS
) -> Iterator[Update]:
    """Yield the updates of one epoch, from ``first_step`` (counted from 0); processes divide each update's batches.

    An update has ``optim.accumulation`` batches, rounded up to a multiple of the number of processes. An update with
    fewer examples than that, at the end of an epoch, has one batch per example. Processes with one batch less than the
    others also compute a batch of another process at weight 0: all then have gradients of the same parameters, and
    call ``SyncBatchNorm``, which waits for all processes, equally often.
    """
    batch_size, order = optim.batch_size, epoch_order(len(data), seed, epoch)
    if optim.bucketing:
        order = bucketed_order(data.lengths, batch_size, seed, epoch)
    for start in range(first_step * batch_size, len(order), batch_size):
        update = order[start : start + batch_size]
        parts = np.array_split(update, min(rounded_up(optim.accumulation, group.size), len(update)))
        own_parts = parts[group.rank :: group.size]
        count = math.ceil(len(parts) / group.size)
        batches = [data.batch(part, epoch) for part in [*own_parts, parts[0]][:count]]
        shares = [*(len(part) / len(update) for part in own_parts), 0.0][:count]
        yield Update(len(update), batches, shares, int(np.random.default_rng([seed, epoch, start]).integers(2**63)))


def batches_with_shares(update: Update, totals_2: Tensor | None = None) -> list[Batch]:
    """Return the batches of ``update`` with its dropout seed, each with its share of the mean over the update.

    Each unit (example, output, token) has a share of its own, because examples differ in their number of masked tokens.

    Args:
        totals_2: sum of ``Update.counts`` over all processes; None if there is one process.
    """
    shares_N1 = torch.tensor(update.shares, dtype=torch.float64)[:, None]
    totals_2 = update.counts.sum(0) if totals_2 is None else totals_2
    shares_N3 = torch.cat([shares_N1, (update.counts.double() / totals_2).nan_to_num()], dim=1)
    # A graph of several batches reads their shares; a share of 1 costs no kernel.
    rows: Any = shares_N3 if len(shares_N3) > 1 else shares_N3.tolist()
    by_unit: list[Any] = [dict(zip(("example", "output", "token"), row, strict=True)) for row in rows]
    batches = zip(update.batches, by_unit, strict=True)
    return [replace(batch, shares=shares, dropout_seed=update.dropout_seed) for batch, shares in batches]


def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the examples in one epoch; it depends only on the arguments, so a resumed run rebuilds it."""
    return np.random.default_rng([seed, epoch]).permutation(size)


def bucketed_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Return an order with similar lengths within each batch, grouped as by the ``Trainer`` of ``transformers``."""
    from transformers.trainer_pt_utils import get_length_grouped_indices

    generator = torch.Generator().manual_seed(int(np.random.default_rng([seed, epoch]).integers(2**63)))
    return np.array(get_length_grouped_indices(lengths.tolist(), batch_size, generator=generator))


def select_share(num_examples: int, share: float, held_out: Sequence[int] | np.ndarray = ()) -> np.ndarray:
    """Return the sorted indices of a share of the examples without ``held_out``. Larger shares contain smaller ones."""
    order = np.random.default_rng(0).permutation(num_examples)
    order = order[~np.isin(order, held_out)]
    return np.sort(order[: max(1, round(share * len(order)))])


def _mean_one(weights: np.ndarray, indices: np.ndarray) -> np.ndarray | None:
    """Return weights (N,) of which those of the examples ``indices`` have a mean of 1; None if these are equal.

    Raises:
        UserError: all of these are 0.
    """
    own = weights[indices]
    if not own.any():
        problem = "the training examples that are used all have the weight 0"
        raise UserError("task.example_weight", None, problem, "Take a larger share of them, or other weights.")
    return None if (own == own[0]).all() else weights / own.mean()


class TaskData:
    """Training split of a task, or a share of it, and the splits for evaluation.

    Args:
        validation: splits to evaluate a model on. They also select the epoch to keep, unless ``selection`` is given.
        selection: held-out set of training examples that selects the epoch to keep, and is never trained on. The
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
        selection: HeldOutSplit | None = None,
        seed: int = 0,
    ) -> None:
        self.task, self.train, self.validation, self.device = task, train, validation, device
        self.selection, self.seed = selection, seed
        self.evaluated: Sequence[Split] = [*validation.values()] if selection is None else [selection]
        held_out = selection.numbers if selection is not None and selection.split is train else ()
        # Indices into the whole split, so that a cache of teacher targets serves every smaller share.
        self.indices = select_share(len(train), share, held_out)
        self.example_weights = None if train.example_weights is None else _mean_one(train.example_weights, self.indices)

    @property
    def token_ids(self) -> np.ndarray | None:
        splits = (self.train, *self.validation.values(), *([self.selection.split] if self.selection else []))
        token_ids = [split.token_ids for split in splits]
        known_ids = [ids for ids in token_ids if ids is not None]
        return reduce(np.union1d, known_ids, np.array([PADDING])) if len(known_ids) == len(token_ids) else None

    @property
    def lengths(self) -> np.ndarray:
        return self.train.lengths[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, index: np.ndarray, epoch: int) -> Batch:
        batch = self.train.training_batch(self.indices[index], self.seed, epoch, self.device.length_multiple)
        if self.example_weights is None:
            return batch
        return replace(batch, example_weights=torch.from_numpy(self.example_weights[batch.index.numpy()]))

    def evaluate(self, model: PreTrainedModel, group: ProcessGroup = SINGLE_PROCESS) -> Evaluation:
        """Return scores, which are not percentages, and predictions by split.

        Scores of splits that do not select the epoch are named ``<split>/<metric>``, such as MNLI's mismatched. Scores
        of the held-out set are also named so, and come without predictions.
        """
        if self.selection is None:
            return self._evaluate_validation(model, group)
        selection, outputs = self.selection, predict(model, self.selection, self.device, group)
        scores = group.broadcast_from_main(lambda: self.task.score(outputs, selection))
        return {f"{HELD_OUT}/{metric}": value for metric, value in scores.items()}, {}

    def final_evaluation(self, load_model: Callable[[], PreTrainedModel]) -> Evaluation:
        return ({}, {}) if self.selection is None else self._evaluate_validation(load_model())

    def _evaluate_validation(self, model: PreTrainedModel, group: ProcessGroup = SINGLE_PROCESS) -> Evaluation:
        outputs = {name: predict(model, split, self.device, group) for name, split in self.validation.items()}

        def metrics() -> dict[str, float]:
            scores = {name: self.task.score(outputs[name], split) for name, split in self.validation.items()}
            return self.task.combined_metrics(scores)

        return group.broadcast_from_main(metrics), outputs


class TextData:
    """Unchanged examples of a corpus, for methods that read no labels; a model is not evaluated on them."""

    token_ids: np.ndarray | None = None
    """Sorted ids (U,) of the tokens that occur in any batch; None if any may: a corpus is too large to search."""
    evaluated: Sequence[Split] = ()
    """Splits that an evaluation reads."""

    def __init__(self, train: Split, device: Device) -> None:
        self.train, self.device = train, device

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each example, (N,)."""
        return self.train.lengths

    def __len__(self) -> int:
        return len(self.train)

    def batch(self, index: np.ndarray, epoch: int) -> Batch:
        return self.train.batch(index, self.device.length_multiple)

    def evaluate(self, model: PreTrainedModel, group: ProcessGroup = SINGLE_PROCESS) -> Evaluation:
        """Evaluate ``model``; the processes of ``group`` share the batches, and all of them get the result."""
        return {}, {}

    def final_evaluation(self, load_model: Callable[[], PreTrainedModel]) -> Evaluation:
        """Evaluate the kept model once, after training; the result is empty if ``evaluate`` covers all splits."""
        return {}, {}


class CorpusData(TextData):
    """Examples of a corpus, masked anew in each epoch, and held-out examples with a fixed mask."""

    def __init__(
        self, corpus: Corpus, train: Split, validation: Split, tokenizer: Any, seed: int, device: Device
    ) -> None:
        super().__init__(train, device)
        self.corpus, self.validation, self.seed = corpus, validation, seed
        self.evaluated = [validation]
        self.special = torch.tensor(sorted(tokenizer.all_special_ids))
        self.mask_id, self.vocab_size = tokenizer.mask_token_id, len(tokenizer)
        self.continues = continuations(tokenizer) if corpus.whole_word else None

    def batch(self, index: np.ndarray, epoch: int) -> Batch:
        return self._masked(super().batch(index, epoch), epoch + 1)

    def _masked(self, batch: Batch, epoch: int) -> Batch:
        """Return ``batch`` with some tokens masked; the labels are the original tokens."""
        ids, options = batch.input_ids, (self.mask_id, self.vocab_size, self.corpus.mask_probability)
        draws = mask_draws(self.seed, epoch, batch.index.tolist(), batch.sequence_lengths.tolist())
        continues = None if self.continues is None else self.continues[ids]
        masked, labels = mask_tokens(ids, torch.isin(ids, self.special), batch.starts, draws, *options, continues)
        tokens = torch.nonzero(labels >= 0).squeeze(-1)
        return replace(batch, input_ids=masked, labels=labels[tokens], head_tokens=tokens)

    def evaluate(self, model: PreTrainedModel, group: ProcessGroup = SINGLE_PROCESS) -> Evaluation:
        """Return ``masked_accuracy`` and ``perplexity`` on held-out text.

        ``next_sentence_accuracy`` is added if the examples are pairs and the model has a head for it.
        """
        needs = FeatureRequest(
            logits=True, next_sentence=self.corpus.examples == "pairs" and has_next_sentence_head(model)
        )
        model.eval()
        batches = list(batches_by_tokens(self.validation.lengths, self.device, most=MAX_MASKED_TOKENS))
        totals_N4 = torch.zeros(len(batches), 4, dtype=torch.float64)  # losses are added in one order by all processes
        with torch.inference_mode(), self.device.autocast():
            for number in range(group.rank, len(batches), group.size):
                batch = self._masked(self.validation.batch(batches[number], self.device.length_multiple), epoch=0)
                batch = self.device.move(batch)
                features = extract(model, batch, needs).full()
                logits = features.logits_OC
                sums = [logits.argmax(-1).eq(batch.gold).sum(), cross_entropy(logits, batch.gold, reduction="sum")]
                if features.next_sentence is not None:
                    assert batch.is_next is not None
                    sums.append(features.next_sentence.argmax(-1).eq(batch.is_next).sum())
                totals_N4[number, : len(sums)] = torch.stack([value.double() for value in sums]).cpu()
                totals_N4[number, 3] = len(batch.gold)
        model.train()
        group.all_reduce_sum([totals_N4])
        correct, loss, correct_pairs, count = (sum(column) for column in zip(*totals_N4.tolist(), strict=True))
        metrics = {"masked_accuracy": correct / count, "perplexity": float(np.exp(loss / count))}
        if needs.next_sentence:
            metrics["next_sentence_accuracy"] = correct_pairs / len(self.validation)
        return metrics, {}


Data = TaskData | TextData
"""Training examples of a stage in batches, and its evaluation."""


def predict(model: PreTrainedModel, split: Split, device: Device, group: ProcessGroup = SINGLE_PROCESS) -> np.ndarray:
    """Return the outputs of ``model`` for ``split``, (``split.num_outputs``, C) in the split's order.

    Dropout is off; the model's training mode is restored afterwards. The processes of ``group`` share the batches; each
    output is computed as by a single process.
    """
    outputs: np.ndarray | None = None
    was_training = model.training
    model.eval()
    with torch.inference_mode(), device.autocast():
        for index in islice(batches_by_tokens(split.lengths, device), group.rank, None, group.size):
            batch = device.move(split.batch(index, device.length_multiple))
            logits = extract(model, batch, FeatureRequest(logits=True)).logits_OC
            if outputs is None:
                outputs = np.zeros((split.num_outputs, logits.shape[-1]), dtype=np.float32)
            outputs[batch.output_index] = logits.float().cpu().numpy()
    model.train(was_training)
    if group.size > 1:
        num_columns = group.broadcast_from_main(lambda: 0 if outputs is None else outputs.shape[1])
        outputs = np.zeros((split.num_outputs, num_columns), dtype=np.float32) if outputs is None else outputs
        group.all_reduce_sum([torch.from_numpy(outputs)])
    assert outputs is not None, "a split has examples"
    return outputs


def batches_by_tokens(
    lengths: np.ndarray, device: Device, multiple: int = 1, most: int | None = None
) -> Iterator[np.ndarray]:
    """Yield the indices of examples with these lengths, shortest first, in batches that suit a device.

    Args:
        multiple: the size of every batch except the last is a multiple of it.
        most: about the largest number of tokens; None sets no limit beside the device's.
    """
    budget = min(TOKENS_PER_BATCH[device.torch.type], most or math.inf)
    order = np.argsort(lengths, kind="stable")
    cuts = (np.flatnonzero(np.diff(np.cumsum(lengths[order]) // budget)) + 1) // multiple * multiple
    yield from np.split(order, np.unique(cuts[cuts > 0]))
