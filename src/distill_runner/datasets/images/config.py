"""How images are read, and what is done to those of training."""

from typing import Literal

from pydantic import Field

from distill_runner.common.schema import Schema

Mode = Literal["RGB", "L"]
CHANNELS: dict[Mode, int] = {"RGB": 3, "L": 1}


class Decoding(Schema):
    """How images are read.

    Args:
        mode: ``RGB``, or ``L`` for grey images of one channel; images of another mode are refused.
        convert: turn them into ``mode`` instead; what is transparent is lost.
        resize: [height, width] to which all images are scaled (bilinear, antialiased, the aspect not kept). None takes
            them as they are, and they must then be of one size.
    """

    mode: Mode = "RGB"
    convert: bool = False
    resize: tuple[int, int] | None = None


class Augment(Schema):
    """What is done to training images.

    Args:
        pad: black pixels added on each side, of which a random place is cut out in the image's own size.
        flip: mirror left and right with probability 1/2.
    """

    pad: int = Field(0, ge=0)
    flip: bool = False
