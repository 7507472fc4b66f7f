"""Configuration of CIFAR's ResNet. Importing this module registers it with ``AutoConfig``."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig

from distill_runner.common.errors import UserError


@strict
class CifarResNetConfig(PreTrainedConfig):
    """Sizes of a ``CifarResNet``.

    Args:
        depth: 6n + 2, the number of convolutions on the main path plus the linear layer.
        widths: channels of the three groups.
        num_channels: channels of an image.
        shortcut: shortcut at the start of a group. ``conv`` is a 1x1 convolution with normalisation (option B of He et
            al., the code of TAKD); ``pad`` takes every second pixel and fills new channels with 0 (option A).
    """

    model_type = "cifar_resnet"
    attribute_map: ClassVar[dict[str, str]] = {"num_hidden_layers": "depth"}

    depth: int = 8
    widths: list[int] | tuple[int, ...] = (16, 32, 64)
    num_channels: int = 3
    shortcut: str = "conv"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_sizes(self)

    @property
    def hidden_size(self) -> int:
        """Number of features that the linear layer reads."""
        return int(self.widths[-1])

    @property
    def blocks(self) -> int:
        """Number n of blocks in a group."""
        return (self.depth - 2) // 6


def check_sizes(config: CifarResNetConfig) -> None:
    """Check that a network of these sizes exists.

    Raises:
        UserError: ``depth`` is not 6n + 2, ``widths`` are not three numbers that do not fall, or ``shortcut`` is not
            known.
    """
    depth, widths = config.depth, list(config.widths)
    if depth < 8 or (depth - 2) % 6:
        below = max(8, (depth - 2) // 6 * 6 + 2)
        raise UserError(".model.architecture.depth", depth, "must be 6n + 2", f"Take {below} or {below + 6}.")
    if len(widths) != 3 or widths != sorted(widths) or widths[0] < 1:
        raise UserError(
            ".model.architecture.widths", widths, "must be three numbers in non-decreasing order, such as 16,32,64"
        )
    if config.shortcut not in ("conv", "pad"):
        raise UserError(
            ".model.architecture.shortcut", config.shortcut, "there is no such shortcut", "Known: conv, pad."
        )


AutoConfig.register(CifarResNetConfig.model_type, CifarResNetConfig)
