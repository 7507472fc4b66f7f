"""Random crops and flips of whole batches, each example's its own: functions of a seed, an epoch and its number.

What an example looks like then depends neither on the others of its batch nor on what came before, so that a run that
is resumed, or shared by several processes, sees the same pictures. All works on bytes, before normalisation: what a
crop reaches beyond an image is black, as in the recipe for CIFAR (He et al. 2015, section 4.2).
"""

import torch
from torch import Tensor

from distill_runner.datasets.images.config import Augment
from distill_runner.datasets.noise import GOLDEN, split_mix


def apply(augment: Augment, images: Tensor, index: Tensor, seed: int, epoch: int) -> Tensor:
    """Augmented copies of ``images`` (B, H, W, C), bytes, whose examples have the numbers ``index`` (B,)."""
    crops, flips = draws(seed, epoch, index, augment.pad)
    return cropped(images, crops, flips & augment.flip, augment.pad)


def draws(seed: int, epoch: int, index: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """For each example of ``index`` (B,) how far its crop is moved down and right, (B, 2) in 0..2 pad, and its flip.

    Uniform but for 2e-4, from 16 bits each.
    """
    key = split_mix(torch.tensor([seed]) * GOLDEN)
    key = split_mix(key + torch.tensor([epoch + 1]) * GOLDEN)
    bits = split_mix(key + index * GOLDEN)
    parts = torch.stack([bits, bits >> 16, bits >> 32], dim=1) & 0xFFFF
    return parts[:, :2] * (2 * pad + 1) >> 16, parts[:, 2] >= 2**15


def cropped(images: Tensor, crops: Tensor, flips: Tensor, pad: int) -> Tensor:
    """``images`` (B, H, W, C), padded by ``pad`` with 0, cut at ``crops`` (B, 2), mirrored where ``flips`` (B,)."""
    count, height, width, _ = images.shape
    if pad:
        images = torch.nn.functional.pad(images, (0, 0, pad, pad, pad, pad))
    columns = torch.arange(width)
    columns = torch.where(flips[:, None], columns.flip(0), columns) + crops[:, 1:]
    rows = torch.arange(height) + crops[:, :1]
    return images[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
