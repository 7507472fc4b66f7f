"""Image networks: any image classifier of ``transformers``, and CIFAR's ResNet. They provide only logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from distill_runner.datasets.images.pixels import PixelBatch
from distill_runner.models import resnet_config  # noqa: F401, registers it with AutoConfig
from distill_runner.models.features import FeatureRequest, Features

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


def extract_pixels(model: PreTrainedModel, batch: PixelBatch, needs: FeatureRequest) -> Features:
    """Run ``model`` on the images of ``batch``."""
    logits = model(pixel_values=batch.pixel_values).logits
    return Features(logits=logits)
