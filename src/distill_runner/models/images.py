"""Image networks: any image classifier of ``transformers``, and CIFAR's ResNet, of any depth 6n + 2.

He et al. 2015 (arXiv:1512.03385), section 4.2: a 3x3 stem of 16 channels, three groups of n blocks of two 3x3
convolutions with 16, 32 and 64 channels, global average pooling, one linear layer. ``transformers`` has only the
ResNets for ImageNet, whose stem divides the height and width of an image by four.

Importing this module registers the model with ``AutoConfig`` and ``AutoModelForImageClassification``.
"""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

from distill_runner.common.errors import UserError, require_choice


def reads_images(config: PreTrainedConfig) -> bool:
    return hasattr(config, "num_channels") and not hasattr(config, "vocab_size")


def depth_and_width(config: Any) -> tuple[int, int]:
    """Return the number of layers (or of the blocks of all stages) and the number of features of the last one."""
    depth = getattr(config, "num_hidden_layers", None) or sum(config.depths)
    return int(depth), int(getattr(config, "hidden_size", None) or config.hidden_sizes[-1])


def image_size(config: Any) -> tuple[int, int] | None:
    """Return the height and width of the images that a network requires; None if it accepts any size."""
    size = getattr(config, "image_size", None)
    if size is None:
        return None
    return (size, size) if isinstance(size, int) else (size[0], size[1])


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
        require_choice(f"{key}.shortcut", self.shortcut, ("conv", "pad"), "there is no such shortcut")

    @property
    def hidden_size(self) -> int:
        """Number of features that the linear layer reads."""
        return int(self.widths[-1])

    @property
    def blocks(self) -> int:
        """Number n of blocks in a group."""
        return (self.depth - 2) // 6


class Block(nn.Module):
    """Two 3x3 convolutions and their shortcut: (B, in, H, W) -> (B, out, H / stride, W / stride), rounded up."""

    def __init__(self, inputs: int, outputs: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.stride, self.new_channels = stride, outputs - inputs
        self.conv1, self.norm1 = _conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = _conv(outputs, outputs, 3), nn.BatchNorm2d(outputs)
        changes_shape = stride > 1 or self.new_channels
        self.shortcut = (
            nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
            if changes_shape and shortcut == "conv"
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        residual = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(residual + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.shortcut is not None:
            return self.shortcut(x)
        x = x[:, :, :: self.stride, :: self.stride]
        front = self.new_channels // 2
        return functional.pad(x, (0, 0, 0, 0, front, self.new_channels - front)) if self.new_channels else x


class CifarResNet(PreTrainedModel):
    """CIFAR's ResNet with a linear head: ``pixel_values`` (B, channels, H, W) -> ``logits`` (B, classes)."""

    config_class = CifarResNetConfig
    config: CifarResNetConfig
    base_model_prefix = "network"
    main_input_name = "pixel_values"
    input_modalities = "image"

    def __init__(self, config: CifarResNetConfig) -> None:
        super().__init__(config)
        width = config.widths[0]
        self.stem, self.norm = _conv(config.num_channels, width, 3), nn.BatchNorm2d(width)
        blocks = list[nn.Module]()
        for group, outputs in enumerate(config.widths):
            for number in range(config.blocks):
                blocks.append(Block(width, outputs, 2 if group and not number else 1, config.shortcut))
                width = outputs
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(width, config.num_labels or 0)
        self.post_init()

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, **_ignored: object
    ) -> ImageClassifierOutputWithNoAttention:
        logits = self.classifier(self.blocks(functional.relu(self.norm(self.stem(pixel_values)))).mean(dim=(2, 3)))
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize convolutions with a normal distribution by fan-out, and the linear layer as torch does.

        The fan-out initialization is that of He et al. 2015, as in TAKD's code.
        """
        match module:
            case nn.Conv2d():
                init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            case nn.BatchNorm2d():
                init.ones_(module.weight)
                init.zeros_(module.bias)
                for buffer, fill in ((module.running_mean, init.zeros_), (module.running_var, init.ones_)):
                    assert buffer is not None
                    fill(buffer)
            case nn.Linear():
                bound = module.in_features**-0.5
                init.uniform_(module.weight, -bound, bound)
                init.uniform_(module.bias, -bound, bound)


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


AutoConfig.register(CifarResNetConfig.model_type, CifarResNetConfig)
AutoModelForImageClassification.register(CifarResNetConfig, CifarResNet)
