"""Processes that ``torchrun`` or ``srun`` has started, on one or several machines.

The process of rank 0 runs the command. The others wait for its jobs, such as the training run of a stage, and end with
it. All meet in one store of torch: that of ``torchrun``, or one that rank 0 keeps under ``srun``.

A process counts as dead if it gives no sign of life for ``SILENCE_SECONDS``. Its peers then end at once, since a
collective operation of a GPU that waits for it cannot be interrupted. The launcher may start all of them again.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
import torch.distributed as dist

from distill_runner.common.errors import root_cause
from distill_runner.common.launch import Launch
from distill_runner.common.library_switches import computation_mode, limit_threads
from distill_runner.common.process import end_process, ignore_interrupts
from distill_runner.training.processes import ProcessGroup, WorkerLost, join_group, take_part

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger(__name__)

Job = Callable[[ProcessGroup], None]
MEETING = timedelta(minutes=15)
"""Time in which all processes must have started."""
POLL_SECONDS, BEAT_SECONDS, SILENCE_SECONDS, GRACE_SECONDS = 0.1, 5.0, 60.0, 15.0
_END = "end"
_PEERS: list[Peers] = []
"""The processes of this run, as ``connect`` has met them; empty if no launcher has started this process."""


def launched_peers() -> Peers | None:
    """Return the processes that a launcher has started together with this one; None if there are none."""
    return _PEERS[0] if _PEERS else None


def connect(launch: Launch) -> Peers:
    """Meet the other processes.

    Raises:
        WorkerLost: they have not all started in time.
    """
    try:
        if launch.address is None:
            store = next(dist.rendezvous("env://", timeout=MEETING))[0]  # type: ignore[attr-defined]
        else:
            host, port = launch.address
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, launch.size, launch.rank == 0, MEETING
            )
        attempt = admit_others(launch, store) if launch.rank == 0 else enter_attempt(launch, store)
    except (RuntimeError, ValueError) as error:  # ValueError: an address that torch cannot read
        raise WorkerLost(f"process {launch.rank} of {launch.size} has not met the others: {error}") from error
    peers = Peers(launch, dist.PrefixStore(f"attempt/{attempt}", store))  # type: ignore[attr-defined]
    _PEERS[:] = [peers]
    return peers


# torchrun keeps one store for all its attempts, and its machines count restarts differently. Processes of different
# attempts must not meet, nor read each other's entries.


def admit_others(launch: Launch, store: Store) -> int:
    """Begin an attempt as its main process, and return its number when all other processes have entered it."""
    attempt, deadline = store.add("attempt", 1), time.monotonic() + MEETING.total_seconds()
    for rank in range(1, launch.size):
        while not store.check([f"hello/{attempt}/{rank}"]):
            _sleep_until(deadline, f"process {rank} of {launch.size} has not started")
        store.set(f"welcome/{attempt}/{rank}", store.get(f"hello/{attempt}/{rank}"))  # type: ignore[arg-type]
    return attempt


def enter_attempt(launch: Launch, store: Store) -> int:
    """Return the number of the attempt whose main process welcomes this very process; that of an old one does not."""
    own, deadline = uuid4().hex, time.monotonic() + MEETING.total_seconds()
    while True:
        attempt = store.add("attempt", 0)
        welcome = f"welcome/{attempt}/{launch.rank}"
        if store.check([welcome]) and store.get(welcome).decode() == own:
            return attempt
        store.set(f"hello/{attempt}/{launch.rank}", own)
        _sleep_until(deadline, f"process {launch.rank} waits for process 0")


def _sleep_until(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise WorkerLost(f"{problem}, after {MEETING.total_seconds() / 60:g} minutes")
    time.sleep(POLL_SECONDS)


class Peers:
    """All processes of a launch, as one of them sees them.

    For job n, ``store`` holds ``job/n``, ``ready/n`` (how many are about to join) and ``error/n/<rank>``. For the
    whole run, it holds ``beat/<rank>``, ``end`` (the exit code of the command) and ``gone``.
    """

    def __init__(self, launch: Launch, store: Store) -> None:
        self.launch, self.store = launch, store
        self.num_jobs, self.in_job = 0, False
        self._has_ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, args=(store.clone(),), daemon=True)  # type: ignore[attr-defined]
        self._watcher.start()

    def device(self, type: str) -> torch.device:
        """Return the device of this process: the CPU, or the GPU with its number on this machine.

        Slurm may show each task only its own GPU, which then has the number 0.
        """
        if type != "cuda":
            return torch.device("cpu")
        return torch.device("cuda", self.launch.local_rank if torch.cuda.device_count() > 1 else 0)

    # The main process

    def start(self, job: Job, device_type: str) -> StartedJob:
        """Let all other processes run ``job``, each with a group on its own device."""
        number, self.num_jobs = self.num_jobs, self.num_jobs + 1
        self.store.set(f"job/{number}", pickle.dumps((job, device_type, torch.get_num_threads())))  # type: ignore[arg-type]
        return StartedJob(self, number, self.device(device_type))

    def finish(self, code: int) -> None:
        """Let all other processes end with the exit code of the command, and wait until they have read it.

        The thread of this process must have ended too: Python cannot exit while it is inside of torch.
        """
        self._has_ended.set()
        with suppress(RuntimeError):  # the launcher has ended the store
            self.store.set(_END, str(code))
            deadline = time.monotonic() + GRACE_SECONDS
            while self.store.add("gone", 0) < self.launch.size - 1 and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        self._watcher.join(GRACE_SECONDS)

    # The other processes

    def follow(self) -> int:
        """Run the jobs of the main process, and return its exit code when it ends; 1 if it has died with the store."""
        ignore_interrupts()
        try:
            with computation_mode():
                while not self.store.check([_END]):
                    if self.store.check([f"job/{self.num_jobs}"]):
                        number, self.num_jobs = self.num_jobs, self.num_jobs + 1
                        self._run(number)
                    else:
                        time.sleep(POLL_SECONDS)
            code = int(self.store.get(_END))
            self.store.add("gone", 1)
        except RuntimeError as error:  # of the store: those of a job are sent
            log.error("process %d of %d ends with process 0: %s", self.launch.rank, self.launch.size, root_cause(error))
            return 1
        return code

    def _run(self, number: int) -> None:
        rank = self.launch.rank

        def send(error: BaseException) -> None:
            self.store.set(f"error/{number}/{rank}", pickle.dumps(error))  # type: ignore[arg-type]

        def join() -> ProcessGroup:
            return self.join(number, self.device(device_type), lambda: self.store.add(f"ready/{number}", 1))

        try:
            job, device_type, threads = pickle.loads(self.store.get(f"job/{number}"))
        except Exception as error:  # another version of this package, or a loss term that this machine lacks
            send(RuntimeError(f"process {rank} cannot read its job: {type(error).__name__}: {error}"))
            return
        limit_threads(threads)
        self.in_job = True
        take_part(join, job, send)
        self.in_job = False

    # All processes

    def join(
        self, number: int, device: torch.device, report_ready: Callable[[], object] = lambda: None
    ) -> ProcessGroup:
        """Join the group of job ``number``."""
        store = dist.PrefixStore(f"group/{number}", self.store)  # type: ignore[attr-defined]
        return join_group(self.launch.rank, self.launch.size, device, store, report_ready)

    def errors(self, number: int, store: Store | None = None) -> Iterator[BaseException]:
        """Yield the errors of all processes in job ``number``; another thread needs its own clone of the store."""
        store = store or self.store
        for rank in range(1, self.launch.size):
            if store.check([key := f"error/{number}/{rank}"]):
                yield pickle.loads(store.get(key))

    def _watch(self, store: Store) -> None:
        """Give signs of life, and end this process when one that it needs gives none.

        The main process needs all others; these need only the main one.
        """
        watched_ranks = range(1, self.launch.size) if self.launch.rank == 0 else range(1)
        last_beats = dict[int, tuple[int, float]]()
        errors_since: float | None = None
        try:
            while True:
                store.add(f"beat/{self.launch.rank}", 1)
                now = time.monotonic()
                for rank in watched_ranks:
                    beats = store.add(f"beat/{rank}", 0)
                    if rank not in last_beats or last_beats[rank][0] != beats:
                        last_beats[rank] = beats, now
                    elif now - last_beats[rank][1] > SILENCE_SECONDS and not store.check([_END]):
                        self._abort(f"process {rank} gives no sign of life")
                in_job = self.launch.rank == 0 and self.in_job
                if in_job and (error := next(self.errors(self.num_jobs - 1, store), None)):
                    errors_since = errors_since or now
                    if now - errors_since > SILENCE_SECONDS:
                        self._abort(f"a process has failed, and this one is stuck without it: {root_cause(error)}")
                if self._has_ended.wait(BEAT_SECONDS):
                    return
        except RuntimeError:
            if self.launch.rank:  # the store has ended, and the main process with it
                time.sleep(GRACE_SECONDS)
                end_process(1)

    def _abort(self, problem: str) -> None:
        log.error("process %d of %d ends: %s", self.launch.rank, self.launch.size, problem)
        end_process(1)


class StartedJob:
    """A job of the other processes, as seen by the main process."""

    def __init__(self, peers: Peers, number: int, device: torch.device) -> None:
        self.peers, self.number, self.device = peers, number, device

    def join(self) -> ProcessGroup:
        """Wait until all processes are about to join, so that none waits for one that could not start; then join."""
        store, others = self.peers.store, self.peers.launch.size - 1
        while store.add(f"ready/{self.number}", 0) < others:
            if any(self.peers.errors(self.number)):
                raise WorkerLost("a training process did not start")
            time.sleep(POLL_SECONDS)
        self.peers.in_job = True
        return self.peers.join(self.number, self.device)

    def cause(self) -> BaseException | None:
        """Return the error of a process, if one comes in time; None if they have only lost each other."""
        deadline = time.monotonic() + GRACE_SECONDS
        with suppress(RuntimeError):  # the launcher has ended the store
            while time.monotonic() < deadline:
                if error := next(self.peers.errors(self.number), None):
                    return error
                time.sleep(POLL_SECONDS)
        return None

    def end(self) -> None:
        self.peers.in_job = False
