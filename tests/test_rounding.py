"""Weights that are rounded at once give the bits that autocast gives."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from distill_runner.datasets.splits import TokenSplit
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest
from distill_runner.training.devices import Device
from distill_runner.training.precision import rounded_weights
from helpers.families import make

NEEDS = FeatureRequest(logits=True, cls=frozenset({1, 2, 3}))
READ_ALONE = {"bert.encoder.layer.2.attention.self.value.bias", "distilbert.transformer.layer.2.attention.v_lin.bias"}
"""Biases of a last layer that reads first tokens; autocast leaves them in float32, as no linear layer adds them."""
BF16 = Device(torch.device("cpu"), "bf16")


def learned(model: Any, tokens: TokenSplit, context: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    batch = replace(tokens.batch(range(16), 32), dropout_seed=1)
    torch.manual_seed(1)
    model.zero_grad()
    with context:
        features = extract(model, batch, NEEDS).full()
    assert features.logits is not None
    loss = torch.stack([one.square().mean() for one in (features.logits, *features.cls.values())]).sum()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "mpnet"])
def test_loss_and_gradients_are_autocasts(family: str, tokens: TokenSplit) -> None:
    """Bit for bit, with one exception; a weight without a gradient has none here either."""
    model = make(family).train()
    loss, gradients = learned(model, tokens, BF16.autocast())
    same_loss, same_gradients = learned(model, tokens, BF16.forward(model))
    assert torch.equal(loss, same_loss)
    assert gradients.keys() == same_gradients.keys()
    for name, one in gradients.items():
        same = same_gradients[name]
        if one is None or same is None:
            assert one is same
        else:
            tolerance = float(one.abs().max()) * 2**-7 if name in READ_ALONE else 0.0
            assert (same - one).abs().max() <= tolerance, name


def test_layers_computed_twice_stay(tokens: TokenSplit) -> None:
    loss, gradients = learned(make("bert").train(), tokens, BF16.autocast())
    model = make("bert").train()
    model.gradient_checkpointing_enable()
    same_loss, same_gradients = learned(model, tokens, BF16.forward(model))
    assert torch.equal(loss, same_loss)
    for name, one in gradients.items():
        same = same_gradients[name]
        assert one is same if one is None or same is None else torch.equal(one, same), name


def test_shared_weights_stay_and_all_come_back() -> None:
    model: Any = make("bert", masked_lm=True)
    before = dict(model.named_parameters())
    layer, decoder = model.bert.encoder.layer[0].output.dense, model.cls.predictions.decoder
    with rounded_weights(model, torch.float16):
        assert layer.weight.dtype == layer.bias.dtype == torch.float16
        assert layer.weight.equal(before["bert.encoder.layer.0.output.dense.weight"].half())
        assert decoder.weight is model.bert.embeddings.word_embeddings.weight
        assert decoder.weight.dtype == torch.float32
    with pytest.raises(KeyError, match="on the way"), rounded_weights(model, torch.float16):
        raise KeyError("on the way")
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
