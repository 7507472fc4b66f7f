"""Time training runs that share one GPU: a BERT-base teacher, students of 6, 4 and 2 layers, 1 to 8 processes.

    make bench-gpu                                    three tasks, with and without graphs, beside the clever loop
    python -m benchmarks.gpu --device cpu --width 64 --task rte --layers 2 --steps 2 --repeats 1    a test on a CPU

It takes the options of ``benchmarks.training`` and prints the same tables. By default it compares fp32 with bf16. One
process that has the GPU to itself measures the peak. Memory is what torch reserves in all processes together.
"""

import sys

import torch

from benchmarks import training

DEFAULTS = ["--device", "cuda", "--width", "768", "--task", "rte", "sst2", "mnli", "--layers", "6", "4", "2"]
SPEED = ["--steps", "60", "--competitors", "clever_bf16", "distill_run", "distill_run_eager", "distill_run_bf16"]
WORKERS = ["distill_run_bf16*2", "distill_run_bf16*4", "distill_run_bf16*8"]


def main() -> None:
    arguments = sys.argv[1:]
    if "--device" in arguments or "--help" in arguments or torch.cuda.is_available():
        training.main([*DEFAULTS, *SPEED, *WORKERS, *arguments])
    else:
        print("No GPU is visible to torch: nothing to measure.")


if __name__ == "__main__":
    main()
