"""The optimizer of a training run, and its learning rate at each step."""

import math

import torch
from torch import nn

from distill_runner.training.config import Optim


def make_optimizer(model: nn.Module, method: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """Build the optimizer for the trainable parameters of ``model`` and ``method``.

    Vectors (biases, normalization) have no weight decay unless ``optim.decay`` is ``all``.
    """
    parameters = [p for module in (model, method) for p in module.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim > 1 or optim.decay == "all"]
    vectors = [p for p in parameters if p.ndim <= 1 and optim.decay != "all"]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if optim.name == "sgd":
        sgd = torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=True)
        # The fused kernel would make the buffers, but leaves them unfilled in an update that fp16 skips. Where layers
        # begin to learn later, it refuses parameters with and without buffers together.
        sgd.state.update({p: {"momentum_buffer": torch.zeros_like(p)} for p in parameters if optim.momentum})
        return sgd
    adam = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optim.name]
    return adam(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def learning_rate(optim: Optim, step: int, num_steps: int) -> float:
    """Return the learning rate of ``step``, counted from 0.

    It rises from 0 over the share ``optim.warmup`` of the steps, then follows ``optim.schedule``. The last of
    ``num_steps`` steps still has a rate above 0. ``linear`` is BERT's schedule, ``steps`` that of He et al. 2015, and
    ``cosine`` that of Loshchilov and Hutter 2017 (Eq. 5) with one period and a minimum of 0.
    """
    warmup_steps = int(optim.warmup * num_steps)
    if step < warmup_steps:
        return optim.lr * (step + 1) / (warmup_steps + 1)
    remaining = (num_steps - step) / max(1, num_steps - warmup_steps)
    match optim.schedule:
        case "linear":
            return optim.lr * remaining
        case "cosine":
            return optim.lr * (1 + math.cos(math.pi * (1 - remaining))) / 2
        case "steps":
            return optim.lr * optim.drop ** sum(step >= milestone * num_steps for milestone in optim.milestones)
    return optim.lr
