"""What a model predicts, and what its predictions are worth."""

from collections.abc import Iterator

import numpy as np
import torch
from transformers import PreTrainedModel

from distill_runner.datasets.batches import Tokens
from distill_runner.models.encoders import EncoderShape, extract
from distill_runner.models.features import FeatureRequest
from distill_runner.training.devices import Device

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 65536}


def predict(model: PreTrainedModel, tokens: Tokens, device: Device) -> np.ndarray:
    """The model's logits for a split, (N, C) in the order of the examples; dropout off, the mode restored."""
    outputs = np.zeros((len(tokens), EncoderShape.of(model.config).num_labels), dtype=np.float32)
    was_training = model.training
    model.eval()
    with torch.inference_mode(), device.autocast():
        for index in by_tokens(tokens, TOKENS_PER_BATCH[device.torch.type]):
            batch = device.move(tokens.batch(index, device.length_multiple))
            logits = extract(model, batch, FeatureRequest(logits=True)).logits
            assert logits is not None
            outputs[batch.index.numpy()] = logits.float().cpu().numpy()
    model.train(was_training)
    return outputs


def by_tokens(tokens: Tokens, budget: int, multiple: int = 1) -> Iterator[np.ndarray]:
    """All examples by length, in batches of about ``budget`` tokens.

    All but the last have a multiple of ``multiple`` examples.
    """
    lengths = tokens.lengths
    order = np.argsort(lengths, kind="stable")
    batch_of = np.cumsum(lengths[order]) // budget
    cuts = (np.flatnonzero(np.diff(batch_of)) + 1) // multiple * multiple
    yield from np.split(order, np.unique(cuts[cuts > 0]))
