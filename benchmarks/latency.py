"""Time a forward pass of each of the 24 compact BERTs, and compute its speed-up over the teacher.

    python benchmarks/latency.py [--batch 1 32] [--length 512] [--repeats 3] [--layers 2 12] [--width 128]

Source: well-read students (Turc et al. 2019), Table 1b: speed-up against BERT-large at batch 1, length 512 on a TPU v2.
The students of one width and the teacher are timed in turns, so that other work on the machine affects all equally.
The speed-up is a ratio of medians. Weights are random, since they do not affect the time. The paper's speed-up is in
parentheses.
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
from distill_runner.training.devices import Device

LAYERS, WIDTHS = (2, 4, 6, 8, 10, 12), (128, 256, 512, 768)
PUBLISHED = {
    128: (65.24, 32.37, 21.87, 16.42, 13.05, 11.02),
    256: (31.25, 15.96, 10.67, 8.01, 6.37, 5.35),
    512: (14.44, 7.27, 4.85, 3.64, 2.90, 2.43),
    768: (7.46, 3.75, 2.50, 1.88, 1.50, 1.25),
}
"""Speed-ups in Table 1b, by width and then by number of layers."""


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
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, choices=LAYERS)
    parser.add_argument("--width", type=int, nargs="+", default=WIDTHS, choices=WIDTHS)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device = Device.from_name(options.device, "fp32")
    teacher = bert(24, 1024, device)
    for batch in options.batch:
        ids_BL = torch.randint(1000, 30000, (batch, options.length), device=device.torch)
        print(f"\n{device.torch}, {torch.get_num_threads()} threads, batch {batch}, length {options.length}")
        print(f"{'size':>8} {'student ms':>11} {'teacher ms':>11} {'speed-up':>9}  Table 1b")
        for width in options.width:
            students = [bert(layers, width, device) for layers in options.layers]
            large, *small = medians([teacher, *students], ids_BL, options.repeats)
            for layers, student in zip(options.layers, small, strict=True):
                times = f"{1000 * student:>11.2f} {1000 * large:>11.1f} {large / student:>9.2f}"
                published = PUBLISHED[width][LAYERS.index(layers)]
                print(f"{f'{layers}/{width}':>8} {times}  ({published:.2f})", flush=True)


if __name__ == "__main__":
    main()
