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
        sgd = torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=True)
        # The fused kernel would make the buffers, but leaves them unfilled in an update that fp16 skips. Where layers
        # begin to learn later, it refuses parameters with and without buffers together.
        sgd.state.update({p: {"momentum_buffer": torch.zeros_like(p)} for p in parameters if optim.momentum})
        return sgd
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optim.name]
    return kind(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
