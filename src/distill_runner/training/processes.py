"""Training in several processes, each of which computes a part of every update.

The main process is the run itself; it alone decides and writes. ``workers.py`` starts the others on one machine, while
a stage is trained. ``launched.py`` uses those that ``torchrun`` or ``srun`` has started on several machines.

A plain all-reduce sums the gradients after the last backward pass of an update. Each gradient is already weighted by
its share of the examples, so accumulation and uneven updates give the same result as a single process.
``DistributedDataParallel`` does not fit: it averages with equal weights, and it relies on hooks of ``forward``, which
packed batches do not call.
"""

from __future__ import annotations

import pickle
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from distill_runner.common.errors import TrainingError
from distill_runner.common.seeds import stage_seed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Result = TypeVar("Result")
TIMEOUT = timedelta(days=1)
"""Timeout for processes that wait while the main one evaluates and writes; a dead process is noticed at once."""

MAX_MARKS = 255
"""Greatest number of processes whose marks of tokens fit into a byte."""


class WorkerLost(TrainingError):
    """A process of the group has died."""

    remedy = "Repeat the command to resume from the last checkpoint."


class UnequalStart(TrainingError):
    """The processes of a group would not train the same model, since they start from different states."""

    remedy = (
        "Another machine may see an old file: repeat the command. Else compare versions of torch and of this package."
    )


class ProcessGroup:
    """The processes of a training run, as seen by the one numbered ``rank``; a single process pays nothing for calls.

    All processes must call every method except ``is_main`` and ``seed``, in the same order.

    Raises:
        WorkerLost: another process has died.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.size, self.device = rank, size, device or torch.device("cpu")

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def seed(self, seed: int, step: int) -> None:
        """Seed torch in the workers, so that torch's own dropout differs between processes.

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

    def agree(
        self, counts: Tensor, flags: Sequence[bool], tokens: Tensor | None = None
    ) -> tuple[Tensor, list[bool], Tensor | None]:
        """Return the sums of ``counts``, the flags that any process sets, and the tokens that any process marks.

        All of it takes one call of gloo, which waits for no GPU.

        Args:
            counts: whole numbers, (C,) in int64.
            flags: the same number of flags in all processes.
            tokens: marks (V,) of 0 or 1 in uint8, with V a multiple of 8. Eight are added at once as bytes of an int64,
                so there may be at most ``MAX_MARKS`` processes.
        Returns:
            the sums, the flags, and the sorted numbers of the tokens (U,); None without ``tokens``.
        """
        if self.size == 1:
            return counts, list(flags), None if tokens is None else tokens.nonzero().squeeze(-1)
        marks = [] if tokens is None else [tokens.view(torch.int64)]
        message = torch.cat([counts, torch.tensor(flags, dtype=torch.int64), *marks])
        with worker_errors():
            dist.all_reduce(message)
        sums, votes, rest = message.split([len(counts), len(flags), len(message) - len(counts) - len(flags)])
        return sums, [bool(vote) for vote in votes], rest.view(torch.uint8).nonzero().squeeze(-1) if marks else None

    def require_equal(self, describe: Callable[[], str]) -> None:
        """Compare a description of the state of each process with that of the main one; a single one describes none.

        Raises:
            UnequalStart: they differ.
        """
        if self.size == 1:
            return
        states: list[Any] = [None] * self.size
        with worker_errors():
            dist.all_gather_object(states, (socket.gethostname(), describe()))
        for rank, (host, other) in enumerate(states):
            if other != states[0][1]:
                raise UnequalStart(f"process {rank} on {host} starts from {other}, process 0 from {states[0][1]}")

    def any_process(self, flag: bool) -> bool:
        """Return whether ``flag`` is set in any process."""
        if self.size == 1:
            return flag
        votes = torch.tensor(int(flag))
        with worker_errors():
            dist.all_reduce(votes, dist.ReduceOp.MAX)
        return bool(votes)

    def barrier(self) -> None:
        """Wait until all processes have called this method."""
        self.any_process(False)

    def broadcast_from_main(self, compute: Callable[[], Result]) -> Result:
        """Run ``compute`` in the main process and return its result in all processes."""
        if self.size == 1:
            return compute()
        results: list[Any] = [compute() if self.is_main else None]
        with worker_errors():
            dist.broadcast_object_list(results, src=0, device=torch.device("cpu"))
        result: Result = results[0]
        return result


SINGLE_PROCESS = ProcessGroup()


def join_group(
    rank: int, size: int, device: torch.device, store: Store, report_ready: Callable[[], object] = lambda: None
) -> ProcessGroup:
    """Join ``size`` processes that meet in ``store``; returns when all have come.

    Args:
        report_ready: called when this process has its device, before it waits. An earlier error keeps no one waiting.
    Raises:
        WorkerLost: another process has died.
    """
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    report_ready()
    with worker_errors():
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return ProcessGroup(rank, size, device)


def take_part(
    join: Callable[[], ProcessGroup], job: Callable[[ProcessGroup], None], send: Callable[[BaseException], None]
) -> None:
    """Run ``job`` in a process that is not the main one; ``send`` gets its error, since only that one prints it."""
    try:
        group = join()
        job(group)
        group.barrier()
    except WorkerLost:
        pass
    except BaseException as error:
        send(sendable(error))
    finally:
        leave_group()


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def worker_errors() -> Iterator[None]:
    """Turn any RuntimeError into ``WorkerLost``: torch has no special error class for a peer process that has died."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerLost("the training processes have lost contact with each other") from error


def sendable(error: BaseException) -> BaseException:
    """Return ``error`` with its traceback as a note, or a RuntimeError with its text if it cannot be pickled."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


# Batch normalization over the examples of all processes. Each process sees only a part of the examples, and statistics
# of that part alone would train a different model. torch.nn.SyncBatchNorm works on GPUs only; this works on CPUs too.


class AllReduceSum(Function):
    """Sum a tensor over all processes, and sum its gradient over all processes as well.

    The sum enters the loss of every process, so each process contributes to the gradient.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        values = values.clone()
        with worker_errors():
            dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total: Tensor = AllReduceSum.apply(gradients[0])
        return total


class SyncBatchNorm2d(nn.BatchNorm2d):
    """``BatchNorm2d`` with mean and variance over the examples of all processes, gradients included.

    The variance is computed in a second pass, because E[x²] - E[x]² would lose digits. If a small update has no batch
    left for a process, the process repeats a batch of another process, whose examples then count once more.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        full = x.to(torch.promote_types(x.dtype, torch.float32))
        totals = AllReduceSum.apply(torch.cat([full.sum((0, 2, 3)), full.new_tensor([x.numel() / x.shape[1]])]))
        mean, count = totals[:-1] / totals[-1], totals[-1]
        centered = full - mean[:, None, None]
        variance = AllReduceSum.apply(centered.square().sum((0, 2, 3))) / count
        self._update_running_statistics(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        scale = self.weight * (variance + self.eps).rsqrt()
        normed: Tensor = centered * scale[:, None, None] + self.bias[:, None, None]
        return normed.to(x.dtype)

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running mean and variance used in evaluation."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)


def convert_sync_batch_norm(model: nn.Module, group: ProcessGroup) -> None:
    """Let every ``BatchNorm2d`` of ``model`` use statistics over all processes; weights keep their names."""
    if group.size == 1:
        return
    assert dist.is_initialized()
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SyncBatchNorm2d
