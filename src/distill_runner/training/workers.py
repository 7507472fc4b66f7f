"""Starts the processes of a training run: workers of this machine, or those that a launcher has started before."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from distill_runner.common.errors import exit_cause
from distill_runner.common.library_switches import computation_mode, limit_threads
from distill_runner.common.process import end_with_parent, ignore_interrupts, use_forkserver
from distill_runner.training.launched import Job, StartedJob, launched_peers
from distill_runner.training.processes import (
    SINGLE_PROCESS,
    ProcessGroup,
    WorkerLost,
    join_group,
    leave_group,
    take_part,
)

GRACE_SECONDS = 10.0
"""Time that a worker has to send its error, or to end."""


@contextmanager
def spawn_group(devices: Sequence[torch.device], job: Callable[[ProcessGroup], None]) -> Iterator[ProcessGroup]:
    """Let a process for each device after the first run ``job``; yield the group, with this process as the main one.

    Args:
        devices: device of each process. The processes of a launcher choose their own devices, of the same type.
        job: function that each other process runs; must be picklable.
    Raises:
        WorkerLost: a process has died without an error. An error raised in a process is raised here instead.
    """
    if len(devices) == 1:
        yield SINGLE_PROCESS
        return
    with TemporaryDirectory() as folder:
        peers = launched_peers()
        workers: StartedJob | _Workers
        workers = peers.start(job, devices[0].type) if peers else _Workers(devices, Path(folder), job)
        try:
            group = workers.join()
            yield group
            group.barrier()
        except WorkerLost as error:
            cause = workers.cause() or WorkerLost("the training processes have lost contact with each other")
            raise cause from error
        finally:
            leave_group()
            workers.end()


class _Workers:
    """Worker processes on this machine, as seen by the main process."""

    def __init__(self, devices: Sequence[torch.device], folder: Path, job: Job) -> None:
        self.devices, self.folder = devices, folder
        self.workers = [_Worker(rank, devices, folder, job) for rank in range(1, len(devices))]

    def join(self) -> ProcessGroup:
        for worker in self.workers:
            worker.wait_until_ready()
        return _join(0, self.devices, self.folder)

    def cause(self) -> BaseException | None:
        """Return the first error that a worker has sent or that ended it; None if they have only lost each other."""
        errors = [error for worker in self.workers if (error := worker.error())]
        return errors[0] if errors else None

    def end(self) -> None:
        for worker in self.workers:
            worker.end()


class _Worker:
    """A worker process, as seen by the main process."""

    def __init__(self, rank: int, devices: Sequence[torch.device], folder: Path, job: Job) -> None:
        context = use_forkserver(getattr(job, "func", job).__module__)  # for a partial, its function's module
        self.connection, worker_end = context.Pipe(duplex=False)
        arguments = (worker_end, rank, devices, folder, torch.get_num_threads(), job)
        self.process: BaseProcess = context.Process(target=_run_worker, args=arguments, daemon=True)
        self.process.start()
        worker_end.close()

    def wait_until_ready(self) -> None:
        """Wait until the process is about to join, so that no process waits for one that could not start."""
        try:
            message: BaseException | None = self.connection.recv()
        except EOFError as error:
            raise WorkerLost("a training process did not start") from error
        if message is not None:
            raise message

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


@computation_mode()
def _run_worker(
    connection: Connection, rank: int, devices: Sequence[torch.device], folder: Path, threads: int, job: Job
) -> None:
    """Run ``job`` in a worker; send its error to the main process, which alone prints messages."""
    end_with_parent()
    ignore_interrupts()
    limit_threads(threads)

    def join() -> ProcessGroup:
        return _join(rank, devices, folder, lambda: connection.send(None))

    try:
        take_part(join, job, connection.send)
    finally:
        connection.close()


def _join(
    rank: int, devices: Sequence[torch.device], folder: Path, report_ready: Callable[[], object] = lambda: None
) -> ProcessGroup:
    store = dist.FileStore(str(folder / "meeting"), len(devices))  # type: ignore[attr-defined]
    return join_group(rank, len(devices), devices[rank], store, report_ready)
