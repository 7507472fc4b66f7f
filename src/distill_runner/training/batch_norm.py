"""Batch normalisation over the whole of an update that several processes share.

Each process sees a part of the examples; with its own statistics it would train another model than one process does.
``torch.nn.SyncBatchNorm`` does this on GPUs alone; here it is plain all-reduces, which works on CPUs as well.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from distill_runner.training.processes import ProcessGroup


class AddedUp(Function):
    """The sum over all processes, and of its gradient too: what one process makes of it, all are to blame for."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total: Tensor = AddedUp.apply(gradients[0])
        return total


class SharedBatchNorm2d(nn.BatchNorm2d):
    """``BatchNorm2d`` whose mean and variance are those of the examples of all processes, gradients included.

    Two passes, as the variance by way of E[x²] would lose digits. Where an update has fewer examples than there are
    processes, one that stands in with another's example counts it once more.
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
        """Move the averages that evaluation uses."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)


def share_statistics(model: nn.Module, group: ProcessGroup) -> None:
    """Make the batch normalisations of a model count over all processes of a group; names of weights stay."""
    if group.size == 1:
        return
    assert dist.is_initialized()
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SharedBatchNorm2d
