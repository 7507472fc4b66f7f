"""Training in several processes of one machine, each of which computes a part of every update.

The first process is the run itself; it alone evaluates, decides and writes. The others exist while a stage is trained.
A plain all-reduce sums the gradients after the last backward pass of an update. Each gradient is already weighted by
its share of the examples, so accumulation and uneven updates give the same result as a single process.
``DistributedDataParallel`` does not fit: it averages with equal weights, and it relies on hooks of ``forward``, which
packed batches do not call.
"""

import multiprocessing
import pickle
import signal
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
from torch import Tensor

from distill_runner.common.errors import TrainingError, exit_cause
from distill_runner.common.orphans import end_with_parent
from distill_runner.common.seeds import stage_seed
from distill_runner.training.devices import computing

Found = TypeVar("Found")
PATIENCE = timedelta(days=1)
"""Timeout for processes that wait while the first one evaluates and writes; a dead process is noticed at once."""
GRACE_SECONDS = 10.0


class Lost(TrainingError):
    """A process of the group has died."""

    remedy = "Repeat the command to resume from the last checkpoint."


class ProcessGroup:
    """The processes of a training, as seen by the process numbered ``rank``; with a single process, calls cost nothing.

    All processes must call every method except ``first`` and ``seed``, in the same order.

    Raises:
        Lost: another process has died.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def first(self) -> bool:
        return self.rank == 0

    def seed(self, seed: int, step: int) -> None:
        """Seed torch in all processes except the first, so that torch's own dropout differs between processes.

        The seed depends on ``step``, so resuming needs no saved state.
        """
        if not self.first:
            torch.manual_seed(stage_seed(seed, f"process {self.rank}, step {step}"))

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the processes.

        All tensors of one device and dtype are summed in one call. gloo takes about a millisecond even for the smallest
        tensor, and several concurrent all-reduces of gloo have been seen to deadlock.
        """
        if self.size == 1:
            return
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for alike in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            with peers():
                dist.all_reduce(flat)
            for tensor, found in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(found.view_as(tensor))

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is set in any process."""
        if self.size == 1:
            return flag
        votes = torch.tensor(int(flag))
        with peers():
            dist.all_reduce(votes, dist.ReduceOp.MAX)
        return bool(votes)

    def wait(self) -> None:
        """Wait until all processes have called this method."""
        self.any(False)

    def by_first(self, compute: Callable[[], Found]) -> Found:
        """Run ``compute`` in the first process and return its result in all processes."""
        if self.size == 1:
            return compute()
        found: list[Any] = [compute() if self.first else None]
        with peers():
            dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
        result: Found = found[0]
        return result


ALONE = ProcessGroup()


@contextmanager
def together(devices: Sequence[torch.device], job: Callable[[ProcessGroup], None]) -> Iterator[ProcessGroup]:
    """Start a process that runs ``job`` for each device after the first; yield the group, with this process as first.

    Args:
        job: function that each further process runs; must be picklable.
    Raises:
        Lost: a process has died without an error. An error raised in a further process is raised here instead.
    """
    if len(devices) == 1:
        yield ALONE
        return
    with TemporaryDirectory() as folder:
        others = [_Other(rank, devices, Path(folder), job) for rank in range(1, len(devices))]
        try:
            for other in others:
                other.arrive()
            group = _join(0, devices, Path(folder))
            yield group
            group.wait()
        except Lost as error:
            raise _cause(others) from error
        finally:
            _leave()
            for other in others:
                other.end()


class _Other:
    """A further process, as seen by the first process."""

    def __init__(
        self, rank: int, devices: Sequence[torch.device], folder: Path, job: Callable[[ProcessGroup], None]
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([getattr(job, "func", job).__module__])  # for a partial, its function's module
        self.connection, theirs = context.Pipe(duplex=False)
        arguments = (theirs, rank, devices, folder, torch.get_num_threads(), job)
        self.process: BaseProcess = context.Process(target=_take_part, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def arrive(self) -> None:
        """Wait until the process is about to join, so that no process waits for one that could not start."""
        try:
            self.connection.recv()
        except EOFError as error:
            raise Lost("a training process did not start") from error

    def error(self) -> BaseException | None:
        """Return the error that ended the process; None if it only lost the other processes."""
        try:
            if self.connection.poll(GRACE_SECONDS):
                error: BaseException = self.connection.recv()
                return error
        except EOFError:
            self.process.join(GRACE_SECONDS)
            if self.process.exitcode:
                return Lost(exit_cause(self.process.exitcode))
        return None

    def end(self) -> None:
        self.process.join(GRACE_SECONDS)
        self.process.kill()
        self.process.join()


def _cause(others: Sequence[_Other]) -> BaseException:
    errors = [error for other in others if (error := other.error())]
    return errors[0] if errors else Lost("the training processes have lost contact with each other")


@computing()
def _take_part(
    connection: Connection,
    rank: int,
    devices: Sequence[torch.device],
    folder: Path,
    threads: int,
    job: Callable[[ProcessGroup], None],
) -> None:
    """Run ``job`` in a further process; send its error to the first process, which alone prints messages."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; before training, only the first reacts
    torch.set_num_threads(threads)
    try:
        connection.send(None)
        group = _join(rank, devices, folder)
        job(group)
        group.wait()
    except Lost:
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
    with peers():
        dist.init_process_group(
            backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=len(devices), timeout=PATIENCE
        )
    return ProcessGroup(rank, len(devices))


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def peers() -> Iterator[None]:
    """Turn any RuntimeError into ``Lost``: torch has no special error class for a peer process that has died."""
    try:
        yield
    except RuntimeError as error:
        raise Lost("the training processes have lost contact with each other") from error


def _sendable(error: BaseException) -> BaseException:
    """Return ``error`` with its traceback as a note, or a RuntimeError with its text if it cannot be pickled."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
