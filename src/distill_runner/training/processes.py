"""Training in several processes, which ``torchrun`` starts: each computes a part of every update.

The process of rank 0 is the run itself; it alone decides and writes. The others follow it: they take part in the
training of each stage, and end with it. ``torchrun`` ends all of them when one dies, and may start them again.

A plain all-reduce sums the gradients after the last backward pass of an update. Each gradient is already weighted by
its share of the examples, so accumulation and uneven updates give the same result as a single process.
``DistributedDataParallel`` does not fit: it averages with equal weights, and it relies on hooks of ``forward``, which
packed batches do not call.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distill_runner.common.errors import TrainingError, TrainingPaused, UserError
from distill_runner.common.library_switches import computation_mode
from distill_runner.common.process import ignore_interrupts
from distill_runner.common.seeds import stage_seed

Computed = TypeVar("Computed")
TIMEOUT = timedelta(days=30)
"""Timeout for processes that wait while the main one prepares a stage; a dead process is noticed at once."""


class WorkerLost(TrainingError):
    """A process of the group has died."""

    remedy = "Repeat the command to resume from the last checkpoint."


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a training run, as seen by the one numbered ``rank``; a single process pays nothing for calls.

    All processes must call every method except ``is_main`` and ``seed``, in the same order.

    Raises:
        WorkerLost: another process has died.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def seed(self, seed: int, step: int) -> None:
        """Seed torch in all processes but the main one, so that torch's own dropout differs between processes.

        The seed depends on ``step``, so resuming needs no saved state.
        """
        if not self.is_main:
            torch.manual_seed(stage_seed(seed, f"process {self.rank}, step {step}"))

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the processes.

        All tensors of one device and dtype are summed in one call. gloo takes about a millisecond even for the smallest
        tensor, and several concurrent all-reduces of gloo have been seen to deadlock.
        """
        if self.size == 1:
            return
        buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in tensors:
            buckets.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for bucket in buckets.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with worker_errors():
                dist.all_reduce(flat)
            for tensor, total in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def agree(self, flags: Sequence[bool], counts: Tensor | None = None) -> tuple[list[bool], Tensor | None]:
        """Return the flags that any process sets, and the sums of ``counts``, whole numbers in int64.

        Both take one call of gloo, which waits for no GPU.
        """
        if self.size == 1:
            return list(flags), counts
        message = torch.tensor(flags, dtype=torch.int64)
        if counts is not None:
            message = torch.cat([message, counts])
        with worker_errors():
            dist.all_reduce(message)
        votes, sums = message[: len(flags)], message[len(flags) :]
        return [bool(vote) for vote in votes], None if counts is None else sums

    def broadcast_from_main(self, compute: Callable[[], Computed]) -> Computed:
        """Run ``compute`` in the main process and return its result in all processes."""
        if self.size == 1:
            return compute()
        results: list[Any] = [compute() if self.is_main else None]
        with worker_errors():
            dist.broadcast_object_list(results, src=0, device=torch.device("cpu"))
        return results[0]

    # Jobs of the main process for the others

    def start(self, job: Callable[[], object] | None) -> None:
        """Let all other processes run ``job``, which can be pickled, as the main one does now; None ends them."""
        self.broadcast_from_main(lambda: job)

    def follow(self) -> int:
        """Run the jobs of the main process until it ends; return the exit code of this process.

        A lost process is no error of this one: the main one reports it.
        """
        ignore_interrupts()
        with suppress(KeyboardInterrupt, WorkerLost), computation_mode():
            while (job := self.broadcast_from_main(lambda: None)) is not None:
                with suppress(TrainingPaused, UserError):  # which the main process reports
                    job()
            return 0
        return 1


SINGLE_PROCESS = ProcessGroup()


def join_launched() -> ProcessGroup:
    """Meet the other processes that ``torchrun`` has started, as its environment variables say."""
    has_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpus else "gloo", timeout=TIMEOUT)
    return current_group()


def current_group() -> ProcessGroup:
    """Return the processes that this one has met; itself alone if it has met none."""
    return ProcessGroup(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else SINGLE_PROCESS


@contextmanager
def worker_errors() -> Iterator[None]:
    """Turn any RuntimeError into ``WorkerLost``: torch has no special error class for a peer process that has died."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerLost("the training processes have lost contact with each other") from error


def share_batch_norm(model: nn.Module, group: ProcessGroup, device: torch.device) -> None:
    """Let batch normalization take the mean and variance of the examples of all processes, as a single one does.

    Statistics of the examples of one process would train a different model.

    Raises:
        UserError: there are several processes on CPUs, where torch does not synchronize it.
    """
    if group.size == 1 or not any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        return
    if device.type != "cuda":
        problem = "several processes share batch normalization on GPUs only"
        raise UserError("runtime.device", device.type, problem, "Start the run without torchrun.")
    nn.SyncBatchNorm.convert_sync_batchnorm(model)
