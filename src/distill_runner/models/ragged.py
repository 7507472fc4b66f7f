"""Attention over packed sequences without padding, by the flash attention of GPUs since Ampere (sm_80).

``torch.nn.attention.varlen`` calls the same operation, but without dropout.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from distill_runner.datasets.batches import Batch

_HEAD_SIZES = range(8, 129, 8)
"""Features of a head that the kernels take on all these GPUs, forward and backward."""


@dataclass(frozen=True)
class RaggedAttention:
    """Attention over the sequences of a batch on a GPU, in bf16 or fp16.

    Attributes:
        bounds: (B + 1,), int32, where each sequence begins and the last one ends.
        longest: number of tokens of the longest sequence, at most.
    """

    bounds: Tensor
    longest: int

    @classmethod
    def of(cls, batch: Batch) -> "RaggedAttention | None":
        """Return the attention for ``batch``, or None where it must be padded."""
        device = batch.starts.device
        if device.type != "cuda" or not torch.is_autocast_enabled("cuda") or not _is_there(device):
            return None
        bounds = pad(batch.starts.int(), (0, 1), value=batch.num_tokens)
        return cls(bounds, max(group.real.shape[1] for group in batch.groups))

    def takes(self, size: int) -> bool:
        """Return whether there are kernels for heads of ``size`` features."""
        return size in _HEAD_SIZES

    def attend(self, projected: Tensor, num_heads: int, p: float, window: int | None) -> Tensor:
        """Return the contexts (T, H), as ``PackedAttention.attend`` does."""
        queries, keys, values = projected.unflatten(1, (3, num_heads, -1)).unbind(1)
        context, *_ = torch.ops.aten._flash_attention_forward(
            *(queries, keys, values, self.bounds, self.bounds, self.longest, self.longest, p, False, False),
            window_size_left=window,
            window_size_right=window,
        )
        return context.flatten(1)


@cache
def _is_there(device: torch.device) -> bool:
    """Try one token, since builds of torch differ in their kernels."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    one = RaggedAttention(torch.arange(2, dtype=torch.int32, device=device), 1)
    try:
        one.attend(torch.zeros(1, 3 * 8, dtype=torch.bfloat16, device=device), 1, 0.0, None)
    except (AttributeError, RuntimeError):
        return False
    return True
