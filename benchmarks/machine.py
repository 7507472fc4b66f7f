"""The machine: its description, peak speed and memory, and the operations that a student needs."""

import os
import platform
import resource
import time
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from distill_runner.models.features import EncoderShape

FLAGS = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16")
SIZES = (512, 1024, 2048, 4096, 8192)
PACKAGES = ("torch", "transformers", "textbrewer", "torchdistill")
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def describe() -> str:
    """Return the machine, package versions and date in one line."""
    cpu = torch.cpu.get_capabilities()
    flags = " ".join(flag for flag in FLAGS if cpu.get(flag)) or "no AVX2"
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    machine = f"{cpu.get('cpu_name', platform.processor())}, {os.cpu_count()} cores, {flags}{load}"
    if torch.cuda.is_available():
        machine += f"; {torch.cuda.get_device_name()}"
    versions = ", ".join(f"{name} {number}" for name in PACKAGES if (number := _version(name)))
    return f"{machine}. Python {platform.python_version()}, {versions}. {date.today()}."


def clock(device: torch.device) -> float:
    """Return the CPU seconds of this process, or for a GPU the seconds of wall clock."""
    synchronize(device)
    return time.process_time() if device.type == "cpu" else time.perf_counter()


def matmul_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Return the floating-point operations per second of the fastest product of large square matrices.

    On a CPU, seconds are those of one core, and the product is that of the faster library: torch's default for the data
    type, or oneDNN. Each size is measured three times. Sizes grow until a product takes a twentieth of a second.
    """
    best = 0.0
    for size in SIZES:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in "ab")
        times = [_seconds(product, a, b) for product in _products(device) for _ in range(3)]
        best = max(best, 2 * size**3 / min(times))
        if min(times) > 0.05:
            break
    return best


def _products(device: torch.device) -> list[Product]:
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        return [torch.mm, _onednn_product]
    return [torch.mm]


def _onednn_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return product


def _seconds(product: Product, a: torch.Tensor, b: torch.Tensor) -> float:
    started = clock(a.device)
    product(a, b)
    return clock(a.device) - started


def peak_memory() -> float:
    """Return the peak memory of this process in MiB. On Linux ``ru_maxrss`` is not used: it starts at the parent's."""
    if (status := Path("/proc/self/status")).exists():
        return int(status.read_text(encoding="utf-8").split("VmHWM:")[1].split()[0]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def student_operations(shape: EncoderShape, lengths: Sequence[int], needed_only: bool) -> float:
    """Return the floating-point operations of a student's forward and backward pass, as a mean over ``lengths``.

    Only matrix products of the layers and the pooler count, with feed-forward layers of four times the width. The
    backward pass counts as two forward passes.

    Args:
        lengths: tokens of each example.
        needed_only: leave out results of the last layer that the loss does not read. It reads only [CLS], which needs
            from the other tokens a product with a query and a mean for each head.
    """
    width, full_layers = shape.width, shape.num_layers - needed_only
    forward = 0.0
    for length in lengths:
        forward += full_layers * length * (24 * width**2 + 4 * length * width) + 2 * width**2
        if needed_only:
            forward += 24 * width**2 + 4 * length * width * shape.num_heads
    return 3 * forward / len(lengths)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
