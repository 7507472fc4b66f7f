"""Profile distill-run's updates: torch operators, or kernels of a GPU, and their shares of the time, largest first.

    python -m benchmarks.breakdown --task rte --layers 4
    python -m benchmarks.breakdown --task sst2 --layers 2 --width 768 --rows 20

It uses one thread. The first training run is a warm-up. DISTILL_DATA_DIR must point to the data.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.competitors import competitor
from benchmarks.competitors.distill_run import MEASURED
from benchmarks.machine import describe
from benchmarks.setting import BATCH, TOKENIZER, Setting, fill_targets, prepare
from benchmarks.tables import markdown
from distill_runner.common.errors import UserError
from distill_runner.common.library_switches import quiet_transformers

CONTENDERS = {"cpu": "distill_run", "cuda": "distill_run_bf16"}


def breakdown(setting: Setting, num_rows: int) -> str:
    """Return a table of operators, their calls per update, and their shares of the total time."""
    steps, train = setting.num_examples // BATCH, competitor(CONTENDERS[setting.device])[0].make(setting)
    train(setting.student(), 1)
    student = setting.student()
    kind = "cpu" if setting.device == "cpu" else "device"
    profiled = profile(activities=[ProfilerActivity.CPU if kind == "cpu" else ProfilerActivity.CUDA])
    if kind == "cpu":
        profiled.start()
        train(student, steps)
    else:  # replays alone, not the updates that are recorded
        train(student, steps, profiled.start)
        steps *= MEASURED
    profiled.stop()
    events: list[Any] = [(getattr(event, f"self_{kind}_time_total"), event) for event in profiled.key_averages()]
    events.sort(key=lambda pair: -pair[0])
    total = sum(taken for taken, _ in events)
    rows = [[event.key, f"{event.count / steps:.0f}", f"{taken / total:.1%}"] for taken, event in events[:num_rows]]
    per_update = f"{total / steps / 1000:.2f} ms an update of {BATCH} examples"
    return f"{per_update}\n\n{markdown([[setting.name, 'calls', 'share'], *rows])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="rte")
    parser.add_argument("--layers", type=int, default=4, help="of the student")
    parser.add_argument("--width", type=int, default=256, help="of the student and its teacher of 12 layers")
    parser.add_argument("--steps", type=int, default=8, help="updates")
    parser.add_argument("--rows", type=int, default=12, help="operators to show")
    parser.add_argument("--tokenizer", default=TOKENIZER)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    quiet_transformers()
    torch.set_num_threads(1)
    print(f"Width {options.width}. {describe()}", flush=True)
    sizes = (options.layers, options.width, options.steps)
    with tempfile.TemporaryDirectory() as name:
        try:
            setting = prepare(Path(name), options.task, *sizes, options.tokenizer, options.device)
        except UserError as error:
            parser.exit(2, f"{error}\n")
        fill_targets(setting)
        print(breakdown(setting, options.rows))


if __name__ == "__main__":
    main()
