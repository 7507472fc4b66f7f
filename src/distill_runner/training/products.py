"""Products of linear layers in float32 on a CPU: by MKL, as torch computes them, or by oneDNN where that is faster.

On CPUs that are not Intel's, MKL leaves instructions unused, and oneDNN may be 1.5 times as fast.
Both add up a row's product in one order, for any number of threads and of other rows; between the two, products differ
by rounding. So one of them is chosen for a CPU and a release of torch, and the store keeps the choice.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

Library = Literal["MKL", "oneDNN"]
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
by_mkl = functional.linear
"""What torch computes; a forward pass may replace the name that this is read from."""
ROWS, INPUTS, OUTPUTS = 512, 384, 1536
"""Sizes of the layer that is timed."""
TRIALS = 5
GAIN = 1.2
"""Speed of oneDNN, as a multiple of MKL's, from which it is taken: below it, noise could choose."""


def cpu_field(name: str) -> str | None:
    """Return a field of the first CPU, such as ``vendor_id`` or ``model name``; None where only Linux could tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next(
        (value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name), None
    )


def cpu_name() -> str:
    return cpu_field("model name") or platform.processor() or platform.machine()


def has_choice() -> bool:
    """Return whether oneDNN may be faster than what torch calls: on x86 CPUs that are not Intel's."""
    vendor = cpu_field("vendor_id")
    return torch.backends.mkl.is_available() and _has_onednn() and vendor not in (None, "GenuineIntel")


def choose() -> tuple[Library, dict[Library, float]]:
    """Time a linear layer, forward and backward, by both libraries in turns; return the one to take, and both speeds.

    Seconds of CPU are compared, which other processes change little.

    Returns:
        the library; billions of operations per second of each.
    """
    x, weight = (torch.ones(rows, INPUTS, requires_grad=True) for rows in (ROWS, OUTPUTS))  # draws no random numbers
    gradient, libraries = torch.ones(ROWS, OUTPUTS), {"MKL": by_mkl, "oneDNN": by_onednn}
    seconds: dict[Any, float] = dict.fromkeys(libraries, float("inf"))
    for _ in range(1 + TRIALS):  # the first calls also make kernels
        for name, linear in libraries.items():
            started = time.process_time()
            torch.autograd.grad(linear(x, weight, None), (x, weight), gradient)
            seconds[name] = min(seconds[name], time.process_time() - started)
    speeds = {name: 6 * ROWS * INPUTS * OUTPUTS / value / 1e9 for name, value in seconds.items()}
    return "oneDNN" if speeds["oneDNN"] >= GAIN * speeds["MKL"] else "MKL", speeds


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``torch.nn.functional.linear(x, weight, bias)``, by oneDNN for float32 on a CPU, differentiable once.

    Args:
        x: (..., inputs).
        weight: (outputs, inputs).
        bias: (outputs,), or None.
    """
    if {x.dtype, weight.dtype} != {torch.float32} or x.device.type != "cpu" or not x.numel() or x.ndim < 2:
        return by_mkl(x, weight, bias)
    output: Tensor = _Linear.apply(x, weight, bias)
    return output


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        gradient_RO = gradient.flatten(0, -2)
        return (
            _product(gradient_RO, weight.t()).view(x.shape) if needs_x else None,
            _product(gradient_RO.t(), x.flatten(0, -2).t()) if needs_weight else None,
            gradient_RO.sum(0) if needs_bias else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x`` (R, I) times ``weight`` (O, I) transposed, plus ``bias`` (O,).

    A single row would be a product with a vector, which adds up in another order.
    """
    rows = x.expand(2, -1) if len(x) == 1 else x
    output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return output[: len(x)]


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
