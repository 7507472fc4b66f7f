"""Products of linear layers by oneDNN: equal to torch's own, in one order, and chosen once for a CPU."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from distill_runner.common.library_switches import linear_by
from distill_runner.pipeline import build
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.store import Store
from distill_runner.training import products
from distill_runner.training.config import Runtime
from distill_runner.training.devices import Device

SIZES = st.integers(1, 70)
needs_onednn = pytest.mark.skipif(not products._has_onednn(), reason="this torch has no oneDNN")


@needs_onednn
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), SIZES, SIZES, st.booleans())
def test_values_and_gradients_are_those_in_float64(rows: list[int], inputs: int, outputs: int, has_bias: bool) -> None:
    """Of any shape, also a single row or output, and with a gradient that is a view."""
    torch.manual_seed(inputs)
    x, weight = torch.randn(*rows, inputs), torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if has_bias else None
    factors = torch.randn(outputs, *rows).movedim(0, -1)

    def gradients(linear: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
        output = linear(*leaves, *([None] if bias is None else []))
        return [output.detach(), *torch.autograd.grad(output, leaves, factors.to(dtype))]

    expected = gradients(functional.linear, torch.float64)
    for value, reference in zip(gradients(products.by_onednn, torch.float32), expected, strict=True):
        assert value.shape == reference.shape
        assert torch.allclose(value.double(), reference, rtol=1e-4, atol=1e-4)


@needs_onednn
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 768), (1024, 256), (48, 3)])
def test_a_row_has_the_same_bits_with_any_other_rows_and_threads(inputs: int, outputs: int) -> None:
    """Otherwise, outputs cached for other batches, or on other threads, would differ from those computed live."""
    x, weight, bias = torch.randn(300, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    complete, threads = products.by_onednn(x, weight, bias), torch.get_num_threads()
    for first, end in [(0, 1), (7, 8), (0, 2), (16, 32), (7, 99), (48, 300)]:
        assert torch.equal(products.by_onednn(x[first:end], weight, bias), complete[first:end])
    torch.set_num_threads(3 - min(2, threads))
    try:
        assert torch.equal(products.by_onednn(x, weight, bias), complete)
    finally:
        torch.set_num_threads(threads)


@needs_onednn
def test_no_other_product_is_changed() -> None:
    """Other types, vectors and empty batches are computed as torch does."""
    layer = nn.Linear(6, 4)
    for x in (torch.randn(5, 6).double(), torch.randn(5, 6).bfloat16(), torch.randn(6), torch.randn(0, 6)):
        typed = layer.to(x.dtype)
        assert torch.equal(products.by_onednn(x, typed.weight, typed.bias), typed(x))


@needs_onednn
def test_layers_use_it_within_a_forward_pass_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(x)
        return products.by_mkl(x, weight, bias)

    monkeypatch.setattr(products, "_product", product)
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.ones(2, 3)
    for library, number in (("MKL", 0), ("oneDNN", 2)):
        with Device(torch.device("cpu"), "fp32", products=library).forward(model):  # type: ignore[arg-type]
            model(x)
        model(x)
        assert len(calls) == number


def test_the_switch_is_undone_after_an_error() -> None:
    original = functional.linear
    with pytest.raises(ZeroDivisionError), linear_by(lambda *_: 1 / 0):
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert functional.linear is original


@pytest.mark.parametrize(
    ("fields", "is_timed"), [({"vendor_id": "AuthenticAMD"}, True), ({"vendor_id": "GenuineIntel"}, False), ({}, False)]
)
@needs_onednn
def test_only_cpus_that_are_not_intels_are_timed(
    fields: dict[str, str], is_timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Intel's, noise could only choose the slower one; elsewhere nobody knows the vendor."""
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(products, "cpu_field", fields.get)
    assert products.has_choice() is is_timed


@pytest.mark.parametrize(("seconds", "choice"), [((2.0, 1.0), "oneDNN"), ((1.1, 1.0), "MKL"), ((1.0, 2.0), "MKL")])
def test_onednn_is_taken_only_if_it_is_clearly_faster(
    seconds: tuple[float, float], choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def library(duration: float) -> Any:
        def linear(x: torch.Tensor, weight: torch.Tensor, _bias: None) -> torch.Tensor:
            clock[0] += duration
            return x.sum() * weight.sum() * torch.ones(products.ROWS, products.OUTPUTS)

        return linear

    monkeypatch.setattr(products, "by_mkl", library(seconds[0]))
    monkeypatch.setattr(products, "by_onednn", library(seconds[1]))
    monkeypatch.setattr("time.process_time", lambda: clock[0])
    random_state = torch.get_rng_state()
    library_name, speeds = products.choose()
    assert library_name == choice
    assert torch.equal(torch.get_rng_state(), random_state)  # else a run that chooses would draw other numbers
    assert speeds["MKL"] == pytest.approx(6 * 512 * 384 * 1536 / seconds[0] / 1e9)


def test_the_store_keeps_the_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A resumed run, the points of a sweep, and the workers of a run must not choose anew."""
    choices = iter([("oneDNN", {"MKL": 100.4, "oneDNN": 206.6})])
    monkeypatch.setattr(build, "has_choice", lambda: True)
    monkeypatch.setattr(build, "choose", lambda: next(choices))
    caplog.set_level(logging.INFO, logger="distill_runner")
    for _ in range(2):
        runtime = Runtime(device="cpu", precision="fp32")
        assert Pipeline(Store(tmp_path), runtime).device.products == "oneDNN"
    assert "by oneDNN (billion operations per second: MKL 100, oneDNN 207)" in caplog.text
    (kept,) = tmp_path.glob("products/*/products.json")
    assert json.loads(kept.read_text())["library"] == "oneDNN"
    for other in ({"precision": "bf16"}, {"compile": True}):
        assert Pipeline(Store(tmp_path / "new"), Runtime(device="cpu", **other)).device.products == "MKL"
