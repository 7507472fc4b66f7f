"""Time trainings that share one GPU: a teacher as large as BERT-base, students of 6, 4 and 2 layers, 1 to 8 processes.

    make bench-gpu                                    RTE, SST-2 and MNLI, eager and compiled
    python -m benchmarks.gpu --device cpu --width 64 --task rte --layers 2 --steps 2 --repeats 1    a trial on a CPU

Takes the options of ``benchmarks.training`` and prints the same tables. By default fp32 and bf16 are compared. The peak
is measured by one process that has the GPU to itself. Memory is what torch reserved in all processes together.
"""

import sys

import torch

from benchmarks import training

DEFAULTS = ["--device", "cuda", "--width", "768", "--task", "rte", "sst2", "mnli", "--layers", "6", "4", "2"]
SPEED = ["--steps", "60", "--competitors", "naive_bf16", "ours", "ours_compiled", "ours_bf16"]
WORKERS = ["ours_bf16*2", "ours_bf16*4", "ours_bf16*8"]


def main() -> None:
    given = sys.argv[1:]
    if "--device" in given or "--help" in given or torch.cuda.is_available():
        training.main([*DEFAULTS, *SPEED, *WORKERS, *given])
    else:
        print("No GPU is visible to torch: nothing to measure.")


if __name__ == "__main__":
    main()
