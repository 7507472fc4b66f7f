"""Attention without padding: torch's operation as the package calls it, with a reference in the place of its kernel."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from distill_runner.datasets.splits import TokenSplit
from distill_runner.models import attention
from distill_runner.models.attention import PackedAttention, RaggedAttention
from fake_cuda import flash

HEADS, SIZE = 3, 8


@pytest.fixture
def _kernels() -> Iterator[None]:
    """A CPU has none of its own; what calls them, autograd included, is torch's."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash.forward, "CPU")
    library.impl("_flash_attention_backward", flash.backward, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("window", [None, 5])
def test_ragged_attention_is_the_padded_one(window: int | None, tokens: TokenSplit) -> None:
    batch = tokens.batch(range(12), None)
    bounds = torch.tensor([*batch.starts.tolist(), batch.num_tokens], dtype=torch.int32)
    found, size = [], HEADS * SIZE
    for ragged in (RaggedAttention(bounds, int(bounds.diff().max())), None):
        generator = torch.Generator().manual_seed(0)
        shapes = [(batch.num_tokens, 3 * size), (batch.num_tokens, size), (12, size), (2 * size, size), (2 * size,)]
        inputs = [torch.randn(one, generator=generator, dtype=torch.float64, requires_grad=True) for one in shapes]
        projected, states, queries, weights, bias = inputs
        packed = PackedAttention(batch, HEADS, None)
        packed.ragged = ragged
        contexts = packed.attend(projected, 0.0, 4, window)
        key, value = zip(weights.chunk(2), bias.chunk(2), strict=True)
        first = packed.attend_first(states, queries, key, value, 0.0, 8)
        ((contexts.sin() * contexts).sum() + (first.sin() * first).sum()).backward()
        found.append((contexts, first, *(one.grad for one in inputs)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-10)


def test_a_cpu_pads(tokens: TokenSplit) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert RaggedAttention.for_batch(tokens.batch(range(4), None)) is None


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("fault", [None, "dropout", "window", "backward"])
def test_kernels_that_fail_in_training_are_not_used(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial at the start does what an update does: a fault there would end the run in its first update."""
    attend = RaggedAttention.attend

    def fail(*_: object) -> None:
        raise RuntimeError("no kernel")

    def faulty(packed: RaggedAttention, q: Tensor, k: Tensor, v: Tensor, p: float, window: int | None) -> Tensor:
        if (fault == "dropout" and p) or (fault == "window" and window is not None):
            fail()
        contexts = attend(packed, q, k, v, p, window)
        if fault == "backward":
            contexts.register_hook(fail)
        return contexts

    monkeypatch.setattr(RaggedAttention, "attend", faulty)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.random, "fork_rng", lambda _: nullcontext())
    assert attention._has_kernels.__wrapped__(torch.device("cpu")) == (fault is None)
