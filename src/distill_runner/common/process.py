"""State of the whole process that this program sets: variables, output, processes and signals.

Other modules call the functions below and never set such state themselves, which a test checks.
``docs/architecture.md`` lists every switch with the reason for it. ``library_switches`` has those of libraries.
"""

import codecs
import errno
import gc
import io
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from distill_runner.common.files import without_secrets

SECONDS_TO_SAVE = 20.0
"""Seconds from SIGTERM, which lets training stop and save, to the end of the process."""

# Environment


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within the context, for this process and the processes that it starts."""
    previous = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous


def import_from_working_folder() -> None:
    """Let modules in the working folder be imported, as ``python -m`` does; a console script leaves the folder out."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)


# Standard output and error


def protect_output() -> None:
    """Let the process go on when its output cannot be written, such as to ``| head``, whose pipe closes early.

    Python would raise an error from ``print``, or while it flushes at exit, and a finished run would count as failed.
    ``output_error`` returns what went wrong. Characters that the output cannot hold are written as their numbers, and
    secrets of the environment are masked.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw: Any = _ProtectedOutput(stream.fileno(), "w", closefd=False)
            # That of a terminal; UTF-8 for files, pipes and the C locale, whose ASCII nobody means.
            is_terminal = stream.isatty() and codecs.lookup(stream.encoding).name != "ascii"
            protected = _MaskedText(
                raw if stream.write_through else io.BufferedWriter(raw),
                stream.encoding if "PYTHONIOENCODING" in os.environ or is_terminal else "utf-8",
                "backslashreplace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, protected)


class _MaskedText(io.TextIOWrapper):
    def write(self, text: str, /) -> int:
        super().write(without_secrets(text))
        return len(text)


class _ProtectedOutput(io.FileIO):
    """Standard output or error. After an error, all that is written to it is dropped."""

    error: str | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # EIO: the terminal was closed
                type(self).error = error.strerror
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return memoryview(data).nbytes


def output_error() -> str | None:
    """Return why output is incomplete, such as a full disk; None if it is complete or nobody reads it any more."""
    with suppress(AttributeError, ValueError):  # raised if the stream is None, or closed
        sys.stdout.flush()
    return _ProtectedOutput.error


@contextmanager
def suppressed_output() -> Iterator[None]:
    """Suppress prints, logs and warnings within the context, such as those of an exporter that reports each step."""
    threshold = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(threshold)


# Processes and threads


def use_forkserver(preload: str) -> None:
    """Make ``forkserver`` the way to start processes; its server imports the module ``preload`` once.

    A process forked from this server starts without the threads of torch, which would not survive a plain fork. joblib
    sets another default, which a child does not know.
    """
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.get_context("forkserver").set_forkserver_preload([preload])


def end_with_parent(grace: float | None = None) -> None:
    """Start a thread that ends this process soon after the parent process has ended, however the parent ended.

    Nobody waits for the work of such a process any more.

    Args:
        grace: seconds from the parent's end to SIGTERM, which asks this process to save and to end. None ends this
            process at once.
    """
    parent, number = multiprocessing.parent_process(), os.getppid()

    def watch() -> None:
        try:
            parent.join()  # type: ignore[union-attr]
        except (AttributeError, ValueError):  # a launcher's own type of process, whose parent cannot be joined
            while os.getppid() == number:
                time.sleep(1.0)
        if grace is not None:
            time.sleep(grace)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(SECONDS_TO_SAVE)
        os._exit(1)  # sys.exit would end this thread only

    threading.Thread(target=watch, daemon=True).start()


def num_launched(variable: str = "WORLD_SIZE") -> int:
    """Return how many processes ``torchrun`` has started together with this one, on all machines; 1 without it.

    Args:
        variable: ``LOCAL_WORLD_SIZE`` counts those on this machine.
    """
    return int(os.environ.get(variable, "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def available_cpus() -> int:
    """Return the number of CPUs that this process may use: by its affinity, and by the quota of its container."""
    import joblib  # takes 0.1 s

    return int(joblib.cpu_count())


@contextmanager
def pinned_cpus(count: int) -> Iterator[list[int]]:
    """Pin this thread, and threads that it starts, to ``count`` CPUs within the context.

    Yields:
        The CPUs; none where the system cannot pin threads, as on macOS.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield []
        return
    allowed = os.sched_getaffinity(0)
    cpus = sorted(allowed)[-count:]
    os.sched_setaffinity(0, cpus)
    try:
        yield cpus
    finally:
        os.sched_setaffinity(0, allowed)


# Signals


@contextmanager
def _handled(handler: Any, *numbers: int) -> Iterator[None]:
    """Handle signals within the context; outside the main thread, the program that owns it handles them."""
    previous = dict[int, Any]()
    with suppress(ValueError):
        previous |= {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, of_caller in previous.items():
            signal.signal(number, of_caller)


def sigterm_as_interrupt() -> AbstractContextManager[None]:
    """Let SIGTERM and SIGUSR1, which batch systems send, act like Ctrl-C within the context."""
    return _handled(signal.default_int_handler, signal.SIGTERM, signal.SIGUSR1)


def ignored_sigterm() -> AbstractContextManager[None]:
    """Ignore SIGTERM within the context, and in the programs that are started there, until they handle it."""
    return _handled(signal.SIG_IGN, signal.SIGTERM)


@contextmanager
def deferred_interrupts() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGUSR1, so that training stops between two steps; a second signal stops at once."""
    received: list[int] = []

    def receive(number: int, _frame: Any) -> None:
        if received and num_launched() == 1:  # torchrun repeats a signal that the terminal has sent to all processes
            raise KeyboardInterrupt
        received.append(number)

    with _handled(receive, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        yield received


def ignore_interrupts() -> None:
    """Ignore Ctrl-C, which reaches all processes of a training run. Before training, only the main process reacts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def collect_garbage() -> None:
    """Free what only refers to itself, such as the models of an earlier run in this process."""
    gc.collect()
