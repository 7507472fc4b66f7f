"""The device and precision of computations, and copies of batches to the device."""

import ctypes
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from distill_runner.common.errors import UserError
from distill_runner.datasets.batches import LENGTH_MULTIPLE, Batch
from distill_runner.models.compiled import compile_layers
from distill_runner.training.ahead import Item, ahead
from distill_runner.training.config import Precision
from distill_runner.training.gpus import claim_several_visible, claim_visible
from distill_runner.training.rounding import rounded

log = logging.getLogger(__name__)

_ALIGNED = 16
"""Alignment in bytes of each tensor in a block: valid for every dtype, and fast in kernels."""
AnyModule = TypeVar("AnyModule", bound=nn.Module)
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Constants from glibc's malloc.h."""
_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Device:
    """A torch device and how models run on it: the precision of matrix products, and whether layers are compiled.

    Weights and losses stay float32. ``tf32`` means float32 products of rounded factors, on GPUs since Ampere.
    """

    torch: torch.device
    precision: Precision
    compile: bool = False

    @classmethod
    def of(cls, name: str, precision: Precision, workers_per_gpu: int = 1) -> "Device":
        """Return the device called ``name``.

        ``auto`` claims a place on a GPU if the machine has one, and waits while all places are taken; without a GPU it
        takes the CPU. ``cuda`` and ``cuda:1`` do not wait.

        Raises:
            UserError: the device does not exist, torch has no kernels for it, or it lacks the precision.
        """
        if name == "auto":
            name = f"cuda:{claim_visible(workers_per_gpu)}" if torch.cuda.is_available() else "cpu"
        if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
            raise UserError("runtime.device", name, "is not a device", "Take auto, cpu, cuda or cuda:<number>.")
        device = torch.device(name)
        if device.type == "cuda":
            _check_cuda(name)
        if precision in ("fp16", "tf32") and device.type != "cuda":
            raise UserError("runtime.precision", precision, "needs a GPU", "Take bf16 or fp32 on a CPU.")
        if precision == "bf16" and device.type == "cpu" and not cpu_has_bf16():
            log.warning("runtime.precision=bf16: this CPU has no bf16 units and is many times faster in fp32")
        if precision in ("bf16", "tf32") and device.type == "cuda":
            _warn_of_old_gpu(device, precision)
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"  # convolutions have a switch of their own, on by default
        return cls(device, precision)

    @classmethod
    def several(cls, name: str, precision: Precision, workers_per_gpu: int, count: int) -> list["Device"]:
        """Return a device for each of ``count`` processes: a GPU for each under ``auto``, otherwise the CPU for all.

        Raises:
            UserError: for the reasons of ``of``; or several processes ask for one GPU, or for more GPUs than there are.
        """
        if count == 1 or name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
            return [cls.of(name, precision, workers_per_gpu)] * count
        if name != "auto":
            raise UserError("runtime.device", name, f"cannot be used with {count} processes", "Take auto or cpu.")
        if count > (there := torch.cuda.device_count()):
            problem = f"each process needs its own GPU, and there are {there}"
            raise UserError("runtime.num_processes", count, problem, f"Take at most {there}, or runtime.device=cpu.")
        return [cls.of(f"cuda:{number}", precision) for number in claim_several_visible(count)]

    @property
    def length_multiple(self) -> int | None:
        """Multiple to which attention pads sequence lengths (see ``batches``); None pads the batch as one group.

        On a GPU, one attention call for the whole batch is faster than many small calls. A compiled layer has a graph
        for one number of groups. In low precision, a CPU multiplies blocks of 32 columns and compiles a kernel for each
        shape.
        """
        if self.torch.type != "cpu" or self.compile:
            return None
        return 2 * LENGTH_MULTIPLE if self.precision in _LOW else LENGTH_MULTIPLE

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision not in _LOW:
            return nullcontext()
        return torch.autocast(self.torch.type, _LOW[self.precision])

    @contextmanager
    def forward(self, model: nn.Module) -> Iterator[None]:
        """Return a context for forward passes of ``model``: ``autocast``, with the weights rounded at once."""
        dtype = _LOW.get(self.precision)
        with self.autocast(), rounded(model, dtype) if dtype else nullcontext():
            yield

    def scaler(self) -> GradScaler:
        """Return the loss scaler for fp16; in other precisions it does nothing."""
        return GradScaler(self.torch.type, enabled=self.precision == "fp16")

    def place(self, module: AnyModule) -> AnyModule:
        """Move ``module`` to the device; convolutions get the memory order that is fastest, matrices stay the same.

        Layers of a model are compiled at their first call if ``compile`` is true.
        """
        if self.compile:
            compile_layers(module, self.torch)
        return module.to(self.torch, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def move(self, batch: Batch) -> Batch:
        """Copy ``batch`` to the device without making the host wait; fields such as ``index`` stay on the host."""
        if self.torch.type == "cpu":
            return batch
        parts = [(part, name) for part in (batch, *batch.groups) for name in _tensors(part)]
        there = self.send([getattr(part, name) for part, name in parts])
        moved: dict[int, dict[str, Any]] = {id(part): {} for part in (batch, *batch.groups)}
        for (part, name), tensor in zip(parts, there, strict=True):
            moved[id(part)][name] = tensor
        if batch.groups:
            moved[id(batch)]["groups"] = tuple(replace(group, **moved[id(group)]) for group in batch.groups)
        return replace(batch, **moved[id(batch)])

    def ahead(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yield the same items; for a GPU, a thread makes each item while the previous item is used.

        On a CPU, such a thread would compete with the computation.
        """
        if self.torch.type != "cuda":
            return items
        return ahead(items, partial(torch.cuda.set_device, self.torch))

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy host tensors to the device; a GPU gets them in one copy from one block of pinned memory.

        With memory that is not pinned, the host would wait until the GPU has finished all earlier work. torch keeps the
        block until the copy is finished, and reuses it for a later copy.
        """
        if self.torch.type == "cpu" or not tensors:
            return list(tensors)
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        rooms = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        block = torch.empty(sum(rooms), dtype=torch.uint8, pin_memory=self.torch.type == "cuda")
        for tensor, room, size in zip(tensors, block.split(rooms), sizes, strict=True):
            room[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        there = block.to(self.torch, non_blocking=True).split(rooms)
        return [
            room[:size].view(tensor.dtype).view(tensor.shape)
            for tensor, room, size in zip(tensors, there, sizes, strict=True)
        ]


def _tensors(part: Any) -> list[str]:
    """Return the names of the tensors that a device needs, of a batch or of one of its groups."""
    on_host = ("index", "output_rows")
    return [one.name for one in fields(part) if isinstance(getattr(part, one.name), Tensor) and one.name not in on_host]


@contextmanager
def computing() -> Iterator[None]:
    """Flush denormal numbers to zero within the context, and let the process keep freed memory from now on.

    At the end torch has as many threads as before.

    AdamW's averages of gradients decay into denormals if a word has not occurred for some 750 updates, and stay there.
    Some CPUs compute many times slower with denormals (docs/notebook.md). Threads started later flush them as well.
    """
    _keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


def _keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory for the process; other C libraries stay as they are.

    By default, glibc returns blocks of more than 32 MiB to the system at once, such as the gradient of a vocabulary at
    each update. Their pages then come back one by one, filled with zeros.
    """
    with suppress(AttributeError, TypeError):  # raised for other C libraries and on Windows
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def cpu_has_bf16() -> bool:
    """Return whether the CPU has instructions for bf16 products; other CPUs need many instructions for one."""
    return any(there for name, there in torch.cpu.get_capabilities().items() if "bf16" in name)


def _warn_of_old_gpu(device: torch.device, precision: Precision) -> None:
    """Warn about a GPU older than Ampere (sm_80): it accepts bf16 and tf32, but gains nothing from them."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        gpu = f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
        log.warning("runtime.precision=%s: %s has no units for it; its fast precision is fp16", precision, gpu)


def _check_cuda(name: str) -> None:
    if not torch.cuda.is_available():
        raise UserError("runtime.device", name, "no GPU is visible to torch", "Take runtime.device=cpu or auto.")
    if (number := torch.device(name).index or 0) >= torch.cuda.device_count():
        raise UserError("runtime.device", name, f"there are {torch.cuda.device_count()} GPUs, numbered from 0")
    major, minor = torch.cuda.get_device_capability(number)
    built = torch.cuda.get_arch_list()
    if built and not any(arch in built for arch in (f"sm_{major}{minor}", f"sm_{major}0", f"compute_{major}{minor}")):
        gpu = torch.cuda.get_device_name(number)
        problem = f"this torch has no kernels for {gpu} (sm_{major}{minor}; it has {', '.join(built)})"
        raise UserError(
            "runtime.device",
            name,
            problem,
            "Install a torch built for it: CUDA 12.6 builds still have sm_70.",
        )
