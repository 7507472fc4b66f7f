"""Compare the time that a plan names with the time that the run takes, and measure what plans, hits and points cost.

    python -m benchmarks.plans --load 0 2 8                              at each load: a plan, then its run
    python -m benchmarks.plans --load 0 2 8 -- task=rte method=alp teacher=minilm_l6 student.num_layers=3
    python -m benchmarks.plans --load 0 --points 1000                    also a plan of a sweep over so many seeds

A load is a number of processes that compute beside the command, started here; the machine's own load is printed too.
Each load has a store of its own, so that each plan measures. The plan comes a second time, with its speeds in the
store, and the run a second time, as a hit. A point is what a further seed adds to a sweep whose students train for one
update: nearly all of its cost is beyond its training.
"""

import argparse
import ctypes
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.tables import markdown

RUN = ("experiment=demo_methods", "method=alp", "runtime.threads=1", "runtime.device=cpu")
HEADER = ("load", "command", "CPU seconds", "seconds", "time that the plan names")
ONE_UPDATE = "stages.student.optim.max_steps=1"
MORE = 4
"""Number of points that the second sweep trains beyond one."""
_SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER`` of Linux."""


@dataclass(frozen=True)
class Measured:
    """One command: seconds of wall clock and of CPU, those of all its processes, and what it printed."""

    seconds: float
    cpu_seconds: float
    output: str

    @property
    def estimate(self) -> str:
        """Time that a plan names."""
        match = re.search(r"time: (.*?)(?:;|$)", self.output, re.MULTILINE)
        return match[1] if match else ""


def measured(arguments: Sequence[str], folder: Path) -> Measured:
    """Run ``distill-run`` in ``folder``, with a store there, and measure it.

    Raises:
        SystemExit: it failed; with its output.
    """
    environment = {**os.environ, "DISTILL_STORE_DIR": str(folder / "store")}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path("src").resolve()), os.environ.get("PYTHONPATH")])
    )
    output, started = folder / "output.txt", time.perf_counter()
    command = [sys.executable, "-m", "distill_runner", *arguments]
    redirections = [
        (os.POSIX_SPAWN_OPEN, 1, str(output), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)  # the server of a sweep's points outlives it, and only who reaps it knows
    origin = Path.cwd()
    os.chdir(folder)
    try:
        process = os.posix_spawn(sys.executable, command, environment, file_actions=redirections, setpgroup=0)
    finally:
        os.chdir(origin)
    status, seconds, cpu_seconds = 0, 0.0, 0.0
    try:
        for number, code, usage in iter(lambda: os.wait4(-process, 0), None):
            cpu_seconds += usage.ru_utime + usage.ru_stime
            if number == process:
                status, seconds = code, time.perf_counter() - started
    except ChildProcessError:  # all have ended
        pass
    except KeyboardInterrupt:
        os.killpg(process, signal.SIGINT)
        raise
    text = output.read_text(encoding="utf-8", errors="replace")
    if status:
        sys.exit(f"{' '.join(arguments)} failed:\n{text}")
    return Measured(seconds, cpu_seconds, text)


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Let ``number`` processes compute within the context."""
    processes = [multiprocessing.Process(target=_compute, args=(os.getpid(),), daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _compute(parent: int) -> None:
    while os.getppid() == parent:
        sum(range(10**6))


def rows_at(load: int, run: Sequence[str], points: int | None) -> Iterator[list[str]]:
    """Yield a row for each command, all at one load."""
    with tempfile.TemporaryDirectory() as name, busy_processes(load):
        folder = Path(name)

        def row(title: str, arguments: Sequence[str]) -> list[str]:
            result = results[title] = measured(arguments, folder)
            return entries(title, result.cpu_seconds, result.seconds, result.estimate)

        def entries(title: str, cpu_seconds: float, seconds: float, estimate: str = "") -> list[str]:
            return [f"{load} + {os.getloadavg()[0]:.1f}", title, f"{cpu_seconds:.1f}", f"{seconds:.1f}", estimate]

        results: dict[str, Measured] = {}
        yield row("plan, measures", [*run, "plan=true"])
        yield row("plan, speeds in the store", [*run, "plan=true"])
        yield row("run", run)
        yield row("hit, first", run)
        yield row("hit, again", run)
        yield row("sweep, one point of one update", ["-m", *run, ONE_UPDATE, "seed=1"])
        yield row("sweep, more points", ["-m", *run, ONE_UPDATE, f"seed=range(2,{MORE + 3})"])
        one, more = results["sweep, one point of one update"], results["sweep, more points"]
        cpu_seconds, seconds = more.cpu_seconds - one.cpu_seconds, more.seconds - one.seconds
        yield entries("a further point", cpu_seconds / MORE, seconds / MORE)
        if points:
            seeds = [f"seed=range(1,{points + 1})", "plan=true"]
            yield row(f"plan of {points} points", ["-m", *run, *seeds])
            yield row("the same again", ["-m", *run, *seeds])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=int, nargs="+", default=[0], help="processes that compute beside the command")
    parser.add_argument("--points", type=int, help="also plan a sweep over so many seeds")
    parser.add_argument("run", nargs="*", help=f"arguments of distill-run; by default {' '.join(RUN)}")
    options = parser.parse_args(arguments)
    print(describe(), flush=True)
    rows = [list(HEADER)]
    for load in options.load:
        for row in rows_at(load, options.run or RUN, options.points):
            print(" | ".join(row), flush=True)
            rows.append(row)
    print(f"\n{markdown(rows)}")


if __name__ == "__main__":
    main()
