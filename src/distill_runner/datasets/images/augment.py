"""Random crops and flips of whole batches of images.

The crop and the flip of an image are functions of a seed, the epoch and the number of its example. They depend neither
on the other images of the batch nor on earlier draws. A resumed run, or one with several processes, therefore uses the
same images.

Images are augmented as bytes, before normalisation. A crop is black where it reaches beyond the image, as in the recipe
for CIFAR (He et al. 2015, section 4.2).
"""

import torch
from torch import Tensor

from distill_runner.datasets.images.config import Augment
from distill_runner.datasets.noise import GOLDEN, split_mix


def apply(augment: Augment, images: Tensor, index: Tensor, seed: int, epoch: int) -> Tensor:
    """Return augmented copies of ``images`` (B, H, W, C), uint8, of the examples with the numbers ``index`` (B,)."""
    crops, flips = draws(seed, epoch, index, augment.pad)
    return cropped(images, crops, flips & augment.flip, augment.pad)


def draws(seed: int, epoch: int, index: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """Return the crop offsets down and right, (B, 2) in 0..2 pad, and the flips (B,) of the examples ``index`` (B,).

    Each number is drawn from 16 bits; it is uniform up to a relative error of (2 pad + 1) / 65536.
    """
    key = split_mix(torch.tensor([seed]) * GOLDEN)
    key = split_mix(key + torch.tensor([epoch + 1]) * GOLDEN)
    bits = split_mix(key + index * GOLDEN)
    parts = torch.stack([bits, bits >> 16, bits >> 32], dim=1) & 0xFFFF
    return parts[:, :2] * (2 * pad + 1) >> 16, parts[:, 2] >= 2**15


def cropped(images: Tensor, crops: Tensor, flips: Tensor, pad: int) -> Tensor:
    """Pad ``images`` (B, H, W, C) by ``pad`` with 0, crop them at ``crops`` (B, 2) and mirror where ``flips``."""
    count, height, width, _ = images.shape
    if pad:
        images = torch.nn.functional.pad(images, (0, 0, pad, pad, pad, pad))
    columns = torch.arange(width)
    columns = torch.where(flips[:, None], columns.flip(0), columns) + crops[:, 1:]
    rows = torch.arange(height) + crops[:, :1]
    return images[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
