"""The modules after an encoder that make one vector of a text: pooling, dense layers, normalization."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional

PoolingMode = Literal["mean", "cls", "last"]
POOLING_MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)
ACTIVATIONS = {name: getattr(nn, name) for name in ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")}


@dataclass(frozen=True)
class Dense:
    """A linear layer after the pooling, with its activation.

    Attributes:
        activation: name of the class in ``torch.nn``.
        folder: folder that holds the layer's weights; None for new weights.
    """

    in_features: int
    out_features: int
    bias: bool = True
    activation: str = "Tanh"
    folder: Path | None = None


@dataclass(frozen=True)
class VectorModules:
    """The modules after an encoder, in their order: pooling, then dense layers and normalizations.

    Attributes:
        pooling: ``mean`` of all tokens, the first token (``cls``) or the ``last`` one.
        include_prompt: whether the pooling reads the tokens of the prompt; the special token before it counts as one.
        layers: what follows the pooling; None is a normalization.
    """

    pooling: PoolingMode = "mean"
    include_prompt: bool = True
    layers: tuple[Dense | None, ...] = (None,)

    def width(self, encoder_width: int) -> int:
        """Return the number of numbers in a vector."""
        dense = [layer.out_features for layer in self.layers if layer is not None]
        return dense[-1] if dense else encoder_width

    @property
    def is_normalized(self) -> bool:
        """Whether vectors have length 1."""
        return bool(self.layers) and self.layers[-1] is None


class DenseLayer(nn.Module):
    """Linear layer and activation, with the parameters' names of sentence-transformers."""

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.linear = nn.Linear(dense.in_features, dense.out_features, dense.bias)
        self.activation = ACTIVATIONS[dense.activation]()

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.activation(self.linear(x_BC))


class Normalization(nn.Module):
    """Division of each vector by its length."""

    def forward(self, x_BC: Tensor) -> Tensor:
        return functional.normalize(x_BC, dim=-1)
