"""Training in several processes of one machine, each of which computes a part of every update.

The main process is the run itself; it alone evaluates, decides and writes. Worker processes exist while a stage is
trained.

A plain all-reduce sums the gradients after the last backward pass of an update. Each gradient is already weighted by
its share of the examples, so accumulation and uneven updates give the same result as a single process.
``DistributedDataParallel`` does not fit: it averages with equal weights, and it relies on hooks of ``forward``, which
packed batches do not call.
"""

import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from distill_runner.common.errors import TrainingError, exit_cause
from distill_runner.common.process import (
    computation_mode,
    end_with_parent,
    ignore_interrupts,
    limit_threads,
    use_forkserver,
)
from distill_runner.common.seeds import stage_seed

Result = TypeVar("Result")
TIMEOUT = timedelta(days=1)
"""Timeout for processes that wait while the main one evaluates and writes; a dead process is noticed at once."""
GRACE_SECONDS = 10.0
"""Time that a worker has to send its error, or to end."""


class WorkerLost(TrainingError):
    """A process of the group has died."""

    remedy = "Repeat the command to resume from the last checkpoint."


class ProcessGroup:
    """The processes of a training run, as seen by the one numbered ``rank``; a single process pays nothing for calls.

    All processes must call every method except ``is_main`` and ``seed``, in the same order.

    Raises:
        WorkerLost: another process has died.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

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


@contextmanager
def spawn_group(devices: Sequence[torch.device], job: Callable[[ProcessGroup], None]) -> Iterator[ProcessGroup]:
    """Start a worker for each device after the first, and yield the group, with this process as the main one.

    Args:
        job: function that each worker runs; must be picklable.
    Raises:
        WorkerLost: a worker has died without an error. An error raised in a worker is raised here instead.
    """
    if len(devices) == 1:
        yield SINGLE_PROCESS
        return
    with TemporaryDirectory() as folder:
        workers = [_Worker(rank, devices, Path(folder), job) for rank in range(1, len(devices))]
        try:
            for worker in workers:
                worker.wait_until_ready()
            group = _join(0, devices, Path(folder))
            yield group
            group.barrier()
        except WorkerLost as error:
            raise _cause(workers) from error
        finally:
            _leave()
            for worker in workers:
                worker.end()


class _Worker:
    """A worker process, as seen by the main process."""

    def __init__(
        self, rank: int, devices: Sequence[torch.device], folder: Path, job: Callable[[ProcessGroup], None]
    ) -> None:
        context = use_forkserver(getattr(job, "func", job).__module__)  # for a partial, its function's module
        self.connection, worker_end = context.Pipe(duplex=False)
        arguments = (worker_end, rank, devices, folder, torch.get_num_threads(), job)
        self.process: BaseProcess = context.Process(target=_run_worker, args=arguments, daemon=True)
        self.process.start()
        worker_end.close()

    def wait_until_ready(self) -> None:
        """Wait until the process is about to join, so that no process waits for one that could not start."""
        try:
            self.connection.recv()
        except EOFError as error:
            raise WorkerLost("a training process did not start") from error

    def error(self) -> BaseException | None:
        """Return the error that ended the process; None if it only lost the other processes."""
        try:
            if self.connection.poll(GRACE_SECONDS):
                error: BaseException = self.connection.recv()
                return error
        except EOFError:
            self.process.join(GRACE_SECONDS)
            if self.process.exitcode:
                return WorkerLost(exit_cause(self.process.exitcode))
        return None

    def end(self) -> None:
        self.process.join(GRACE_SECONDS)
        self.process.kill()
        self.process.join()


def _cause(workers: Sequence[_Worker]) -> BaseException:
    errors = [error for worker in workers if (error := worker.error())]
    return errors[0] if errors else WorkerLost("the training processes have lost contact with each other")


@computation_mode()
def _run_worker(
    connection: Connection,
    rank: int,
    devices: Sequence[torch.device],
    folder: Path,
    threads: int,
    job: Callable[[ProcessGroup], None],
) -> None:
    """Run ``job`` in a worker; send its error to the main process, which alone prints messages."""
    end_with_parent()
    ignore_interrupts()
    limit_threads(threads)
    try:
        connection.send(None)
        group = _join(rank, devices, folder)
        job(group)
        group.barrier()
    except WorkerLost:
        pass
    except BaseException as error:
        connection.send(_sendable(error))
    finally:
        connection.close()
        _leave()


def _join(rank: int, devices: Sequence[torch.device], folder: Path) -> ProcessGroup:
    device, backend = devices[rank], "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    with worker_errors():
        dist.init_process_group(
            backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=len(devices), timeout=TIMEOUT
        )
    return ProcessGroup(rank, len(devices))


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def worker_errors() -> Iterator[None]:
    """Turn any RuntimeError into ``WorkerLost``: torch has no special error class for a peer process that has died."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerLost("the training processes have lost contact with each other") from error


def _sendable(error: BaseException) -> BaseException:
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
