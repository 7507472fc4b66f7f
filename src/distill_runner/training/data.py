"""What a stage trains on and is judged by: a task's labelled examples, or the text of a corpus."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Protocol, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from distill_runner.datasets.batches import PADDING, Batch, Split, bucketed_order, epoch_order
from distill_runner.datasets.corpora import Corpus, continuations, mask_draws, mask_tokens
from distill_runner.datasets.held_out import HeldOut
from distill_runner.kinds import Task
from distill_runner.kinds.task import HELD_OUT
from distill_runner.models.encoders import extract, predicts_next_sentence
from distill_runner.models.features import FeatureRequest
from distill_runner.training.config import Optim
from distill_runner.training.devices import Device
from distill_runner.training.evaluate import by_tokens, predict
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


class TextData:
    """Examples of a corpus as they are, for methods that read no labels. Nothing judges a model on them."""

    token_ids = None
    """Too much text to look for those that never occur."""
    num_evaluated = 0

    def __init__(self, train: Split, device: Device) -> None:
        self.train, self.device = train, device

    @property
    def lengths(self) -> np.ndarray:
        return self.train.lengths

    def __len__(self) -> int:
        return len(self.train)

    def batch(self, index: np.ndarray, epoch: int) -> Batch:
        return replace(self.train.batch(index, self.device.length_multiple), labels=None)

    def evaluate(self, model: PreTrainedModel) -> Evaluation:
        return {}, {}

    def judge(self, kept: Callable[[], PreTrainedModel]) -> Evaluation:
        return {}, {}


class CorpusData:
    """Examples of a corpus, masked anew each epoch, and held-out ones masked once and for all."""

    def __init__(
        self, corpus: Corpus, train: Split, validation: Split, tokenizer: Any, seed: int, device: Device
    ) -> None:
        self.corpus, self.train, self.validation, self.seed, self.device = corpus, train, validation, seed, device
        self.special = torch.tensor(sorted(tokenizer.all_special_ids))
        self.mask_id, self.vocab_size = tokenizer.mask_token_id, len(tokenizer)
        self.continues = continuations(tokenizer) if corpus.whole_word else None

    token_ids = None
    """Some masked tokens are replaced by others from the whole vocabulary."""

    @property
    def num_evaluated(self) -> int:
        return len(self.validation)

    @property
    def lengths(self) -> np.ndarray:
        return self.train.lengths

    def __len__(self) -> int:
        return len(self.train)

    def batch(self, index: np.ndarray, epoch: int) -> Batch:
        return self._masked(self.train.batch(index, self.device.length_multiple), epoch + 1)

    def _masked(self, batch: Batch, epoch: int) -> Batch:
        """The labels become those of the masked tokens; those of the pairs, if any, move to ``is_next``."""
        lengths = np.diff(batch.starts.numpy(), append=len(batch.input_ids))
        masked, labels = mask_tokens(
            batch.input_ids,
            torch.isin(batch.input_ids, self.special),
            batch.starts,
            mask_draws(self.seed, epoch, batch.index.tolist(), lengths.tolist()),
            self.mask_id,
            self.vocab_size,
            self.corpus.mask_probability,
            None if self.continues is None else self.continues[batch.input_ids],
        )
        rows = torch.nonzero(labels >= 0).squeeze(-1)
        return replace(batch, input_ids=masked, labels=labels[rows], rows=rows, is_next=batch.labels)

    def evaluate(self, model: PreTrainedModel) -> Evaluation:
        """``masked_accuracy`` and ``perplexity`` of held-out text, ``next_sentence_accuracy`` where a head says it."""
        needs = FeatureRequest(
            logits=True, next_sentence=self.corpus.examples == "pairs" and predicts_next_sentence(model)
        )
        model.eval()
        hits, loss, count, pairs_right = 0, 0.0, 0, 0
        with torch.inference_mode(), self.device.autocast():
            for batch in self._held_out():
                features = extract(model, batch, needs).full()
                assert features.logits is not None
                assert batch.labels is not None
                hits += int(features.logits.argmax(-1).eq(batch.labels).sum())
                loss += float(torch.nn.functional.cross_entropy(features.logits, batch.labels, reduction="sum"))
                count += len(batch.labels)
                if features.next_sentence is not None:
                    assert batch.is_next is not None
                    pairs_right += int(features.next_sentence.argmax(-1).eq(batch.is_next).sum())
        model.train()
        metrics = {"masked_accuracy": hits / count, "perplexity": float(np.exp(loss / count))}
        if needs.next_sentence:
            metrics["next_sentence_accuracy"] = pairs_right / len(self.validation)
        return metrics, {}

    def judge(self, kept: Callable[[], PreTrainedModel]) -> Evaluation:
        return {}, {}

    def _held_out(self) -> Iterator[Batch]:
        for index in by_tokens(self.validation, budget=4096):
            yield self.device.move(self._masked(self.validation.batch(index, self.device.length_multiple), epoch=0))


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
