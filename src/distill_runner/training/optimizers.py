"""Optimiser of a training."""

import torch
from torch import nn

from distill_runner.training.config import Optim


def make_optimizer(model: nn.Module, method: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """Build the optimiser for the trainable parameters of ``model`` and ``method``.

    Vectors (biases, normalisation) have no weight decay unless ``optim.decay`` is ``all``.
    """
    parameters = [p for module in (model, method) for p in module.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim > 1 or optim.decay == "all"]
    vectors = [p for p in parameters if p.ndim <= 1 and optim.decay != "all"]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=True)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optim.name]
    return kind(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
