"""The script in processes that are forked from one that has imported everything: they start in a tenth of a second."""

import io
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

LONG = os.environ.get("FAULTS") == "long"
"""``make faults``: the whole campaign."""
PATIENCE = 600.0
"""Seconds after which a command hangs."""
Prepare = Callable[[], None]


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, negative for a signal, and what it printed."""

    code: int
    text: str


def start(folder: Path, arguments: tuple[str, ...], prepare: Prepare | None = None) -> BaseProcess:
    """A command in a session of its own; ``prepare`` is called in it first, and must be picklable."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["distill_runner.running"])
    process = context.Process(target=_run, args=(folder, arguments, prepare))
    process.start()
    return process


def finish(process: BaseProcess, folder: Path) -> Ended:
    process.join(PATIENCE)
    if process.exitcode is None:
        kill(process)
        raise AssertionError(f"hangs after {PATIENCE:.0f} s")
    said = folder / "said.txt"
    return Ended(process.exitcode, said.read_text() if said.exists() else "")


def run(folder: Path, arguments: tuple[str, ...], prepare: Prepare | None = None) -> Ended:
    return finish(start(folder, arguments, prepare), folder)


def cpu_seconds(process: BaseProcess, limit: float) -> float:
    """Waits until a command has computed for so long or has ended, however busy the machine is; returns how long."""
    spent, ticks = 0.0, os.sysconf("SC_CLK_TCK")
    while process.exitcode is None and spent < limit:
        with suppress(OSError, IndexError):
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            spent = max(spent, (int(fields[11]) + int(fields[12])) / ticks)
        time.sleep(0.02)
    return spent


def kill(process: BaseProcess, number: int = signal.SIGKILL) -> None:
    """The whole tree of a command."""
    assert process.pid
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        os.kill(process.pid, number)  # not yet in its own session
    if number == signal.SIGKILL:
        process.join()


def _run(folder: Path, arguments: tuple[str, ...], prepare: Prepare | None) -> None:
    from distill_runner.cli import main

    os.setsid()
    os.chdir(folder)
    os.environ.pop("HYDRA_FULL_ERROR", None)  # of a command in whose course the server of forks began
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server of forks ignores both
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = ["distill-run", *arguments]
    with (folder / "said.txt").open("w", buffering=1) as said, redirect_stdout(said), redirect_stderr(said):
        if prepare:
            prepare()
        main()


@dataclass(frozen=True)
class KilledAt:
    """SIGKILL, or another signal, at one call of something: before it, in its midst, or behind it."""

    module: str
    name: str
    when: str
    call: int = 1
    number: int = signal.SIGKILL

    def __call__(self) -> None:
        from importlib import import_module

        place: Any = import_module(self.module)
        *parents, name = self.name.split(".")
        for parent in parents:
            place = getattr(place, parent)
        original, calls = getattr(place, name), [0]

        def watched(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            here = calls[0] == self.call
            if here and self.when == "before":
                os.kill(os.getpid(), self.number)
            if here and self.when == "half":
                _write_half(original, *arguments, **options)
            found = original(*arguments, **options)
            if here and self.when != "before":
                os.kill(os.getpid(), self.number)
            return found

        setattr(place, name, watched)


def _write_half(save: Callable[..., Any], state: Any, file: Path, **options: Any) -> None:
    """Of what ``save`` writes, half is on the disk when the process dies."""
    whole = io.BytesIO()
    save(state, whole, **options)
    file.write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Limited:
    """The process has a limit: ``RLIMIT_FSIZE`` in bytes, as on a full disk, or ``RLIMIT_NOFILE``, of open files."""

    name: str
    number: int

    def __call__(self) -> None:
        resource.setrlimit(getattr(resource, self.name), (self.number, self.number))


def exit_in_training() -> None:
    """Let the code of a run end the process by itself."""
    from distill_runner.training.train import Training

    def step(*_: Any) -> None:
        sys.exit(0)

    Training.take_update = step  # type: ignore[method-assign, assignment]


def wait_until(holds: Callable[[], bool], seconds: float = PATIENCE) -> float:
    """Seconds until it does."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < seconds, "waited in vain"
        time.sleep(0.05)
    return time.monotonic() - started


def environment(**changes: str) -> Mapping[str, str]:
    """Of a script that is started anew."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), **changes}
