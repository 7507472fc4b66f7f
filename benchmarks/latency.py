"""Time a forward pass of a paper's students, and compute their speed-ups over a large model.

    python benchmarks/latency.py [--paper minilmv2] [--batch 1 32] [--length 512] [--repeats 3] [--layers 2]

Sources: well-read students (Turc et al. 2019), Table 1b: the 24 compact BERTs against BERT-large at batch 1, length 512
on a TPU v2. MiniLMv2 (Wang et al. 2021), Tables 1, 2 and 9: its students against BERT-base; the paper names neither
hardware nor length. The students of one width and the large model are timed in turns, so that other work on the machine
affects all equally. The speed-up is a ratio of medians. Weights are random, since they do not affect the time. The
paper's speed-up is in parentheses.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from distill_runner.models.build import build
from distill_runner.models.config import LANGUAGE_MODEL, ModelConfig
from distill_runner.report.published import cells
from distill_runner.training.devices import Device

LARGE = {"well_read": (24, 1024), "minilmv2": (12, 768)}
"""Paper -> layers and width of the model that its students are compared with."""


def speedups(paper: str) -> dict[tuple[int, int], float]:
    """Return the printed speed-up of each size (layers, width) of a paper's students."""
    students = [cell for cell in cells(paper) if cell.metric == "speedup" and cell.student]
    return {(cell.num_layers, cell.width): float(cell.value) for cell in students if cell.num_layers and cell.width}


def bert(layers: int, width: int, device: Device) -> PreTrainedModel:
    """Return a BERT of this size without its masked-LM head, since only the backbone is timed."""
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width}
    architecture = {"model_type": "bert", **sizes, "num_attention_heads": width // 64}
    model: Any = build(ModelConfig(architecture=architecture), LANGUAGE_MODEL).base_model
    return device.place(model).eval()


def seconds(model: PreTrainedModel, ids_BL: torch.Tensor) -> float:
    """Return the time of one forward pass in seconds."""

    def wait() -> None:
        if ids_BL.is_cuda:
            torch.cuda.synchronize()

    wait()
    started = time.perf_counter()
    with torch.inference_mode():
        model(ids_BL)
    wait()
    return time.perf_counter() - started


def medians(models: Sequence[PreTrainedModel], ids_BL: torch.Tensor, repeats: int) -> list[float]:
    """Return the median time of each model in seconds, measured in turns after one warm-up pass of each."""
    rounds = [[seconds(model, ids_BL) for model in models] for _ in range(repeats + 1)]
    return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", choices=LARGE, default="well_read")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="+", help="only students of these numbers of layers")
    parser.add_argument("--width", type=int, nargs="+", help="only students of these widths")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device = Device.from_name(options.device, "fp32")
    published = {
        (layers, width): speedup
        for (layers, width), speedup in sorted(speedups(options.paper).items(), key=lambda item: item[0][::-1])
        if layers in (options.layers or [layers]) and width in (options.width or [width])
    }
    reference = bert(*LARGE[options.paper], device)
    for batch in options.batch:
        ids_BL = torch.randint(1000, 30000, (batch, options.length), device=device.torch)
        print(f"\n{device.torch}, {torch.get_num_threads()} threads, batch {batch}, length {options.length}")
        print(f"{'size':>8} {'student ms':>11} {'large ms':>11} {'speed-up':>9}  {options.paper}")
        for width in dict.fromkeys(width for _, width in published):
            sizes = [size for size in published if size[1] == width]
            large, *small = medians([reference, *(bert(*size, device) for size in sizes)], ids_BL, options.repeats)
            for (layers, _), student in zip(sizes, small, strict=True):
                times = f"{1000 * student:>11.2f} {1000 * large:>11.1f} {large / student:>9.2f}"
                print(f"{f'{layers}/{width}':>8} {times}  ({published[layers, width]})", flush=True)


if __name__ == "__main__":
    main()
