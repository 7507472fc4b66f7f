"""Crops and flips: each example's own, whatever is around it; equal to a reference image by image."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_runner.datasets.image_splits import augment_images, crop_and_flip, draw_augmentation
from distill_runner.datasets.images import Augment

STANDARD = Augment(pad=4, flip=True)


def some_images(count: int, height: int = 9, width: int = 7, channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (count, height, width, channels), generator=generator, dtype=torch.uint8)


def reference(image: np.ndarray, down: int, right: int, flip: bool, pad: int) -> np.ndarray:
    """One image (H, W, C), pixel by pixel."""
    height, width, _ = image.shape
    out = np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            from_y = y + down - pad
            from_x = (width - 1 - x if flip else x) + right - pad
            if 0 <= from_y < height and 0 <= from_x < width:
                out[y, x] = image[from_y, from_x]
    return out


@given(st.integers(0, 4), st.data())
@settings(max_examples=25, deadline=None)
def test_a_batch_is_cropped_and_flipped_as_its_images_are_one_by_one(pad: int, data: st.DataObject) -> None:
    images = some_images(5)
    place = st.integers(0, 2 * pad)
    crops = torch.tensor(data.draw(st.lists(st.tuples(place, place), min_size=5, max_size=5)))
    flips = torch.tensor(data.draw(st.lists(st.booleans(), min_size=5, max_size=5)))
    found = crop_and_flip(images, crops, flips, pad)
    for image, (down, right), flip, out in zip(images, crops.tolist(), flips.tolist(), found, strict=True):
        np.testing.assert_array_equal(out.numpy(), reference(image.numpy(), down, right, flip, pad))


@given(st.integers(0, 2**32 - 1), st.integers(0, 10_000), st.permutations(range(12)), st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_an_example_looks_the_same_in_any_batch(seed: int, epoch: int, order: list[int], size: int) -> None:
    images = some_images(12)
    whole = augment_images(STANDARD, images, torch.arange(12), seed, epoch)
    chosen = torch.tensor(order[:size])
    assert torch.equal(augment_images(STANDARD, images[chosen], chosen, seed, epoch), whole[chosen])


def test_seed_epoch_and_example_each_change_the_draw() -> None:
    index = torch.arange(1000)
    first = torch.cat(draw_augmentation(1, 0, index, 4)[:1])
    for other in (
        draw_augmentation(2, 0, index, 4)[0],
        draw_augmentation(1, 1, index, 4)[0],
        draw_augmentation(1, 0, index + 1, 4)[0],
    ):
        share = (first == other).all(dim=1).double().mean()
        assert share < 0.05  # 1/81 by chance


def test_places_and_flips_are_uniform_and_independent() -> None:
    (down, right), flips = (
        draw_augmentation(7, 3, torch.arange(81 * 2 * 400), 4)[0].T,
        draw_augmentation(7, 3, torch.arange(81 * 2 * 400), 4)[1],
    )
    cells = (down * 9 + right) * 2 + flips.long()
    counts = torch.bincount(cells, minlength=162).double()
    assert len(counts) == 162
    chi2 = ((counts - 400) ** 2 / 400).sum()
    assert 100 < chi2 < 240  # 161 degrees of freedom: outside by chance less than once in 10,000


def test_negative_and_large_seeds_and_numbers_are_taken() -> None:
    crops, _ = draw_augmentation(2**32 - 1, 10**6, torch.tensor([0, 2**40]), 4)
    assert crops.shape == (2, 2)
    assert int(crops.min()) >= 0
    assert int(crops.max()) <= 8
