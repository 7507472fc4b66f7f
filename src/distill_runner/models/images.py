"""Image networks: any image classifier of ``transformers``, and the configuration of CIFAR's ResNet.

Importing this module registers that configuration with ``AutoConfig``; importing ``resnet`` registers its network.
"""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig

from distill_runner.common.errors import UserError


def reads_images(config: PreTrainedConfig) -> bool:
    return hasattr(config, "num_channels") and not hasattr(config, "vocab_size")


def depth_and_width(config: Any) -> tuple[int, int]:
    """Return the number of layers (or of the blocks of all stages) and the number of features of the last one."""
    depth = getattr(config, "num_hidden_layers", None) or sum(config.depths)
    width = getattr(config, "hidden_size", None) or config.hidden_sizes[-1]
    return int(depth), int(width)


def image_size(config: Any) -> tuple[int, int] | None:
    """Return the height and width of the images that a network requires; None if it accepts any size."""
    size = getattr(config, "image_size", None)
    return None if size is None else (size, size) if isinstance(size, int) else (size[0], size[1])


@strict
class CifarResNetConfig(PreTrainedConfig):
    """Sizes of a ``CifarResNet``.

    Args:
        depth: 6n + 2, the number of convolutions on the main path plus the linear layer.
        widths: channels of the three groups.
        num_channels: channels of an image.
        shortcut: shortcut at the start of a group. ``conv`` is a 1x1 convolution with normalization (option B of He et
            al., the code of TAKD); ``pad`` takes every second pixel and fills new channels with 0 (option A).
    Raises:
        UserError: ``depth`` is not 6n + 2, ``widths`` are not three numbers in non-decreasing order, or there is no
            such ``shortcut``.
    """

    model_type = "cifar_resnet"
    attribute_map: ClassVar[dict[str, str]] = {"num_hidden_layers": "depth"}

    depth: int = 8
    widths: list[int] | tuple[int, ...] = (16, 32, 64)
    num_channels: int = 3
    shortcut: str = "conv"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        key, widths = ".model.architecture", list(self.widths)
        if self.depth < 8 or (self.depth - 2) % 6:
            lower = max(8, (self.depth - 2) // 6 * 6 + 2)
            raise UserError(f"{key}.depth", self.depth, "must be 6n + 2", f"Take {lower} or {lower + 6}.")
        if len(widths) != 3 or widths != sorted(widths) or widths[0] < 1:
            problem = "must be three numbers in non-decreasing order, such as 16,32,64"
            raise UserError(f"{key}.widths", widths, problem)
        if self.shortcut not in ("conv", "pad"):
            raise UserError(f"{key}.shortcut", self.shortcut, "there is no such shortcut", "Known: conv, pad.")

    @property
    def hidden_size(self) -> int:
        """Number of features that the linear layer reads."""
        return int(self.widths[-1])

    @property
    def blocks(self) -> int:
        """Number n of blocks in a group."""
        return (self.depth - 2) // 6


AutoConfig.register(CifarResNetConfig.model_type, CifarResNetConfig)
