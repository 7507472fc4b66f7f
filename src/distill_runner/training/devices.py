"""The device of computations: its choice, claims on shared GPUs, and copies of batches to it."""

import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import BaseFileLock
from torch import Tensor, nn
from torch.amp import GradScaler

from distill_runner.common.errors import TrainingError, UserError
from distill_runner.common.library_switches import allow_tf32, linear_by
from distill_runner.common.locks import try_machine_lock
from distill_runner.datasets.batches import LENGTH_MULTIPLE, Batch
from distill_runner.models.extract import compile_layers
from distill_runner.training.config import Precision
from distill_runner.training.precision import LOW_PRECISION, check_precision, rounded_weights
from distill_runner.training.products import Library, by_onednn

log = logging.getLogger(__name__)

Item = TypeVar("Item")
AnyModule = TypeVar("AnyModule", bound=nn.Module)
DeviceOfType = Callable[[str], torch.device]
SECONDS_BETWEEN_TRIES = 2.0
_ALIGNMENT = 16
"""Alignment in bytes of each tensor in a block: valid for every dtype, and fast in kernels."""
_CLAIMS: list[BaseFileLock] = []
"""Locks of this process on GPUs. The kernel frees them when the process ends, however it ends."""
_END = object()


def available_cpus() -> int:
    """Return the number of CPUs that this process may use: by its affinity, and by the quota of its container."""
    import joblib  # takes 0.1 s

    return int(joblib.cpu_count())


@dataclass(frozen=True)
class Device:
    """A torch device and how models run on it: the precision of matrix products, and whether layers are compiled.

    Weights and losses stay float32. ``tf32`` means float32 products of rounded factors, on GPUs since Ampere.

    Attributes:
        products: library that computes the products of linear layers, in float32 on a CPU.
    """

    torch: torch.device
    precision: Precision
    compile: bool = False
    products: Library = "MKL"

    @classmethod
    def from_name(cls, name: str, precision: Precision, workers_per_gpu: int = 1) -> "Device":
        """Return the device called ``name``.

        ``auto`` claims a place on a GPU if the machine has one, and waits while all places are taken; without a GPU it
        takes the CPU. ``cuda`` and ``cuda:1`` do not wait.

        Raises:
            UserError: the device does not exist, torch has no kernels for it, or it lacks the precision.
        """
        if name == "auto":
            name = f"cuda:{claim_visible_gpu(workers_per_gpu)}" if torch.cuda.is_available() else "cpu"
        if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
            raise UserError("runtime.device", name, "is not a device", "Take auto, cpu, cuda or cuda:<number>.")
        device = torch.device(name)
        if device.type == "cuda":
            _check_cuda(name)
            if device.index is None:  # some functions of torch need a number
                device = torch.device("cuda", torch.cuda.current_device())
        check_precision(precision, device)
        allow_tf32(precision == "tf32")
        return cls(device, precision)

    @classmethod
    def for_processes(cls, name: str, precision: Precision, workers_per_gpu: int, count: int) -> list["Device"]:
        """Return a device for each of ``count`` processes: a GPU for each under ``auto``, otherwise the CPU for all.

        Raises:
            UserError: for the reasons of ``from_name``; or several processes ask for one GPU, or for more GPUs than
                there are.
        """
        if count == 1 or name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
            return [cls.from_name(name, precision, workers_per_gpu)] * count
        if name != "auto":
            raise UserError("runtime.device", name, f"cannot be used with {count} processes", "Take auto or cpu.")
        if count > (num_gpus := torch.cuda.device_count()):
            problem = f"each process needs its own GPU, and there are {num_gpus}"
            raise UserError("runtime.num_processes", count, problem, f"Take at most {num_gpus}, or runtime.device=cpu.")
        return [cls.from_name(f"cuda:{number}", precision) for number in claim_visible_gpus(count)]

    @classmethod
    def of_launched_process(cls, name: str, precision: Precision, device: DeviceOfType) -> "Device":
        """Return the device of a process that a launcher has started, one of several on its machine.

        Args:
            device: returns this process's own device, given its type.
        Raises:
            UserError: for the reasons of ``from_name``; or ``name`` is one GPU, but each process takes another one.
        """
        if name not in ("auto", "cpu", "cuda"):
            problem = "is one device, but each process of torchrun or srun takes the GPU with its number"
            raise UserError("runtime.device", name, problem, "Take auto, cpu or cuda.")
        is_gpu = name == "cuda" or (name == "auto" and torch.cuda.is_available())
        return cls.from_name(str(device("cuda" if is_gpu else "cpu")), precision)

    @property
    def length_multiple(self) -> int | None:
        """Multiple to which attention pads sequence lengths (see ``batches``); None pads the batch as one group.

        On a GPU, one attention call for the whole batch is faster than many small calls. A compiled layer has a graph
        for one number of groups. In low precision, a CPU multiplies blocks of 32 columns and compiles a kernel for each
        shape.
        """
        if self.torch.type != "cpu" or self.compile:
            return None
        return 2 * LENGTH_MULTIPLE if self.precision in LOW_PRECISION else LENGTH_MULTIPLE

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision not in LOW_PRECISION:
            return nullcontext()
        return torch.autocast(self.torch.type, LOW_PRECISION[self.precision])

    @contextmanager
    def forward(self, model: nn.Module) -> Iterator[None]:
        """Return a context for forward passes of ``model``: ``autocast``, with the weights rounded at once."""
        dtype = LOW_PRECISION.get(self.precision)
        linear = linear_by(by_onednn) if self.products == "oneDNN" else nullcontext()
        with self.autocast(), rounded_weights(model, dtype) if dtype else nullcontext(), linear:
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
        parts = [(part, name) for part in (batch, *batch.groups) for name in _device_fields(part)]
        copies = self.send([getattr(part, name) for part, name in parts])
        moved: dict[int, dict[str, Any]] = {id(part): {} for part in (batch, *batch.groups)}
        for (part, name), tensor in zip(parts, copies, strict=True):
            moved[id(part)][name] = tensor
        if batch.groups:
            moved[id(batch)]["groups"] = tuple(replace(group, **moved[id(group)]) for group in batch.groups)
        return replace(batch, **moved[id(batch)])

    def prefetch(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yield the same items; for a GPU, a thread makes each item while the previous item is used.

        On a CPU, such a thread would compete with the computation.
        """
        if self.torch.type != "cuda":
            return items
        return prefetch(items, partial(torch.cuda.set_device, self.torch))

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy host tensors to the device; a GPU gets them in one copy from one block of pinned memory.

        With memory that is not pinned, the host would wait until the GPU has finished all earlier work. torch keeps the
        block until the copy is finished, and reuses it for a later copy.
        """
        if self.torch.type == "cpu" or not tensors:
            return list(tensors)
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        aligned_sizes = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        block = torch.empty(sum(aligned_sizes), dtype=torch.uint8, pin_memory=self.torch.type == "cuda")
        for tensor, buffer, size in zip(tensors, block.split(aligned_sizes), sizes, strict=True):
            buffer[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        buffers = block.to(self.torch, non_blocking=True).split(aligned_sizes)
        return [
            buffer[:size].view(tensor.dtype).view(tensor.shape)
            for tensor, buffer, size in zip(tensors, buffers, sizes, strict=True)
        ]


def _device_fields(part: Any) -> list[str]:
    """Return the names of the tensors that a device needs, of a batch or of one of its groups."""
    on_host = ("index", "output_rows")
    names = [field.name for field in fields(part) if field.name not in on_host]
    return [name for name in names if isinstance(getattr(part, name), Tensor)]


def prefetch(items: Iterator[Item], initializer: Callable[[], None] = lambda: None) -> Iterator[Item]:
    """Yield ``items`` in order; a thread makes each item while the caller uses the previous item.

    An exception from making an item is raised when the caller asks for that item. The thread ends with the iterator.

    Args:
        initializer: function called once in the thread, before the first item is made.
    """
    with ThreadPoolExecutor(1, "prefetch", initializer) as thread:
        future = thread.submit(next, items, _END)
        while (item := future.result()) is not _END:
            future = thread.submit(next, items, _END)
            yield item  # type: ignore[misc]


class OutOfMemory(TrainingError):
    """A GPU has no memory left."""

    remedy = (
        "Take a smaller optim.batch_size with optim.accumulation (teacher.optim... for the teacher), "
        "runtime.gradient_checkpointing=true, or fewer runtime.workers_per_gpu."
    )


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise ``OutOfMemory`` in place of torch's error, which names none of the options that help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(str(error).partition(" If reserved")[0]) from error


def _check_cuda(name: str) -> None:
    if not torch.cuda.is_available():
        raise UserError("runtime.device", name, "no GPU is visible to torch", "Take runtime.device=cpu or auto.")
    if (number := torch.device(name).index or 0) >= torch.cuda.device_count():
        raise UserError("runtime.device", name, f"there are {torch.cuda.device_count()} GPUs, numbered from 0")
    major, minor = torch.cuda.get_device_capability(number)
    built = torch.cuda.get_arch_list()
    if built and not any(_serves(architecture, (major, minor)) for architecture in built):
        gpu = torch.cuda.get_device_name(number)
        problem = f"this torch has no kernels for {gpu} (sm_{major}{minor}; it has {', '.join(built)})"
        remedy = "Install a torch built for it: CUDA 12.6 builds still have sm_70."
        raise UserError("runtime.device", name, problem, remedy)


def _serves(architecture: str, capability: tuple[int, int]) -> bool:
    """Return whether code for an architecture of ``torch.cuda.get_arch_list`` runs on a GPU of this capability.

    Machine code (``sm_86``) runs on GPUs of its generation that are as new; the driver compiles PTX (``compute_80``)
    for all newer GPUs. Code for one architecture or family alone (``sm_90a``, ``sm_100f``) counts as machine code.
    """
    if not (match := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)):
        return False
    built = int(match[2]), int(match[3])
    if match[4] == "a":
        return built == capability
    return built <= capability and (built[0] == capability[0] or (match[1] == "compute" and not match[4]))


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


def claim_gpus(gpus: Sequence[str], count: int, folder: Path) -> list[int]:
    """Claim the first place on each of ``count`` GPUs, for processes that train together; return the GPUs' indices."""
    # Else two callers could wait for each other's GPUs.
    while (turn := try_machine_lock(folder / "distill-run-several.lock")) is None:
        time.sleep(SECONDS_BETWEEN_TRIES)
    try:
        return [claim_gpu(gpus, 1, folder) for _ in range(count)]
    finally:
        turn.release()


@cache
def claim_visible_gpu(workers_per_gpu: int) -> int:
    """Claim one of the GPUs that torch sees; later calls in this process return the same GPU."""
    return claim_gpu(_visible_gpus(), workers_per_gpu, Path(tempfile.gettempdir()))


@cache
def claim_visible_gpus(count: int) -> list[int]:
    """Claim several of the GPUs that torch sees; later calls in this process return the same GPUs."""
    return claim_gpus(_visible_gpus(), count, Path(tempfile.gettempdir()))


def _visible_gpus() -> list[str]:
    """Return names of the GPUs that torch sees, equal in all processes of the machine.

    Slices of a GPU (MIG) may have its UUID in common: they are known by the names that made them visible.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    slices = [name.strip().replace("/", "-") for name in visible if name.strip().startswith("MIG-")]
    if len(slices) == torch.cuda.device_count():
        return slices
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
