"""Configuration of the decoding of images and of the augmentation of training images."""

from typing import Literal

from pydantic import Field

from distill_runner.common.schema import Schema

Mode = Literal["RGB", "L"]
CHANNELS: dict[Mode, int] = {"RGB": 3, "L": 1}


class Decoding(Schema):
    """Decoding of images.

    Args:
        mode: ``RGB``, or ``L`` for grey images of one channel. Images of another mode are an error.
        convert: convert images of another mode to ``mode`` instead; transparency is lost.
        resize: [height, width] to which all images are scaled (bilinear, antialiased, aspect ratio not kept). ``null``
            does not scale; all images must then have the same size.
    """

    mode: Mode = "RGB"
    convert: bool = False
    resize: tuple[int, int] | None = None


class Augment(Schema):
    """Augmentation of training images.

    Args:
        pad: number of black pixels added on each side, before a random crop of the image's original size.
        flip: mirror an image left to right with probability 1/2.
    """

    pad: int = Field(0, ge=0)
    flip: bool = False
