"""Time a small grid with all its costs: ``distill-run -m`` in two processes, and naive runs one after another.

    make bench-grid                     CoLA, 2 layers, one epoch, 6 points
    python -m benchmarks.grid --task rte --layers 4 --epochs 3 --temperature 1 5 10 20 --eta 0.2 0.5 0.7    36 points
    python -m benchmarks.grid --max-steps 4     a quick test

For distill-run, one command trains the teacher on all cores, and a second one runs the grid (start-up, targets,
students, evaluation, table). The naive side uses all cores, and its time is extrapolated from a few batches. It trains
its teacher without evaluation. Each point then takes the measured start-up, all steps, and an evaluation per epoch.
DISTILL_DATA_DIR must point to the data.
"""

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.competitors import competitor
from benchmarks.contest import Processes
from benchmarks.machine import describe
from benchmarks.setting import BATCH, TOKENIZER, Setting, prepare
from benchmarks.tables import markdown
from distill_runner.common.errors import UserError
from distill_runner.common.library_switches import quiet_transformers
from distill_runner.datasets.splits import TokenSplit


def distill_run(folder: Path, arguments: Sequence[str]) -> float:
    """Run ``distill-run`` in ``folder`` with ``arguments``, and return the seconds that it takes."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "distill_runner", *arguments]
    process = subprocess.run(
        command, cwd=folder, text=True, encoding="utf-8", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if process.returncode:
        sys.exit(f"{' '.join(command)}\n{process.stdout[-2000:]}")
    return time.perf_counter() - started


def time_distill_run(folder: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds of the command for the teacher and of the command for the grid."""
    common = [f"task={options.task}", "teacher=base", f"teacher.source={folder / 'teacher'}", *options.overrides]
    steps = "null" if options.max_steps is None else options.max_steps
    common += [f"student.num_layers={options.layers}", "store.dir=store", "runtime.device=cpu"]
    common += [f"{stage}.{key}" for stage in ("teacher.optim", "optim") for key in _length(options.epochs, steps)]
    teacher = distill_run(folder, [*common, "stage=teacher"])
    axes = {"optim.lr": options.lr, "loss.eta": options.eta, "loss.temperature": options.temperature}
    grid = ["-m", "hydra/launcher=joblib", f"hydra.launcher.n_jobs={options.workers}", "runtime.threads=1"]
    grid += [f"{key}={','.join(map(str, values))}" for key, values in axes.items()]
    return teacher, distill_run(folder, [*common, *grid, "loss.lambda=0.2"])


def _length(epochs: int, steps: int | str) -> list[str]:
    return [f"epochs={epochs}", f"max_steps={steps}"]


@dataclass(frozen=True)
class NaiveSpeed:
    """Speed of the naive side.

    Attributes:
        start: seconds until a run has started.
        student, teacher, evaluation: examples per second of training a student or the teacher, and of evaluation.
    """

    start: float
    student: float
    teacher: float
    evaluation: float


def time_naive(setting: Setting, threads: int, repeats: int) -> NaiveSpeed:
    """Measure the parts of the naive side, one after the naive."""

    def timed(name: str) -> tuple[float, float]:
        started = time.perf_counter()
        with ExitStack() as stack:
            processes = Processes(stack, setting, *competitor(name), threads)
            processes.first("memory")  # returns when the process is ready
            ready = time.perf_counter() - started
            return ready, statistics.median(processes.first("rates")[0] for _ in range(repeats))

    (start, student), (_, teacher), (_, evaluation) = map(timed, ("naive", "naive_teacher", "naive_evaluation"))
    return NaiveSpeed(start, student, teacher, evaluation)


def compare(options: argparse.Namespace) -> str:
    """Measure both sides, and return a table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        setting = prepare(folder, options.task, options.layers, options.width, options.steps, options.tokenizer)
        teacher, grid = time_distill_run(folder, options)
        naive = time_naive(setting, options.threads, options.repeats)
        per_epoch = math.ceil(len(TokenSplit(folder / "tokens")) / BATCH)
    points = len(options.lr) * len(options.eta) * len(options.temperature)
    steps = min(options.epochs * per_epoch, options.max_steps or math.inf)
    evaluated = sum(len(setting.task.examples(split)) for split in setting.task.validation.values())
    updates = naive.start + steps * BATCH / naive.student
    evaluation = math.ceil(steps / per_epoch) * evaluated / naive.evaluation
    naive_teacher = naive.start + steps * BATCH / naive.teacher
    total, naive_total = teacher + grid, naive_teacher + points * (updates + evaluation)
    without_evaluation = teacher + points * updates
    return markdown(
        [
            [f"{setting.name}, {points} points of {steps:.0f} steps", "seconds"],
            ["distill-run: teacher", f"{teacher:.0f}"],
            [f"distill-run: grid, {options.workers} processes", f"{grid:.0f}"],
            ["distill-run: total", f"{total:.0f}"],
            [f"naive: teacher, extrapolated from {naive.teacher:.1f} examples/s", f"{naive_teacher:.0f}"],
            [f"naive: a student, extrapolated from {naive.student:.1f} examples/s", f"{updates:.0f}"],
            [f"naive: its evaluation, extrapolated from {naive.evaluation:.1f} examples/s", f"{evaluation:.0f}"],
            ["naive: total, extrapolated", f"{naive_total:.0f}"],
            ["times faster", f"{naive_total / total:.1f}"],
            [
                "times faster if the naive side used our teacher and did not evaluate",
                f"{without_evaluation / total:.1f}",
            ],
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cola")
    parser.add_argument("--layers", type=int, default=2, help="of the students")
    parser.add_argument("--width", type=int, default=256, help="of the students and their teacher of 12 layers")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-5, 2e-5, 5e-5])
    parser.add_argument("--eta", type=float, nargs="+", default=[0.2])
    parser.add_argument("--temperature", type=float, nargs="+", default=[1, 10])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, help="of the teacher and of each point")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the naive loop")
    parser.add_argument("--steps", type=int, default=12, help="of the naive loop, a round")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the naive loop")
    parser.add_argument("--tokenizer", default=TOKENIZER)
    parser.add_argument("overrides", nargs="*", help="of distill-run's configuration, such as runtime.precision=bf16")
    options = parser.parse_args()
    quiet_transformers()
    print(f"Width {options.width}, batch {BATCH}. {describe()}\n", flush=True)
    try:
        print(compare(options))
    except UserError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
