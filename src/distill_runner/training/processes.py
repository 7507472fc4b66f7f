"""One training in several processes of one machine: each computes a part of every update.

The first process is the run itself and alone reads, decides and writes; the others are there while a stage is trained.
Gradients are added up by a plain all-reduce after the last backward pass of an update, each already weighted by its
share of the examples, so that accumulation and uneven updates come out as in one process. ``DistributedDataParallel``
would not do: it averages with equal weights, and hooks on a ``forward`` that packed batches do not go through.
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
"""The first process evaluates and writes while others wait; one that is gone is noticed at once all the same."""
GRACE_SECONDS = 10.0


class Lost(TrainingError):
    """A process of the group is gone."""

    remedy = "The same command goes on from the last checkpoint."


class ProcessGroup:
    """The processes of a training as the one numbered ``rank`` sees them; of a single one, everything is free.

    All but ``first`` and ``seed`` must be called by all processes, in the same order.

    Raises:
        Lost: another process is gone.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def first(self) -> bool:
        return self.rank == 0

    def seed(self, seed: int, step: int) -> None:
        """Torch's own dropout, where that is used, differs between processes; by the step: resuming needs no state."""
        if not self.first:
            torch.manual_seed(stage_seed(seed, f"process {self.rank}, step {step}"))

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over the processes.

        All of one kind go at once: gloo takes about a millisecond for however small a tensor, and several of its
        all-reduces under way together have been seen to wait for each other for ever.
        """
        if self.size == 1:
            return
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for alike in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            with _peers():
                dist.all_reduce(flat)
            for tensor, found in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(found.view_as(tensor))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        if self.size == 1:
            return flag
        votes = torch.tensor(int(flag))
        with _peers():
            dist.all_reduce(votes, dist.ReduceOp.MAX)
        return bool(votes)

    def wait(self) -> None:
        """Until all processes are here."""
        self.any(False)

    def by_first(self, compute: Callable[[], Found]) -> Found:
        """What the first process computes, for all."""
        if self.size == 1:
            return compute()
        found: list[Any] = [compute() if self.first else None]
        with _peers():
            dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
        result: Found = found[0]
        return result


ALONE = ProcessGroup()


@contextmanager
def together(devices: Sequence[torch.device], job: Callable[[ProcessGroup], None]) -> Iterator[ProcessGroup]:
    """A group with this process as its first, while one more for each further device does ``job``.

    Args:
        job: what the others do; picklable.
    Raises:
        Lost: a process is gone without a word; what another one has raised is raised here.
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
    """A further process, as the first one sees it."""

    def __init__(
        self, rank: int, devices: Sequence[torch.device], folder: Path, job: Callable[[ProcessGroup], None]
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([getattr(job, "func", job).__module__])  # of a partial, its function's
        self.connection, theirs = context.Pipe(duplex=False)
        arguments = (theirs, rank, devices, folder, torch.get_num_threads(), job)
        self.process: BaseProcess = context.Process(target=_take_part, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def arrive(self) -> None:
        """Until it is about to join: nobody would wait in vain for one that could not be started."""
        try:
            self.connection.recv()
        except EOFError as error:
            raise Lost("a process of the training did not start") from error

    def error(self) -> BaseException | None:
        """What ended it, None if it only lost the others."""
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
    return errors[0] if errors else Lost("the processes of the training have lost each other")


@computing()
def _take_part(
    connection: Connection,
    rank: int,
    devices: Sequence[torch.device],
    folder: Path,
    threads: int,
    job: Callable[[ProcessGroup], None],
) -> None:
    """In a further process: the job, its error told to the first process, which alone speaks."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; until training heeds it, the first one does
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
    with _peers():
        dist.init_process_group(
            backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=len(devices), timeout=PATIENCE
        )
    return ProcessGroup(rank, len(devices))


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _peers() -> Iterator[None]:
    """What torch raises when a process is gone has no class of its own."""
    try:
        yield
    except RuntimeError as error:
        raise Lost("the processes of the training have lost each other") from error


def _sendable(error: BaseException) -> BaseException:
    """The error with its traceback as a note, or at least its text: not all errors survive pickling."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
