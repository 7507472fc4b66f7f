"""Attention over packed sequences against the padded one, on a GPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distill_runner.datasets.batches import Batch
from distill_runner.datasets.splits import TokenSplit
from distill_runner.models.attention import PackedAttention, RaggedAttention
from distill_runner.training.devices import Device

HEADS, SIZE = 3, 16


def attended(batch: Batch, projected: Tensor, p: float, window: int | None) -> tuple[Tensor, Tensor]:
    """The contexts, and the gradient of a sum that weighs them."""
    projected = projected.detach().requires_grad_()
    with torch.autocast("cuda", projected.dtype):
        contexts = PackedAttention(batch, HEADS, None).attend(projected, p, 4, window)
    weights = torch.arange(len(contexts), device=contexts.device)[:, None] % 7
    (contexts.float() * weights).sum().backward()
    assert projected.grad is not None
    return contexts.detach(), projected.grad


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_ragged_attention_is_the_padded_one(
    precision: str, window: int | None, tokens: TokenSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device.from_name("cuda:0", precision)  # type: ignore[arg-type]
    batch = device.move(tokens.batch([3, 41, 17, 8, 60], device.length_multiple))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    projected = torch.randn(batch.num_tokens, 3 * HEADS * SIZE).to(dtype).to("cuda:0")
    with torch.autocast("cuda", dtype):
        assert RaggedAttention.for_batch(batch) is not None
    ragged = attended(batch, projected, 0.0, window)
    monkeypatch.setattr(RaggedAttention, "for_batch", lambda batch: None)
    padded = attended(batch, projected, 0.0, window)
    for one, other in zip(ragged, padded, strict=True):
        torch.testing.assert_close(one.cpu().float(), other.cpu().float(), rtol=2e-2, atol=2e-2)


def test_dropout_of_ragged_attention_keeps_the_mean(tokens: TokenSplit) -> None:
    """Of equal values, the contexts are sums of the kept probabilities, which are 1 in the mean."""
    device = Device.from_name("cuda:0", "bf16")
    batch = device.move(replace(tokens.batch(range(64), device.length_multiple), dropout_seed=5))
    sides = torch.cat([torch.zeros(batch.num_tokens, 2 * HEADS * SIZE), torch.ones(batch.num_tokens, HEADS * SIZE)], 1)
    contexts, gradient = (one.cpu().float() for one in attended(batch, sides.bfloat16().to("cuda:0"), 0.3, None))
    assert contexts.std() > 0.02
    assert contexts.mean() == pytest.approx(1.0, abs=0.02)
    assert gradient[:, 2 * HEADS * SIZE :].std() > 0.1
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("capability", "size", "precision"), [((7, 0), 16, "fp16"), ((9, 0), 12, "bf16")])
def test_other_gpus_and_heads_pad(
    capability: tuple[int, int], size: int, precision: str, tokens: TokenSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill_runner.models import attention

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(attention, "_has_kernels", attention._has_kernels.__wrapped__)
    device = Device(torch.device("cuda:0"), precision)  # type: ignore[arg-type]
    batch = device.move(tokens.batch(range(4), None))
    with torch.autocast("cuda", torch.float16):
        ragged = PackedAttention(batch, HEADS, None).ragged
    assert ragged is None or size not in attention._HEAD_SIZES
