"""Splits of images, and batches of them with the same interface as batches of tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill_runner.datasets.batches import Unit
from distill_runner.datasets.images.augment import apply
from distill_runner.datasets.images.config import Augment

PATCH = 64
"""Pixels that count as one token where batches are limited by their number of tokens: 16 tokens for 32 x 32."""
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel, for values in 0..1."""


@dataclass(frozen=True)
class PixelBatch:
    """Batch of B images.

    Attributes:
        pixels: (B, H, W, C), uint8 as stored; float32 would be four times as much data to send to the device.
        index: (B,), number of each image in its split; always on the host.
        normalisation: (2, C), mean and standard deviation of each channel, for values in 0..1.
        labels: (B,), class of each image.
        output_rows: (B,), row of each image among a teacher's outputs if each image has several views; on the host.
        noise, weights: as in ``Batch``.
    """

    pixels: Tensor
    index: Tensor
    normalisation: Tensor
    labels: Tensor | None = None
    output_rows: Tensor | None = None
    noise: int | None = None
    weights: Mapping[Unit, float] = field(default_factory=dict)

    rows, groups = None, ()
    """A head has one output per image, not per part of an image, and there are no groups of equal length."""

    @property
    def size(self) -> int:
        return len(self.index)

    @property
    def num_outputs(self) -> int:
        return self.size

    @property
    def num_tokens(self) -> int:
        """Number of images: no loss is a mean over parts of an image."""
        return self.size

    @property
    def places(self) -> np.ndarray:
        """Row of each output of the batch among all outputs of a teacher."""
        places: np.ndarray = (self.index if self.output_rows is None else self.output_rows).numpy()
        return places

    @cached_property
    def pixel_values(self) -> Tensor:
        """Normalised float32 input of a network, (B, C, H, W), in channels-last memory format."""
        # A teacher may read it first, in inference mode; the student's backward pass needs a normal tensor.
        with torch.inference_mode(False):
            values = self.pixels.permute(0, 3, 1, 2).to(torch.float32)
            mean, deviation = self.normalisation[..., None, None]
            return values.div_(255).sub_(mean).div_(deviation)


class Pixels:
    """Images of one split, memory-mapped from ``images.npy`` and ``labels.npy`` of a folder.

    Args:
        augment: augmentation of training batches.
        views: number of fixed augmented views of each image, used in turn by epoch. They are the same in all runs, so
            that a teacher's outputs can be cached. None augments anew in each epoch, with the seed of the stage.
    """

    token_ids = None

    def __init__(self, folder: Path, normalisation: Normalisation, augment: Augment, views: int | None = None) -> None:
        self.images: np.ndarray = np.load(folder / "images.npy", mmap_mode="r")
        there = (folder / "labels.npy").exists()
        self.labels: Any = np.load(folder / "labels.npy", mmap_mode="r") if there else None
        self.normalisation, self.augment = torch.tensor(normalisation), augment
        self.num_views = views if augment.pad or augment.flip else 1

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_outputs(self) -> int:
        return len(self)

    @property
    def lengths(self) -> np.ndarray:
        """Cost of each image, in tokens of ``PATCH`` pixels."""
        height, width = self.images.shape[1:3]
        return np.full(len(self), max(1, height * width // PATCH))

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = None) -> PixelBatch:
        """Return the images with the numbers ``index``, in this order and without augmentation."""
        index = np.asarray(index, dtype=np.int64)
        return PixelBatch(
            pixels=torch.from_numpy(self.images[index]),
            index=torch.from_numpy(index),
            normalisation=self.normalisation,
            labels=None if self.labels is None else torch.from_numpy(np.asarray(self.labels[index])),
        )

    def training_batch(
        self, index: np.ndarray, seed: int, epoch: int, length_multiple: int | None = None
    ) -> PixelBatch:
        """Return the images ``index``, cropped and flipped for ``epoch`` (counted from 0) and ``seed``."""
        batch = self.batch(index)
        if self.num_views is None:
            return replace(batch, pixels=apply(self.augment, batch.pixels, batch.index, seed, epoch))
        view = epoch % self.num_views
        return replace(batch, pixels=self.picture(batch, view), output_rows=batch.index + view * len(self))

    def picture(self, batch: PixelBatch, view: int) -> Tensor:
        """Return the pixels of the fixed view number ``view`` for the images of ``batch``."""
        return apply(self.augment, batch.pixels, batch.index, 0, view)

    def teacher_batch(self, batch: PixelBatch, multiple: int, length_multiple: int | None = None) -> PixelBatch:
        """Return a live teacher's batch: the images of ``batch``, some repeated up to a multiple of ``multiple``."""
        chosen = torch.arange(-(-batch.size // multiple) * multiple) % batch.size
        if len(chosen) == batch.size:
            return batch
        return replace(batch, pixels=batch.pixels[chosen], index=batch.index[chosen], labels=None, output_rows=None)

    @property
    def taught(self) -> "Views":
        """All views of all images, for which a teacher's outputs can be cached; requires a fixed number of views."""
        assert self.num_views is not None, "Task.is_endless"
        return Views(self, self.num_views)


class Views:
    """Fixed views of a split's images as a separate split: first view 0 of all images, then view 1, and so on."""

    token_ids = None
    labels = None

    def __init__(self, split: Pixels, num_views: int) -> None:
        self.split, self.num_views = split, num_views

    def __len__(self) -> int:
        return self.num_views * len(self.split)

    @property
    def num_outputs(self) -> int:
        return len(self)

    @property
    def lengths(self) -> np.ndarray:
        return np.tile(self.split.lengths, self.num_views)

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = None) -> PixelBatch:
        index = np.asarray(index, dtype=np.int64)
        number, view = index % len(self.split), index // len(self.split)
        batch = self.split.batch(number)
        pixels = batch.pixels.clone()
        for one in np.unique(view):
            chosen = torch.from_numpy(view == one)
            here = replace(batch, pixels=batch.pixels[chosen], index=batch.index[chosen])
            pixels[chosen] = self.split.picture(here, int(one))
        return replace(batch, pixels=pixels, index=torch.from_numpy(index), labels=None)

    def teacher_batch(self, batch: PixelBatch, multiple: int, length_multiple: int | None = None) -> PixelBatch:
        return self.split.teacher_batch(batch, multiple)
