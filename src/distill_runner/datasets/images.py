"""Image files: decoding into one array of bytes, the options of decoding and augmentation, and contact sheets.

This module does not import torch, and Pillow only when images are decoded.
"""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from distill_runner.common.errors import UserError, override
from distill_runner.common.schema import Schema

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

Mode = Literal["RGB", "L"]
_Size = tuple[int, int] | None
CHANNELS: dict[Mode, int] = {"RGB": 3, "L": 1}
_CONVERTIBLE_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV")
"""Pillow's 8-bit modes. Pillow would clip images of 16 bits instead of scaling their values."""

TILE = 112
"""Width and height of an image on a contact sheet, in pixels; smaller images are enlarged without smoothing."""
LINE = 15
"""Height of a line of a caption, in pixels."""
COLUMNS = 8
"""Images in a row of a contact sheet."""


class Augment(Schema):
    """Augmentation of training images.

    Args:
        pad: number of black pixels added on each side, before a random crop of the image's original size.
        flip: mirror an image left to right with probability 1/2.
    """

    pad: int = Field(0, ge=0)
    flip: bool = False


def decode_images(
    values: Sequence[Any], split: str, column: str, file: Path, mode: Mode, convert: bool, resize: _Size
) -> None:
    """Write the images of a split as uint8 (N, H, W, C) to ``file``; only one image is in memory at a time.

    Args:
        values: for each image, its bytes, ``{"bytes": .., "path": ..}`` as on the hub, or its path.
        split: name of the split, for messages.
        column: name of the column of the images, for messages.
        mode, convert, resize: as in ``ImagesTask``; mode and size are never guessed.
    Raises:
        UserError: a row has no image, or its image cannot be decoded or has another mode or size. The message names
            the row.
    """
    array: Any = None  # a memory map
    for row, value in enumerate(values):
        path = value.get("path") if isinstance(value, dict) else None
        path = f"{value.parent.name}/{value.name}" if isinstance(value, Path) else path
        where = f"row {row} of split '{split}'" + (f" ({path})" if path else "")
        pixels = np.asarray(_convert(_open_image(value, where, column), where, mode, convert, resize), dtype=np.uint8)
        pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
        if array is None:
            array = np.lib.format.open_memmap(file, "w+", np.uint8, (len(values), *pixels.shape))
            first = where
        if pixels.shape != array.shape[1:]:
            own, others = (f"{height}x{width}" for height, width in (pixels.shape[:2], array.shape[1:3]))
            problem = f"{where} is {own} pixels (height x width), but {first} is {others}"
            remedy = "Scale all images to one size: " + override("task.resize", [*array.shape[1:3]])
            raise UserError("task.resize", "null", problem, remedy)
        array[row] = pixels
    assert array is not None
    array.flush()


def _open_image(value: Any, where: str, column: str) -> "Image":
    """Return the decoded image in its original mode."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    source = value.get("bytes") or value.get("path") if isinstance(value, dict) else value
    if not isinstance(source, bytes | Path) and not (isinstance(value, dict) and source):
        content = "no image" if source is None else f"a {type(value).__name__} instead of an image"
        remedy = "Use a column of PNG or JPEG bytes, or remove such rows."
        raise UserError("task.columns", f"[{column}]", f"{where} contains {content}", remedy)
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()
            return ImageOps.exif_transpose(image)  # a camera stores how it was held, as datasets reads it too
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = "its format is not known" if isinstance(error, UnidentifiedImageError) else str(error)[:100]
        problem = f"{where} cannot be decoded: {reason}"
        raise UserError("task.columns", f"[{column}]", problem, "Repair or remove such rows.") from error


def _convert(image: "Image", where: str, mode: Mode, convert: bool, resize: _Size) -> "Image":
    """Return the image in a mode and size."""
    from PIL.Image import Resampling

    if image.mode != mode:
        if image.mode not in _CONVERTIBLE_MODES:
            problem = f"{where} has Pillow's mode {image.mode}, which does not have 8 bits per channel"
            raise UserError("task.mode", mode, problem, "Save such images with 8 bits per channel.")
        if not convert:
            names = {"L": "gray (mode L)", "RGB": "in color (mode RGB)"}
            problem = f"{where} is {names.get(image.mode, f'of mode {image.mode}')}"
            remedy = override("task.convert", True) + f" converts every image to {mode}."
            if image.mode in CHANNELS:
                remedy += " Do all images have that mode? " + override("task.mode", image.mode)
            raise UserError("task.mode", mode, problem, remedy)
        image = image.convert(mode)
    if resize and image.size[::-1] != resize:
        image = image.resize(resize[::-1], Resampling.BILINEAR)
    return image


def save_contact_sheet(file: Path, images: Sequence["Tensor"], captions: Sequence[str]) -> None:
    """Save ``images``, each (H, W, C) of uint8 with 1 or 3 channels, eight in a row, for people to look at.

    Equal images give equal bytes.

    Args:
        captions: one text for each image, of one or more lines; lines wider than the image are cut.
    """
    from PIL import Image, ImageDraw, ImageFont

    lines = max(caption.count("\n") + 1 for caption in captions)
    step, height = TILE + LINE // 2, TILE + LINE * lines + LINE // 2
    rows = math.ceil(len(images) / COLUMNS)
    sheet = Image.new("RGB", (step * min(COLUMNS, len(images)) + LINE // 2, height * rows + LINE // 2), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for number, (pixels, caption) in enumerate(zip(images, captions, strict=True)):
        x, y = LINE // 2 + number % COLUMNS * step, LINE // 2 + number // COLUMNS * height
        picture = Image.fromarray(pixels.squeeze(-1).numpy()).convert("RGB")
        factor = TILE / max(picture.size)
        resampling = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
        size = round(picture.width * factor), round(picture.height * factor)
        sheet.paste(picture.resize(size, resampling), (x, y))
        for row, line in enumerate(caption.splitlines()):
            while draw.textlength(line, font) > TILE:
                line = line[:-2] + "…"
            draw.text((x, y + TILE + LINE * row), line, "black", font)
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(file)
