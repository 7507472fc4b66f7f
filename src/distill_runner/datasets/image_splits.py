"""Images in training: batches of them, their augmentation, and splits with the same interface as splits of text.

Images are augmented as bytes, before normalization. The crop and the flip of an image are functions of a seed, the
epoch and the number of its example. They depend neither on the other images of the batch nor on earlier draws. A
resumed run, or one with several processes, therefore uses the same images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill_runner.datasets.batches import GOLDEN, AnyBatch, Unit, rounded_up, split_mix
from distill_runner.datasets.images import Augment
from distill_runner.datasets.splits import Split
from distill_runner.datasets.tokenization import array_in

PIXELS_PER_TOKEN = 64
"""Pixels that count as one token where batches are limited by their number of tokens: 16 tokens for 32 x 32."""
Normalization = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel, for values in 0..1."""


@dataclass(frozen=True)
class ImageBatch(AnyBatch):
    """Batch of B images.

    Attributes:
        pixels: (B, H, W, C), uint8 as stored; float32 would be four times as much data to send to the device.
        index: (B,), number of each image in its split; always on the host.
        normalization: (2, C), mean and standard deviation of each channel, for values in 0..1.
        labels: (B,), class of each image.
        output_numbers: (B,), number of each image among a teacher's outputs if images have several views; on the host.
        dropout_seed, shares: as in ``Batch``.
    """

    pixels: Tensor
    index: Tensor
    normalization: Tensor
    labels: Tensor | None = None
    output_numbers: Tensor | None = None
    dropout_seed: int | None = None
    shares: Mapping[Unit, float] = field(default_factory=dict)

    head_tokens, groups = None, ()
    """A head has one output per image, not per part of an image, and there are no groups of equal length."""

    @property
    def num_outputs(self) -> int:
        return self.size

    @property
    def num_tokens(self) -> int:
        """Number of images: no loss is a mean over parts of an image."""
        return self.size

    @cached_property
    def pixel_values(self) -> Tensor:
        """Normalized float32 input of a network, (B, C, H, W), in channels-last memory format."""
        # A teacher may read it first, in inference mode; the student's backward pass needs a normal tensor.
        with torch.inference_mode(False):
            values = self.pixels.permute(0, 3, 1, 2).to(torch.float32)
            mean, deviation = self.normalization[..., None, None]
            return values.div_(255).sub_(mean).div_(deviation)


def augment_images(augment: Augment, images: Tensor, index: Tensor, seed: int, epoch: int) -> Tensor:
    """Return augmented copies of ``images`` (B, H, W, C), uint8, of the examples with the numbers ``index`` (B,)."""
    crops, flips = draw_augmentation(seed, epoch, index, augment.pad)
    return crop_and_flip(images, crops, flips & augment.flip, augment.pad)


def draw_augmentation(seed: int, epoch: int, index: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """Return the crop offsets down and right, (B, 2) in 0..2 pad, and the flips (B,) of the examples ``index`` (B,).

    Each number is drawn from 16 bits; it is uniform up to a relative error of (2 pad + 1) / 65536.
    """
    key = split_mix(torch.tensor([seed]) * GOLDEN)
    key = split_mix(key + torch.tensor([epoch + 1]) * GOLDEN)
    bits = split_mix(key + index * GOLDEN)
    parts = torch.stack([bits, bits >> 16, bits >> 32], dim=1) & 0xFFFF
    return parts[:, :2] * (2 * pad + 1) >> 16, parts[:, 2] >= 2**15


def crop_and_flip(images: Tensor, crops: Tensor, flips: Tensor, pad: int) -> Tensor:
    """Pad ``images`` (B, H, W, C) by ``pad``, crop them at ``crops`` (B, 2) and mirror them where ``flips`` is True.

    A crop is black where it reaches beyond the image, as in the recipe for CIFAR (He et al. 2015, section 4.2).
    """
    count, height, width, _ = images.shape
    if pad:
        images = torch.nn.functional.pad(images, (0, 0, pad, pad, pad, pad))
    columns = torch.arange(width)
    columns = torch.where(flips[:, None], columns.flip(0), columns) + crops[:, 1:]
    rows = torch.arange(height) + crops[:, :1]
    return images[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


class ImageSplit(Split):
    """Images of one split, memory-mapped from ``images.npy`` and ``labels.npy`` of a folder.

    Its batches are ``ImageBatch``es. They share the members of ``Batch`` that training reads, hence the type ``Any``.

    Args:
        augment: augmentation of training batches.
        views: number of fixed augmented views of each image, used in turn by epoch. They are the same in all runs, so
            that a teacher's outputs can be cached. None augments anew in each epoch, with the seed of the stage.
    """

    def __init__(self, folder: Path, normalization: Normalization, augment: Augment, views: int | None = None) -> None:
        self.images: np.ndarray = np.load(folder / "images.npy", mmap_mode="r")
        self.labels = array_in(folder, "labels")
        self.normalization, self.augment = torch.tensor(normalization), augment
        self.num_views = views if augment.pad or augment.flip else 1

    def __len__(self) -> int:
        return len(self.images)

    @property
    def lengths(self) -> np.ndarray:
        """Cost of each image, in tokens of ``PIXELS_PER_TOKEN`` pixels."""
        height, width = self.images.shape[1:3]
        return np.full(len(self), max(1, height * width // PIXELS_PER_TOKEN))

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = None) -> Any:
        """Return the images with the numbers ``index``, in this order and without augmentation."""
        index = np.asarray(index, dtype=np.int64)
        return ImageBatch(
            pixels=torch.from_numpy(self.images[index]),
            index=torch.from_numpy(index),
            normalization=self.normalization,
            labels=None if self.labels is None else torch.from_numpy(np.asarray(self.labels[index])),
        )

    def training_batch(self, index: np.ndarray, seed: int, epoch: int, length_multiple: int | None = None) -> Any:
        """Return the images ``index``, cropped and flipped for ``epoch`` (counted from 0) and ``seed``."""
        batch = self.batch(index)
        if self.num_views is None:
            return replace(batch, pixels=augment_images(self.augment, batch.pixels, batch.index, seed, epoch))
        view = epoch % self.num_views
        return replace(batch, pixels=self.view_pixels(batch, view), output_numbers=batch.index + view * len(self))

    def view_pixels(self, batch: ImageBatch, view: int) -> Tensor:
        """Return the pixels of the fixed view number ``view`` for the images of ``batch``."""
        return augment_images(self.augment, batch.pixels, batch.index, 0, view)

    def teacher_batch(self, batch: Any, multiple: int, length_multiple: int | None = None) -> Any:
        """Return a live teacher's batch: the augmented images of ``batch``, some repeated as in ``Split``."""
        rows = torch.arange(rounded_up(batch.size, multiple)) % batch.size
        if len(rows) == batch.size:
            return batch
        return replace(batch, pixels=batch.pixels[rows], index=batch.index[rows], labels=None, output_numbers=None)

    @property
    def teacher_inputs(self) -> "ImageViews":
        """All views of all images, for which a teacher's outputs can be cached; requires a fixed number of views."""
        assert self.num_views is not None, "Task.is_endless"
        return ImageViews(self, self.num_views)


class ImageViews(Split):
    """Fixed views of a split's images as a separate split: first view 0 of all images, then view 1, and so on."""

    def __init__(self, split: ImageSplit, num_views: int) -> None:
        self.split, self.num_views = split, num_views

    def __len__(self) -> int:
        return self.num_views * len(self.split)

    @property
    def lengths(self) -> np.ndarray:
        return np.tile(self.split.lengths, self.num_views)

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = None) -> Any:
        index = np.asarray(index, dtype=np.int64)
        numbers, views = index % len(self.split), index // len(self.split)
        batch = self.split.batch(numbers)
        pixels = batch.pixels.clone()
        for view in np.unique(views):
            rows = torch.from_numpy(views == view)
            part = replace(batch, pixels=batch.pixels[rows], index=batch.index[rows])
            pixels[rows] = self.split.view_pixels(part, int(view))
        return replace(batch, pixels=pixels, index=torch.from_numpy(index), labels=None)
