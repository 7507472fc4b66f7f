"""What a further point of a grid costs in a process that has trained one: part ``points`` of the campaign.

    python -m benchmarks.gpu_campaign.points

The teacher is in the store, as in a grid. The first point fills the cache of the teacher's outputs.
"""

import argparse
import tempfile
import time
from collections import Counter
from typing import Any

import torch

from distill_runner import api
from distill_runner.common.terminal import markdown_table
from distill_runner.training.graphs import Graphs
from distill_runner.training.train import Training

COLUMNS = ("point of a grid", "seconds", "of which training", "updates", "graphs recorded", "updates replayed")
GRID = "experiment=demo_methods method=alp hydra.mode=RUN teacher.optim.epochs=1 runtime.precision=bf16"
SHORT = "stages.pretrain.optim.max_steps=2 teacher.optim.max_steps=2 optim.max_steps=8"


def count_calls(counts: Counter[str], owner: Any, name: str) -> None:
    """Count the calls of a method."""
    method = getattr(owner, name)

    def counted(*arguments: Any) -> Any:
        counts[name] += 1
        return method(*arguments)

    setattr(owner, name, counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="few updates")
    grid = f"{GRID} {SHORT}" if parser.parse_args().dry else GRID
    counts, rows = Counter[str](), []
    count_calls(counts, Graphs, "_record")
    count_calls(counts, torch.cuda.CUDAGraph, "replay")
    count_calls(counts, Training, "take_update")
    with tempfile.TemporaryDirectory() as folder:
        api.run(grid, "method=rkd", outputs=folder, progress=False)
        for temperature in (1, 2, 5):
            counts.clear()
            start = time.perf_counter()
            result = api.run(grid, f"loss.temperature={temperature}", outputs=folder, progress=False)
            taken = (f"{time.perf_counter() - start:.1f}", f"{result['seconds']:.1f}")
            numbers = (str(counts[name]) for name in ("take_update", "_record", "replay"))
            rows.append([f"T = {temperature}", *taken, *numbers])
    print(markdown_table(COLUMNS, rows))


if __name__ == "__main__":
    main()
