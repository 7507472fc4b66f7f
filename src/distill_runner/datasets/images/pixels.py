"""A split of images in a folder, and batches of them, as the loop knows those of packed tokens."""

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
"""Pixels of an image that count as one token where batches are made by what they cost: 16 tokens for 32 x 32."""
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel, of values in 0..1."""


@dataclass(frozen=True)
class PixelBatch:
    """B images: ``pixels`` (B, H, W, C), bytes, as they lie in the array: a quarter of the floats to send.

    ``normalisation`` (2, C) are mean and standard deviation of each channel, of values in 0..1. ``index`` (B,), always
    on the host, is each image's number in its split; ``labels`` (B,) its class. ``output_rows``,
    on the host, are the places of a teacher's outputs where each image has several views. ``weights`` and ``noise`` are
    those of an update, as of a batch of tokens.
    """

    pixels: Tensor
    index: Tensor
    normalisation: Tensor
    labels: Tensor | None = None
    output_rows: Tensor | None = None
    noise: int | None = None
    weights: Mapping[Unit, float] = field(default_factory=dict)

    rows, groups = None, ()
    """Outputs are of images, not of parts of them; nor are there groups of equal length."""

    @property
    def size(self) -> int:
        return len(self.index)

    @property
    def num_outputs(self) -> int:
        return self.size

    @property
    def num_tokens(self) -> int:
        """One for each image: no loss is a mean over its parts."""
        return self.size

    @property
    def places(self) -> np.ndarray:
        """Of the outputs among all outputs of a teacher."""
        places: np.ndarray = (self.index if self.output_rows is None else self.output_rows).numpy()
        return places

    @cached_property
    def pixel_values(self) -> Tensor:
        """What a network reads: float32 (B, C, H, W), normalised, in the memory order channels-last."""
        with torch.inference_mode(False):  # a teacher may ask first; the student's gradients need a plain tensor
            values = self.pixels.permute(0, 3, 1, 2).to(torch.float32)
            mean, deviation = self.normalisation[..., None, None]
            return values.div_(255).sub_(mean).div_(deviation)


class Pixels:
    """The images of one split, memory-mapped from ``images.npy`` and ``labels.npy`` of a folder.

    Args:
        augment: what training batches look like.
        views: so many fixed pictures of each image, one after the other by epoch, the same in all runs, so that a
            teacher's outputs can be cached; None draws anew each epoch, under the seed of the stage.
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
        """What each image costs, in tokens of ``PATCH`` pixels."""
        height, width = self.images.shape[1:3]
        return np.full(len(self), max(1, height * width // PATCH))

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = None) -> PixelBatch:
        """The images of these numbers as they are, in this order."""
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
        """The same, cropped and flipped as each image is in this epoch, counted from 0, under this seed."""
        batch = self.batch(index)
        if self.num_views is None:
            return replace(batch, pixels=apply(self.augment, batch.pixels, batch.index, seed, epoch))
        view = epoch % self.num_views
        return replace(batch, pixels=self.picture(batch, view), output_rows=batch.index + view * len(self))

    def picture(self, batch: PixelBatch, view: int) -> Tensor:
        """The pixels of a batch as one of the fixed views shows them."""
        return apply(self.augment, batch.pixels, batch.index, 0, view)

    def teacher_batch(self, batch: PixelBatch, multiple: int, length_multiple: int | None = None) -> PixelBatch:
        """What a live teacher sees for ``batch``: the same pictures, some repeated to fill ``multiple``."""
        chosen = torch.arange(-(-batch.size // multiple) * multiple) % batch.size
        if len(chosen) == batch.size:
            return batch
        return replace(batch, pixels=batch.pixels[chosen], index=batch.index[chosen], labels=None, output_rows=None)

    @property
    def taught(self) -> "Views":
        """All the pictures that a teacher may be asked about, where there is an end to them."""
        assert self.num_views is not None, "Task.is_endless"
        return Views(self, self.num_views)


class Views:
    """The fixed views of a split's images, one view of all after the other, as a split of its own."""

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
