"""Image networks: any image classifier of ``transformers``, and CIFAR's ResNet. They give their logits, no more."""

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from distill_runner.datasets.images.pixels import PixelBatch
from distill_runner.models import resnet  # noqa: F401, for AutoConfig to know it
from distill_runner.models.features import FeatureRequest, Features


def reads_images(config: PreTrainedConfig) -> bool:
    return hasattr(config, "num_channels") and not hasattr(config, "vocab_size")


def depth_and_width(config: Any) -> tuple[int, int]:
    """Layers, or blocks of all stages, and the features of the last."""
    depth = getattr(config, "num_hidden_layers", None) or sum(config.depths)
    width = getattr(config, "hidden_size", None) or config.hidden_sizes[-1]
    return int(depth), int(width)


def image_size(config: Any) -> tuple[int, int] | None:
    """Height and width of the images that a network is made for; None where any will do."""
    size = getattr(config, "image_size", None)
    return None if size is None else (size, size) if isinstance(size, int) else (size[0], size[1])


def extract_pixels(model: PreTrainedModel, batch: PixelBatch, needs: FeatureRequest) -> Features:
    """Run ``model`` on the pictures of ``batch``."""
    logits = model(pixel_values=batch.pixel_values).logits
    return Features(logits=logits)
