"""Images from files to batches: what is read, what is refused, and what a network is given."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from distill_runner.common.errors import UserError
from distill_runner.datasets.image_splits import ImageSplit, augment_images, crop_and_flip, draw_augmentation
from distill_runner.datasets.images import Augment, decode_images

CIFAR = ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))


def noise(height: int = 6, width: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray, form: str = "PNG", mode: str | None = None) -> bytes:
    image, file = Image.fromarray(pixels), io.BytesIO()
    (image.convert(mode) if mode else image).save(file, form)
    return file.getvalue()


def read(tmp_path: Path, values: list[Any], **how: Any) -> np.ndarray:
    file = tmp_path / "images.npy"
    options: dict[str, Any] = {"mode": "RGB", "convert": False, "resize": None}
    decode_images(values, "train", "img", file, **options | how)
    return np.asarray(np.load(file))


def refusal(tmp_path: Path, values: list[Any], **how: Any) -> str:
    with pytest.raises(UserError) as error:
        read(tmp_path, values, **how)
    assert str(error.value).count("\n") <= 1
    return str(error.value)


def test_bytes_and_files_are_read_alike(tmp_path: Path) -> None:
    pixels = noise()
    (tmp_path / "cat").mkdir()
    file = tmp_path / "cat" / "1.png"
    file.write_bytes(encoded(pixels))
    ways = [encoded(pixels), {"bytes": encoded(pixels), "path": "x.png"}, {"bytes": None, "path": str(file)}, file]
    found = read(tmp_path, ways)
    assert found.shape == (4, 6, 5, 3)
    assert all((image == pixels).all() for image in found)


def test_grey_images_are_read_as_one_channel_where_they_are_expected(tmp_path: Path) -> None:
    grey = noise()[:, :, 0]
    found = read(tmp_path, [encoded(grey), encoded(grey)], mode="L")
    assert found.shape == (2, 6, 5, 1)
    assert (found[..., 0] == grey).all()


def test_other_modes_become_the_one_asked_for(tmp_path: Path) -> None:
    grey = noise()[:, :, 0]
    values = [encoded(grey), encoded(noise(), mode="RGBA"), encoded(noise(), mode="P")]
    found = read(tmp_path, values, convert=True)
    assert found.shape == (3, 6, 5, 3)
    assert (found[0] == grey[:, :, None]).all()
    assert (found[1] == noise()).all()


def test_images_of_several_sizes_are_scaled_where_that_is_asked_for(tmp_path: Path) -> None:
    values = [encoded(noise(6, 5)), encoded(noise(9, 12)), encoded(np.full((40, 30, 3), 77, np.uint8))]
    found = read(tmp_path, values, resize=(6, 5))
    assert found.shape == (3, 6, 5, 3)
    assert (found[0] == noise(6, 5)).all()
    assert (found[2] == 77).all()


CORRUPT = encoded(np.zeros((40, 40, 3), np.uint8) + noise(40, 40))


RGB, GRAY = encoded(noise()), noise()[:, :, 0]
REFUSED: list[tuple[list[Any], dict[str, Any], str]] = [
    (
        [RGB, {"bytes": encoded(noise(7, 5)), "path": "dog/3.png"}],
        {},
        r"row 1 of split 'train' \(dog/3.png\) is 7x5 pixels .* 6x5\n.*task.resize=\[6,5\]",
    ),
    ([encoded(GRAY)], {}, r"task.mode=RGB: row 0 of split 'train' is gray \(mode L\)\n.*task.convert=true"),
    ([encoded(noise(), mode="RGBA")], {}, "is of mode RGBA\n.*task.convert=true"),
    ([RGB], {"mode": "L"}, r"task.mode=L: row 0 of split 'train' is in color .*\n.*Do all .*task.mode=RGB"),
    ([RGB, CORRUPT[: len(CORRUPT) // 2]], {}, r"task.columns=\[img\]: row 1 of split 'train' cannot be decoded: "),
    ([b"not an image at all"], {}, "cannot be decoded: its format is not known"),
    ([{"bytes": None, "path": None}], {}, "row 0 of split 'train' contains no image"),
    (["a cat"], {}, "row 0 of split 'train' contains a str instead of an image"),
    ([Path("none/there.png")], {}, r"row 0 of split 'train' \(none/there.png\) cannot be decoded: "),
    ([encoded(GRAY.astype(np.uint16) * 257)], {"convert": True}, "Pillow's mode I;16, which does not have 8 bits"),
]


@pytest.mark.parametrize(("values", "how", "expected"), REFUSED)
def test_what_is_no_image_of_the_task_is_refused_by_row(
    tmp_path: Path, values: list[Any], how: dict[str, Any], expected: str
) -> None:
    message = refusal(tmp_path, values, **how)
    assert re.search(expected, message), message


def pixels(tmp_path: Path, augment: Augment, views: int | None = None, count: int = 40) -> ImageSplit:
    rng = np.random.default_rng(1)
    np.save(tmp_path / "images.npy", rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8))
    np.save(tmp_path / "labels.npy", rng.integers(0, 10, count))
    return ImageSplit(tmp_path, CIFAR, augment, views)


STANDARD = Augment(pad=4, flip=True)


def test_a_batch_is_normalised_as_its_images_are_one_by_one(tmp_path: Path) -> None:
    split = pixels(tmp_path, STANDARD)
    batch = split.batch([3, 1, 7])
    assert batch.pixel_values.is_contiguous(memory_format=torch.channels_last)
    for number, values in zip([3, 1, 7], batch.pixel_values, strict=True):
        for channel, (mean, deviation) in enumerate(zip(*CIFAR, strict=True)):
            expected = (split.images[number, :, :, channel].astype(np.float64) / 255 - mean) / deviation
            np.testing.assert_allclose(values[channel], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(batch.gold, split.labels[[3, 1, 7]])


def test_a_training_image_is_the_same_in_any_batch_and_order(tmp_path: Path) -> None:
    split = pixels(tmp_path, STANDARD)
    whole = split.training_batch(np.arange(40), seed=5, epoch=3)
    part = split.training_batch(np.array([30, 2, 11]), seed=5, epoch=3)
    assert torch.equal(part.pixels, whole.pixels[[30, 2, 11]])
    assert torch.equal(part.index, torch.tensor([30, 2, 11]))


def test_a_live_teacher_sees_the_very_pictures_of_the_student(tmp_path: Path) -> None:
    split = pixels(tmp_path, STANDARD)
    batch = split.training_batch(np.array([4, 9, 20]), seed=5, epoch=3)
    seen = split.teacher_batch(batch, 16)
    assert seen.size == 16
    assert torch.equal(seen.pixels[:3], batch.pixels)
    assert torch.equal(seen.index[:3], batch.index)
    full = split.training_batch(np.arange(16), seed=5, epoch=3)
    assert split.teacher_batch(full, 16) is full


def test_cached_views_are_the_pictures_of_the_epochs(tmp_path: Path) -> None:
    split = pixels(tmp_path, STANDARD, views=3)
    views = split.teacher_inputs
    assert len(views) == views.num_outputs == 120
    for epoch in range(7):
        batch = split.training_batch(np.array([39, 0, 12]), seed=epoch, epoch=epoch)
        assert batch.output_numbers is not None
        assert torch.equal(batch.output_numbers, torch.tensor([39, 0, 12]) + 40 * (epoch % 3))
        assert torch.equal(views.batch(batch.output_index).pixels, batch.pixels)
    mixed = views.batch([5, 45, 119, 85])
    assert torch.equal(mixed.index, torch.tensor([5, 45, 119, 85]))
    for place, picture in zip([5, 45, 119, 85], mixed.pixels, strict=True):
        assert torch.equal(views.batch([place]).pixels[0], picture)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_an_image_stands_as_its_camera_says(orientation: int, tmp_path: Path) -> None:
    """As datasets and transformers' image processors read it; photos of one class lay on their side."""
    pixels, file = noise(5, 5), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(file, "PNG", exif=exif)
    turns = {1: 0, 3: 2, 6: 3, 8: 1}[orientation]
    np.testing.assert_array_equal(read(tmp_path, [file.getvalue()])[0], np.rot90(pixels, turns))


# --- Crops and flips: each example's own, whatever is around it


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
