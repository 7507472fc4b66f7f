"""Predictions of a model for a split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from distill_runner.datasets.split import Split
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest
from distill_runner.training.devices import Device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 65536}


def predict(model: PreTrainedModel, split: Split, device: Device) -> np.ndarray:
    """Return the outputs of ``model`` for ``split``, (``split.num_outputs``, C) in the split's order.

    Dropout is off; the model's training mode is restored afterwards.
    """
    outputs: np.ndarray | None = None
    was_training = model.training
    model.eval()
    with torch.inference_mode(), device.forward(model):
        for index in by_tokens(split.lengths, TOKENS_PER_BATCH[device.torch.type]):
            batch = device.move(split.batch(index, device.length_multiple))
            logits = extract(model, batch, FeatureRequest(logits=True)).logits
            assert logits is not None
            if outputs is None:
                outputs = np.zeros((split.num_outputs, logits.shape[-1]), dtype=np.float32)
            outputs[batch.places] = logits.float().cpu().numpy()
    model.train(was_training)
    assert outputs is not None, "a split has examples"
    return outputs


def by_tokens(lengths: np.ndarray, budget: int, multiple: int = 1) -> Iterator[np.ndarray]:
    """Yield the indices of examples with these lengths, shortest first, in batches of about ``budget`` tokens.

    The size of every batch except the last is a multiple of ``multiple``.
    """
    order = np.argsort(lengths, kind="stable")
    batch_of = np.cumsum(lengths[order]) // budget
    cuts = (np.flatnonzero(np.diff(batch_of)) + 1) // multiple * multiple
    yield from np.split(order, np.unique(cuts[cuts > 0]))
