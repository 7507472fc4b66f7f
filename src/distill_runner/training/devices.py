"""The device of computations: its choice, claims on shared GPUs, precision, and copies of batches to it."""

import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import BaseFileLock
from torch import Tensor, nn
from torch.amp import GradScaler

from distill_runner.common.errors import TrainingError, UserError, causes, first_line, override
from distill_runner.common.files import try_machine_lock
from distill_runner.common.library_switches import allow_tf32
from distill_runner.common.process import num_launched
from distill_runner.datasets.batches import LENGTH_MULTIPLE, rounded_up
from distill_runner.training.config import Precision

log = logging.getLogger(__name__)

AnyModule = TypeVar("AnyModule", bound=nn.Module)
AnyTree = TypeVar("AnyTree")
LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
SECONDS_BETWEEN_TRIES = 2.0
_ALIGNMENT = 16
"""Alignment in bytes of each tensor in a block: valid for every dtype, and fast in kernels."""
_CLAIMS: list[BaseFileLock] = []
"""Locks of this process on GPUs, which the kernel frees when the process ends, however it ends."""


def cpu_has_bf16() -> bool:
    """Return whether the CPU has instructions for bf16 products; other CPUs need many instructions for one."""
    return any(available for name, available in torch.cpu.get_capabilities().items() if "bf16" in name)


@dataclass(frozen=True)
class Device:
    """A torch device and the precision of matrix products.

    Weights and losses stay float32. ``tf32`` means float32 products of rounded factors, on GPUs since Ampere.
    """

    torch: torch.device
    precision: Precision

    @classmethod
    def from_name(cls, name: str, precision: Precision, workers_per_gpu: int = 1) -> "Device":
        """Return the device called ``name``.

        ``auto`` claims a place on a GPU if the machine has one, and waits while all places are taken; without a GPU it
        takes the CPU. ``cuda`` and ``cuda:1`` do not wait. Processes of ``torchrun`` take the GPU with their number.

        A precision from which the device gains nothing is warned of.

        Raises:
            UserError: the device does not exist, torch has no kernels for it, or it lacks the precision.
        """
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
            raise UserError("runtime.device", name, "is not a device", "Take auto, cpu, cuda or cuda:<number>.")
        if num_launched() > 1 and name != "cpu":
            if name not in ("auto", "cuda"):
                problem = "is one device, but each process of torchrun takes the GPU with its number"
                raise UserError("runtime.device", name, problem, "Take auto, cpu or cuda.")
            name = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else name
        if name == "auto":
            name = f"cuda:{claim_visible_gpu(workers_per_gpu)}" if torch.cuda.is_available() else "cpu"
        device = torch.device(name)
        if device.type == "cuda":
            _check_cuda(name)
            if device.index is None:  # some functions of torch need a number
                device = torch.device("cuda", torch.cuda.current_device())
            torch.cuda.set_device(device)
        if precision in ("fp16", "tf32") and device.type != "cuda":
            raise UserError("runtime.precision", precision, "needs a GPU", "Take bf16 or fp32 on a CPU.")
        if precision == "bf16" and device.type == "cpu" and not cpu_has_bf16():
            log.warning("runtime.precision=bf16: this CPU has no bf16 units and is many times faster in fp32")
        if precision in ("bf16", "tf32") and device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            if major < 8:  # a GPU older than Ampere accepts bf16 and tf32, but computes them more slowly
                gpu = f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
                log.warning("runtime.precision=%s: %s has no units for it; its fast precision is fp16", precision, gpu)
        allow_tf32(precision == "tf32")
        return cls(device, precision)

    @property
    def length_multiple(self) -> int | None:
        """Multiple to which attention pads sequence lengths (see ``batches``); None pads the batch as one group.

        On a GPU, one attention call for the whole batch is faster than many small calls. In low precision, a CPU
        multiplies blocks of 32 columns and compiles a kernel for each shape.
        """
        if self.torch.type != "cpu":
            return None
        return 2 * LENGTH_MULTIPLE if self.precision in LOW_PRECISION else LENGTH_MULTIPLE

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision not in LOW_PRECISION:
            return nullcontext()
        return torch.autocast(self.torch.type, LOW_PRECISION[self.precision])

    def product_layers(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return by name the linear layers and convolutions, whose weights autocast would round at each use.

        An output layer that shares the weights of embeddings is none of them.
        """
        if self.precision not in LOW_PRECISION:
            return {}
        tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        layers = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear | nn.Conv2d)}
        return {name: layer for name, layer in layers.items() if tables.isdisjoint(layer.parameters(recurse=False))}

    def rounded_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the rounded trained weights by name; none of a model whose layers are computed twice, since they would
        get other tensors then."""
        layers = self.product_layers(model).items()
        weights = {f"{name}.{part}": p for name, one in layers for part, p in one.named_parameters() if p.requires_grad}
        if not weights or getattr(model, "is_activation_checkpointing", False):
            return {}
        return dict(zip(weights, _Rounding.apply(LOW_PRECISION[self.precision], *weights.values()), strict=True))

    def scaler(self) -> GradScaler:
        """Return the loss scaler for fp16; in other precisions it does nothing."""
        return GradScaler(self.torch.type, enabled=self.precision == "fp16")

    def place(self, module: AnyModule) -> AnyModule:
        """Move ``module`` to the device; convolutions get the memory order that is fastest, matrices stay the same."""
        return module.to(self.torch, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def move(self, value: AnyTree) -> AnyTree:
        """Copy the tensors of ``value`` to the device without making the host wait; a CPU gets them as they are."""
        return value if self.torch.type == "cpu" else self.block_of(value)[1]

    def block_of(self, value: AnyTree) -> tuple[Tensor, AnyTree]:
        """Copy the tensors of ``value``, which are on the host, into one block on the device.

        The GPU gets them in one copy from one block of pinned memory. With other memory, the host would wait
        until the GPU has finished all earlier work. torch keeps the block until the copy is finished, and reuses it for
        a later copy.

        Returns:
            The block, and ``value`` with tensors that lie in it.
        """
        block = self.pinned(value).to(self.torch, non_blocking=True)
        copies = iter(_parts(block, tensors_of(value)))
        return block, mapped(value, lambda _: next(copies))

    def pinned(self, value: Any) -> Tensor:
        """Return a block of pinned memory with the tensors of ``value``, as ``block_of`` copies it."""
        tensors = tensors_of(value)
        block = torch.empty(sum(map(_aligned_size, tensors)), dtype=torch.uint8, pin_memory=self.torch.type == "cuda")
        for tensor, part in zip(tensors, _parts(block, tensors), strict=True):
            part.copy_(tensor)
        return block


class _Rounding(torch.autograd.Function):
    """Weights in low precision, by one kernel for all of them, and their gradients in float32, by another one."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # what an update does not use has no gradient
        return _copies(weights, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        copies = iter(_copies(tuple(one for one in gradients if one is not None), torch.float32))
        return None, *(None if one is None else next(copies) for one in gradients)


def _copies(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    copies = tuple(torch.empty_like(tensor, dtype=dtype) for tensor in tensors)
    torch._foreach_copy_(copies, tensors)  # private: the public way is a kernel for each tensor
    return copies


def _aligned_size(tensor: Tensor) -> int:
    return rounded_up(tensor.numel() * tensor.element_size(), _ALIGNMENT)


def _parts(block: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a block of bytes that hold ``tensors``, with their types and shapes."""
    buffers = block.split([_aligned_size(tensor) for tensor in tensors])
    return [
        buffer[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        for tensor, buffer in zip(tensors, buffers, strict=True)
    ]


_ON_HOST = frozenset({"index", "output_numbers"})
"""Fields of batches that stay on the host."""


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with ``function`` of each tensor in its dataclasses, mappings, tuples and lists, in order."""
    if isinstance(value, Tensor):
        return function(value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.name not in _ON_HOST]
        return replace(value, **{name: mapped(getattr(value, name), function) for name in names})
    if isinstance(value, Mapping):
        return {key: mapped(part, function) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(mapped(part, function) for part in value)
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of ``value`` in the order of ``mapped``."""
    tensors: list[Tensor] = []
    mapped(value, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return tensors


def shape_of(value: Any) -> Hashable:
    """Return what of ``value`` a graph has as constants: shapes, types, and all that is no tensor."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device.type
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(shape_of(getattr(value, field.name)) for field in fields(value) if field.name not in _ON_HOST)
    if isinstance(value, Mapping):
        return tuple((key, shape_of(part)) for key, part in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(shape_of, value))
    return repr(value) if isinstance(value, slice) else value


class OutOfMemory(TrainingError):
    """A GPU has no memory left."""

    remedy = "Take a smaller optim.batch_size with optim.accumulation (teacher.optim... for the teacher), "
    remedy += override("runtime.gradient_checkpointing", True) + ", or fewer runtime.workers_per_gpu."


@contextmanager
def run_errors() -> Iterator[None]:
    """Raise ``OutOfMemory`` in place of torch's error, which names none of the options that help.

    An interrupt stays one where the clean-up of a library fails on it, such as that of ``from_pretrained``.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(str(error).partition(" If reserved")[0]) from error
    except Exception as error:
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes(error)):
            raise KeyboardInterrupt from error
        raise


def _check_cuda(name: str) -> None:
    if not torch.cuda.is_available():
        remedy: str = "Take " + override("runtime.device", "cpu") + " or auto."
        raise UserError("runtime.device", name, "no GPU is visible to torch", remedy)
    if (number := torch.device(name).index or 0) >= torch.cuda.device_count():
        raise UserError("runtime.device", name, f"there are {torch.cuda.device_count()} GPUs, numbered from 0")
    try:
        torch.zeros(1, device=name).add_(1)
    except RuntimeError as error:
        problem = f"this torch has no kernels for {torch.cuda.get_device_name(number)} ({first_line(error)})"
        remedy = "Install a torch built for it: CUDA 12.6 builds still have sm_70."
        raise UserError("runtime.device", name, problem, remedy) from error


# Claims on GPUs, by file locks, so that workers of any launcher, and of several sweeps, do not collide


def claim_gpu(gpus: Sequence[str], workers_per_gpu: int, folder: Path) -> int:
    """Claim a place on a GPU until this process ends, and return the GPU's index; wait while all places are taken.

    The emptiest GPU is taken first.

    Args:
        gpus: names of the GPUs, equal in all processes of the machine.
        folder: folder of the lock files, shared by all processes of the machine, of any user.
    """
    while True:
        for place in range(workers_per_gpu):
            for index, gpu in enumerate(gpus):
                if (lock := try_machine_lock(folder / f"distill-run-{gpu}-{place}.lock")) is not None:
                    _CLAIMS.append(lock)
                    return index
        log.info("waiting for a GPU: all are in use (runtime.device=cuda:0 does not wait)")
        time.sleep(SECONDS_BETWEEN_TRIES)


@cache
def claim_visible_gpu(workers_per_gpu: int) -> int:
    """Claim one of the GPUs that torch sees; later calls in this process return the same GPU."""
    return claim_gpu(_visible_gpus(), workers_per_gpu, Path(tempfile.gettempdir()))


def release_gpu() -> None:
    """Give up this process's place on a GPU, which its next run claims again, and the memory that is not used."""
    while _CLAIMS:
        _CLAIMS.pop().release()
    claim_visible_gpu.cache_clear()
    torch.cuda.empty_cache()


def _visible_gpus() -> list[str]:
    """Return names of the GPUs that torch sees, equal in all processes of the machine.

    Slices of a GPU (MIG) may have its UUID in common: they are known by the names that made them visible.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    slices = [name.strip().replace("/", "-") for name in visible if name.strip().startswith("MIG-")]
    if len(slices) == torch.cuda.device_count():
        return slices
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
