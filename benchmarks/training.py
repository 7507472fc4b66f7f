"""Time an ALP-KD training run with the naive loop, TextBrewer, torchdistill and distill-run, in turns.

    make bench                                  RTE, SST-2 and CoLA, students of 4 and 2 layers
    python -m benchmarks.training --task rte --layers 4 --competitors naive distill_run 'distill_run*2'
    python -m benchmarks.training --task squad --steps 6
    python -m benchmarks.training --width 768 --task sst2 --steps 6 [runtime overrides of distill-run]
    python -m benchmarks.training --one-process --threads 1 --competitors clever distill_run

All competitors start from the same weights, see the same batches and minimize the same loss, with dropout. A ratio
compares examples per second with the first competitor in the same round. ``distill_run*2`` is the sum of two processes
that run at once and share the threads, as in a grid. The clever loop is what an experienced engineer writes in an
evening. Ratios by CPU seconds hardly depend on other processes of the machine. Rounds end when these ratios are known
to 3% (``--within``), after 3 to 10 rounds.

The share of peak compares two speeds, by CPU seconds on a CPU: that of the operations that the loss needs in the
student's forward and backward pass at real lengths, and that of the fastest large matrix product in the same process,
by torch's default library or oneDNN. The number in parentheses also counts the rows of the last layer that the loss
does not read. Question answering reads every row; torchdistill has no
loss for it.

Loss curves are compared without dropout: for all competitors in float32. If the naive loop competes, distill-run is
compared with it also in float64, where rounding is negligible. DISTILL_DATA_DIR must point to the data.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.competitors import COMPETITORS, competitor
from benchmarks.contest import Result, contest, largest_loss_difference, largest_weight_difference, trained
from benchmarks.machine import describe
from benchmarks.setting import BATCH, TOKENIZER, Setting, fill_targets, prepare
from benchmarks.tables import summary, table
from distill_runner.common.errors import UserError
from distill_runner.common.library_switches import quiet_transformers
from distill_runner.training.devices import cpu_has_bf16

PEERS = ("textbrewer", "torchdistill")
ALL = (
    *("naive", "clever", "textbrewer", "textbrewer_tuned", "torchdistill", "torchdistill_tuned"),
    *("distill_run", "distill_run*2", "distill_run_bf16"),
)


def available() -> list[str]:
    """Return the competitors that can run here, and print why the others cannot."""
    names = list(ALL)
    for peer in PEERS:
        if find_spec(peer) is None:
            print(f"{peer} is not installed and is left out; `make bench` installs it.")
            names = [name for name in names if not name.startswith(peer)]
    if not cpu_has_bf16():
        print("distill_run_bf16 is left out: this CPU has no bf16 units. --competitors runs it anyway.")
        names.remove("distill_run_bf16")
    return names


def run(task: str, num_layers: int, names: Sequence[str], options: argparse.Namespace) -> tuple[Setting, list[Result]]:
    """Time one setting, and print its table."""
    with tempfile.TemporaryDirectory() as name:
        folder, sizes = Path(name), (num_layers, options.width, options.steps)
        setting = prepare(folder, task, *sizes, options.tokenizer, options.device, options.overrides)
        started = time.perf_counter()
        fill_targets(setting)
        filled = setting.num_examples / (time.perf_counter() - started)
        if setting.reads_all:
            names = [name for name in names if not name.startswith("torchdistill")]  # it has no loss on spans
        results = contest(
            setting, names, options.threads, options.repeats, options.within, one_process=options.one_process
        )
        print(f"\n{table(setting, results)}\n")
        print(f"Filling the teacher's targets, once for a whole grid: {filled:.0f} examples/s.", flush=True)
        if any(name.startswith("clever") for name in names):
            print(
                f"Padding of the clever loop: {padding(setting):.1%} of its tokens; less with more --steps.", flush=True
            )
        if "naive" not in names:  # which takes longer than all others together
            return setting, results
        for dtype in (torch.float32, torch.float64):
            naive, fast = (trained(setting, competitor(name)[0], dtype) for name in ("naive", "distill_run"))
            losses, weights = largest_loss_difference(fast[0], naive[0]), largest_weight_difference(fast[1], naive[1])
            print(
                f"In {str(dtype)[6:]}, distill-run and the naive loop differ by at most {losses:.0e} in losses", end=""
            )
            print(f" and {weights:.0e} in final weights.", flush=True)
    return setting, results


def padding(setting: Setting) -> float:
    """Return the part of padding in batches of texts that are sorted by length."""
    padded = sum(inputs["input_ids"].numel() for inputs in setting.padded(None, setting.batches(sort=True)))
    return 1 - sum(setting.lengths()) / padded


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", default=["rte", "sst2", "cola"])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 2], help="of the students")
    parser.add_argument("--width", type=int, default=256, help="of the student and its teacher of 12 layers")
    parser.add_argument("--competitors", nargs="+", help=f"of {', '.join(COMPETITORS)}, distill_run*2 and so on")
    parser.add_argument("--steps", type=int, default=12, help=f"of {BATCH} examples in a round")
    parser.add_argument("--repeats", type=int, default=10, help="largest number of rounds")
    parser.add_argument("--within", type=float, default=0.03, help="relative error of ratios that ends the rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--one-process", action="store_true", help="for all competitors, on a busy machine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokenizer", default=TOKENIZER)
    parser.add_argument("overrides", nargs="*", help="of distill-run's configuration")
    options = parser.parse_args(arguments)
    quiet_transformers()
    names = options.competitors or available()
    print(f"Width {options.width}, batch {BATCH}, {options.steps} steps, {options.repeats} rounds, {options.threads}")
    print(f"threads. {describe()}", flush=True)
    try:
        results = [run(task, layers, names, options) for task in options.task for layers in options.layers]
    except UserError as error:
        parser.exit(2, f"{error}\n")
    print(f"\n{summary(results)}")


if __name__ == "__main__":
    main()
