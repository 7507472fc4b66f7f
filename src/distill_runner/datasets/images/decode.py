"""Decoding of images (PNG or JPEG bytes, or a file) into an array of bytes. Mode and size are never guessed."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from distill_runner.common.errors import UserError
from distill_runner.datasets.images.config import CHANNELS, Decoding

_CONVERTIBLE = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV")
"""Pillow's 8-bit modes. Pillow would clip images of 16 bits instead of scaling their values."""


def decode(values: Sequence[Any], decoding: Decoding, split: str, column: str, file: Path) -> None:
    """Write the images of a split as uint8 (N, H, W, C) to ``file``; only one image is in memory at a time.

    Args:
        values: for each image, its bytes, ``{"bytes": .., "path": ..}`` as on the hub, or its path.
        split: name of the split, for messages.
        column: name of the column of the images, for messages.
    Raises:
        UserError: a row has no image, or its image cannot be decoded or has another mode or size. The message names
            the row.
    """
    array: Any = None  # a memory map
    for row, value in enumerate(values):
        where = f"row {row} of split '{split}'" + (f" ({name})" if (name := _name(value)) else "")
        image = _pixels(_fitted(_opened(value, where, column), decoding, where))
        if array is None:
            array = np.lib.format.open_memmap(file, "w+", np.uint8, (len(values), *image.shape))
            first = where
        if image.shape != array.shape[1:]:
            (height, width), (other_height, other_width) = image.shape[:2], array.shape[1:3]
            problem = f"{where} is {height}x{width} pixels (height x width), {first} {other_height}x{other_width}"
            remedy = f"Scale all images to one size: task.resize=[{other_height},{other_width}]"
            raise UserError("task.resize", "null", problem, remedy)
        array[row] = image
    assert array is not None
    array.flush()


def _name(value: Any) -> str | None:
    """Return the name of an image's file, or None if the data does not contain it."""
    if isinstance(value, Path):
        return f"{value.parent.name}/{value.name}"
    return value.get("path") if isinstance(value, dict) else None


def _opened(value: Any, where: str, column: str) -> Image.Image:
    """Return the decoded image in its original mode."""
    source = value.get("bytes") or value.get("path") if isinstance(value, dict) else value
    if not isinstance(source, bytes | Path) and not (isinstance(value, dict) and source):
        what = "no image" if source is None else f"a {type(value).__name__} instead of an image"
        remedy = "Take a column of PNG or JPEG bytes, or remove such rows."
        raise UserError("task.columns", f"[{column}]", f"{where} holds {what}", remedy)
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()
            return image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        why = "its format is not known" if isinstance(error, UnidentifiedImageError) else str(error)[:100]
        problem = f"{where} cannot be decoded: {why}"
        raise UserError("task.columns", f"[{column}]", problem, "Repair or remove such rows.") from error


def _fitted(image: Image.Image, decoding: Decoding, where: str) -> Image.Image:
    """Return the image in the mode and size that ``decoding`` asks for."""
    if image.mode != decoding.mode:
        if image.mode not in _CONVERTIBLE:
            problem = f"{where} has Pillow's mode {image.mode}, which does not have 8 bits per channel"
            raise UserError("task.mode", decoding.mode, problem, "Save such images with 8 bits per channel.")
        if not decoding.convert:
            named = {"L": "grey (mode L)", "RGB": "in colour (mode RGB)"}
            problem = f"{where} is {named.get(image.mode, f'of mode {image.mode}')}"
            other = f", or task.mode={image.mode} if all images have that mode" if image.mode in CHANNELS else ""
            remedy = f"task.convert=true converts every image to {decoding.mode}{other}."
            raise UserError("task.mode", decoding.mode, problem, remedy)
        image = image.convert(decoding.mode)
    if decoding.resize and image.size[::-1] != decoding.resize:
        image = image.resize(decoding.resize[::-1], Image.Resampling.BILINEAR)
    return image


def _pixels(image: Image.Image) -> np.ndarray:
    """Return the pixels (H, W, C) of an image."""
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels
