"""Compare two versions of distill-run: milliseconds per update, in turns, each in a separate process.

    git worktree add ../before HEAD~1
    python -m benchmarks.versions ../before --task rte --layers 4 --steps 10
    python -m benchmarks.versions ../before --competitor distill_run_bf16
    python -m benchmarks.versions . --repeats 9     the same version twice, to show the machine's noise

It uses one thread. Both versions run the benchmark code of this checkout. DISTILL_DATA_DIR must point to the data.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.competitors import competitor
from benchmarks.machine import describe
from benchmarks.setting import BATCH, TOKENIZER, fill_targets, prepare
from benchmarks.tables import markdown
from distill_runner.common.errors import UserError
from distill_runner.common.library_switches import quiet_transformers

ROOT = Path(__file__).parents[1]


class Version:
    """A checkout in a process that trains on request."""

    def __init__(self, checkout: Path, options: argparse.Namespace) -> None:
        names = ("task", "layers", "width", "steps", "tokenizer", "competitor")
        arguments = [f"--{name}={getattr(options, name)}" for name in names]
        command = [sys.executable, "-m", "benchmarks.versions", str(checkout), *arguments, "--serve"]
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, encoding="utf-8", stdin=pipe, stdout=pipe
        )
        self.rounds: list[float] = []

    def ready(self) -> None:
        """Return when the process is ready. Its first training run is not counted."""
        self._read_number()

    def train(self) -> None:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        self.rounds.append(self._read_number())

    def _read_number(self) -> float:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(self.process.wait())  # the process has printed the reason
        return float(line)


def serve(options: argparse.Namespace) -> None:
    """Train once for each line on standard input, and print the milliseconds per update."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        sizes = (options.layers, options.width, options.steps)
        setting = prepare(Path(name), options.task, *sizes, options.tokenizer)
        fill_targets(setting)
        train, steps = competitor(options.competitor)[0].make(setting), setting.num_examples // BATCH
        train(setting.student(), steps)
        print(0, flush=True)
        for _ in sys.stdin:
            student = setting.student()
            started = time.perf_counter()
            train(student, steps)
            print(1000 * (time.perf_counter() - started) / steps, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="checkout to compare with this one")
    parser.add_argument("--task", default="rte")
    parser.add_argument("--layers", type=int, default=4, help="of the student")
    parser.add_argument("--width", type=int, default=256, help="of the student and its teacher of 12 layers")
    parser.add_argument("--steps", type=int, default=8, help="updates of a round")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--tokenizer", default=TOKENIZER)
    parser.add_argument("--competitor", default="distill_run", help="distill_run, or distill_run_bf16")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    quiet_transformers()
    if options.serve:
        try:
            return serve(options)
        except UserError as error:
            parser.exit(2, f"{error}\n")
    if not (options.before / "src" / "distill_runner").is_dir():
        parser.error(f"{options.before} is not a checkout of distill-run")
    print(f"Width {options.width}, batch {BATCH}. {describe()}\n", flush=True)
    versions = {"before": Version(options.before.resolve(), options), "here": Version(ROOT, options)}
    for version in versions.values():
        version.ready()
    for _ in range(options.repeats):
        for version in versions.values():
            version.train()
    rows = [[f"{options.task}, {options.layers} layers", "ms an update", "times faster", "min to max"]]
    baseline = versions["before"].rounds
    for name, version in versions.items():
        ratios = [base / time for base, time in zip(baseline, version.rounds, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append([name, f"{statistics.median(version.rounds):.1f}", f"{statistics.median(ratios):.2f}", spread])
    print(markdown(rows))


if __name__ == "__main__":
    main()
