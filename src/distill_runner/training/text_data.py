"""Training text from a corpus: unchanged, or with masked tokens to predict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from distill_runner.datasets.batches import Batch
from distill_runner.datasets.corpora import Corpus, continuations, mask_draws, mask_tokens
from distill_runner.datasets.split import Split
from distill_runner.models.encoders import predicts_next_sentence
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest
from distill_runner.training.data import Evaluation
from distill_runner.training.devices import Device
from distill_runner.training.evaluate import by_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TextData:
    """Unchanged examples of a corpus, for methods that read no labels; a model is not evaluated on them."""

    token_ids = None
    """Any token may occur: a corpus is too large to search for unused ones, and masking may insert any token."""

    def __init__(self, train: Split, device: Device) -> None:
        self.train, self.device = train, device

    @property
    def num_evaluated(self) -> int:
        return 0

    @property
    def lengths(self) -> np.ndarray:
        return self.train.lengths

    def __len__(self) -> int:
        return len(self.train)

    def batch(self, index: np.ndarray, epoch: int) -> Batch:
        return self.train.batch(index, self.device.length_multiple)

    def evaluate(self, model: PreTrainedModel) -> Evaluation:
        return {}, {}

    def judge(self, kept: Callable[[], PreTrainedModel]) -> Evaluation:
        return {}, {}


class CorpusData(TextData):
    """Examples of a corpus, masked anew in each epoch, and held-out examples with a fixed mask."""

    def __init__(
        self, corpus: Corpus, train: Split, validation: Split, tokenizer: Any, seed: int, device: Device
    ) -> None:
        super().__init__(train, device)
        self.corpus, self.validation, self.seed = corpus, validation, seed
        self.special = torch.tensor(sorted(tokenizer.all_special_ids))
        self.mask_id, self.vocab_size = tokenizer.mask_token_id, len(tokenizer)
        self.continues = continuations(tokenizer) if corpus.whole_word else None

    @property
    def num_evaluated(self) -> int:
        return len(self.validation)

    def batch(self, index: np.ndarray, epoch: int) -> Batch:
        return self._masked(super().batch(index, epoch), epoch + 1)

    def _masked(self, batch: Batch, epoch: int) -> Batch:
        """Return ``batch`` with some tokens masked; the labels are the original tokens."""
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
        return replace(batch, input_ids=masked, labels=labels[rows], rows=rows)

    def evaluate(self, model: PreTrainedModel) -> Evaluation:
        """Return ``masked_accuracy`` and ``perplexity`` on held-out text.

        ``next_sentence_accuracy`` is added if the examples are pairs and the model has a head for it.
        """
        needs = FeatureRequest(
            logits=True, next_sentence=self.corpus.examples == "pairs" and predicts_next_sentence(model)
        )
        model.eval()
        hits, loss, count, pairs_right = 0, 0.0, 0, 0
        with torch.inference_mode(), self.device.forward(model):
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

    def _held_out(self) -> Iterator[Batch]:
        for index in by_tokens(self.validation.lengths, budget=4096):
            yield self.device.move(self._masked(self.validation.batch(index, self.device.length_multiple), epoch=0))
