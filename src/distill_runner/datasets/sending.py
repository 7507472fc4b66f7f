"""Tensors on their way to a device, so that the host never waits for it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 16
"""Bytes at whose multiples each tensor begins: of any type, and as kernels like it."""


def sent(value: Any, device: torch.device) -> Any:
    """A tensor on ``device``, anything else as it is. Copied from unpinned memory it would wait for the GPU's work."""
    return sent_together([value], device)[0] if isinstance(value, Tensor) else value


def sent_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the host on ``device``, to a GPU in one copy from one block of pinned memory.

    torch keeps the block until the copy is through, and takes it again for a later one.
    """
    if device.type == "cpu" or not tensors:
        return list(tensors)
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    rooms = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    block = torch.empty(sum(rooms), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, room, size in zip(tensors, block.split(rooms), sizes, strict=True):
        room[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    there = block.to(device, non_blocking=True).split(rooms)
    return [
        room[:size].view(tensor.dtype).view(tensor.shape)
        for tensor, room, size in zip(tensors, there, sizes, strict=True)
    ]
