"""Random crops and flips of whole batches, each example's its own: functions of a seed, an epoch and its number.

What an example looks like then depends neither on the others of its batch nor on what came before, so that a run that
is resumed, or shared by several processes, sees the same pictures. All works on bytes, before normalisation: what a
crop reaches beyond an image is black, as in the recipe for CIFAR (He et al. 2015, section 4.2).
"""

import torch
from pydantic import Field
from torch import Tensor

from distill_runner.common.schema import Schema
from distill_runner.common.seeds import GOLDEN, split_mix


class Augment(Schema):
    """What is done to training images.

    Args:
        pad: black pixels added on each side, of which a random place is cut out in the image's own size.
        flip: mirror left and right with probability 1/2.
        views: so many fixed pictures of each image, one after the other by epoch, the same in all runs, so that a
            teacher's outputs can be cached; None draws anew each epoch.
    """

    pad: int = Field(0, ge=0)
    flip: bool = False
    views: int | None = Field(None, ge=1)

    @property
    def num_views(self) -> int | None:
        """Pictures of each image; None without end."""
        return self.views if self.pad or self.flip else 1

    def view(self, epoch: int) -> int | None:
        """Number of the fixed picture that an epoch, counted from 0, shows; None where it draws anew."""
        return None if self.num_views is None else epoch % self.num_views

    def apply(self, images: Tensor, index: Tensor, seed: int, epoch: int) -> Tensor:
        """Augmented copies of ``images`` (B, H, W, C), bytes, whose examples have the numbers ``index`` (B,)."""
        view = self.view(epoch)
        crops, flips = draws(seed, epoch, index, self.pad) if view is None else draws(0, view, index, self.pad)
        return cropped(images, crops, flips & self.flip, self.pad)


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
