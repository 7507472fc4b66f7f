"""Batch normalisation with statistics over the examples of all processes.

Each process sees only a part of the examples. Statistics of that part alone would train a different model than a
single process does. ``torch.nn.SyncBatchNorm`` works on GPUs only; the plain all-reduces here work on CPUs as well.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from distill_runner.training.processes import ProcessGroup, peers


class AddedUp(Function):
    """Sum a tensor over all processes, and sum its gradient over all processes as well.

    The sum enters the loss of every process, so each process contributes to the gradient.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        values = values.clone()
        with peers():
            dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total: Tensor = AddedUp.apply(gradients[0])
        return total


class SharedBatchNorm2d(nn.BatchNorm2d):
    """``BatchNorm2d`` with mean and variance over the examples of all processes, gradients included.

    The variance is computed in a second pass, because E[x²] - E[x]² would lose digits. If a small update has no batch
    left for a process, the process repeats a batch of another process, whose examples then count once more.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        full = x.to(torch.promote_types(x.dtype, torch.float32))
        counted = AddedUp.apply(torch.cat([full.sum((0, 2, 3)), full.new_tensor([x.numel() / x.shape[1]])]))
        mean, count = counted[:-1] / counted[-1], counted[-1]
        centred = full - mean[:, None, None]
        variance = AddedUp.apply(centred.square().sum((0, 2, 3))) / count
        self._follow(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        scale = self.weight * (variance + self.eps).rsqrt()
        normed: Tensor = centred * scale[:, None, None] + self.bias[:, None, None]
        return normed.to(x.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running mean and variance used in evaluation."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)


def share_statistics(model: nn.Module, group: ProcessGroup) -> None:
    """Let every ``BatchNorm2d`` of ``model`` use statistics over all processes; weights keep their names."""
    if group.size == 1:
        return
    assert dist.is_initialized()
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SharedBatchNorm2d
