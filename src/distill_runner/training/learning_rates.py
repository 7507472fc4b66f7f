"""What changes while training goes on, as functions of the step: no state, hence nothing to checkpoint."""

import math

from distill_runner.training.config import Optim


def learning_rate(optim: Optim, step: int, num_steps: int) -> float:
    """Of a step, counted from 0: up from 0 over the share ``optim.warmup`` of the steps, then as its schedule says.

    The last of ``num_steps`` steps still has one above 0. ``linear`` is BERT's, ``steps`` that of He et al. 2015,
    ``cosine`` that of Loshchilov and Hutter 2017 (Eq. 5) with one period and no floor.
    """
    warmup_steps = int(optim.warmup * num_steps)
    if step < warmup_steps:
        return optim.lr * (step + 1) / (warmup_steps + 1)
    left = (num_steps - step) / max(1, num_steps - warmup_steps)
    match optim.schedule:
        case "linear":
            return optim.lr * left
        case "cosine":
            return optim.lr * (1 + math.cos(math.pi * (1 - left))) / 2
        case "steps":
            return optim.lr * optim.drop ** sum(step >= milestone * num_steps for milestone in optim.milestones)
    return optim.lr
