"""Layers of the families that run packed: their projections, and what follows the attention.

T tokens of H features in all, Q rows of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distill_runner.models.features import PROJECTIONS, Projection

Drop = Callable[[Any, Tensor, int], Tensor]
"""Applies a dropout module to rows, at a place of its own: 1 or 2 in a layer, 0 for embeddings, 0 or 1 in a head."""
Weights = tuple[Tensor, Tensor | None]


class Layer(ABC):
    """One layer of a Transformer, as the packed path computes it.

    Args:
        module: the family's own.

    ``window`` is the distance up to which a token attends to others, None for all of them; ``rotary`` is the kind of
    its rotary positions, None without them.
    """

    window: int | None = None
    rotary: str | None = None

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    @abstractmethod
    def attention_dropout(self) -> float:
        """Probability with which an attention probability is dropped in training."""

    @abstractmethod
    def weights(self, names: Sequence[Projection]) -> Weights:
        """Weight (names * H, H) and bias of these projections, side by side."""

    @abstractmethod
    def finish(self, h_QH: Tensor, context_QH: Tensor, drop: Drop) -> Tensor:
        """The layer's output, of its input and what the attention made of it."""

    def attended(self, h_TH: Tensor) -> Tensor:
        """What the projections read: the layer's input, normalised first in pre-norm families."""
        return h_TH

    @property
    def computed_twice(self) -> bool:
        """Whether its activations are not kept for the backward pass (``activation_checkpointing_enable``)."""
        return self.module.training and getattr(self.module, "gradient_checkpointing", False)


def _side_by_side(layers: Sequence[Any]) -> Weights:
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return torch.cat([layer.weight for layer in layers]), torch.cat(biases) if biases else None


class BertLayer(Layer):
    @property
    def attention_dropout(self) -> float:
        return float(self.module.attention.self.dropout.p)

    def weights(self, names: Sequence[Projection]) -> Weights:
        return _side_by_side([getattr(self.module.attention.self, name) for name in names])

    def finish(self, h_QH: Tensor, context_QH: Tensor, drop: Drop) -> Tensor:
        h_QH = self._added(self.module.attention.output, context_QH, h_QH, drop, 1)
        return self._added(self.module.output, self.module.intermediate(h_QH), h_QH, drop, 2)

    @staticmethod
    def _added(block: Any, x: Tensor, residual_QH: Tensor, drop: Drop, place: int) -> Tensor:
        normed: Tensor = block.LayerNorm(drop(block.dropout, block.dense(x), place) + residual_QH)
        return normed


class DistilBertLayer(Layer):
    @property
    def attention_dropout(self) -> float:
        return float(self.module.attention.dropout.p)

    def weights(self, names: Sequence[Projection]) -> Weights:
        return _side_by_side([getattr(self.module.attention, f"{name[0]}_lin") for name in names])

    def finish(self, h_QH: Tensor, context_QH: Tensor, drop: Drop) -> Tensor:
        layer, ffn = self.module, self.module.ffn
        h_QH = layer.sa_layer_norm(layer.attention.out_lin(context_QH) + h_QH)
        expanded = ffn.activation(ffn.lin1(h_QH))
        normed: Tensor = layer.output_layer_norm(drop(ffn.dropout, ffn.lin2(expanded), 2) + h_QH)
        return normed


class ModernBertLayer(Layer):
    """Pre-norm, with rotary positions and GeGLU; two of three layers attend locally."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.rotary = module.attention_type
        if module.attention_type == "sliding_attention":
            self.window = module.config.sliding_window

    @property
    def attention_dropout(self) -> float:
        return float(self.module.attn.attention_dropout)

    def attended(self, h_TH: Tensor) -> Tensor:
        normed: Tensor = self.module.attn_norm(h_TH)
        return normed

    def weights(self, names: Sequence[Projection]) -> Weights:
        fused = self.module.attn.Wqkv
        if len(names) == len(PROJECTIONS):
            return fused.weight, fused.bias
        chosen = [PROJECTIONS.index(name) for name in names]
        weight = fused.weight.unflatten(0, (len(PROJECTIONS), -1))[chosen].flatten(0, 1)
        bias = None if fused.bias is None else fused.bias.unflatten(0, (len(PROJECTIONS), -1))[chosen].flatten()
        return weight, bias

    def finish(self, h_QH: Tensor, context_QH: Tensor, drop: Drop) -> Tensor:
        layer, mlp = self.module, self.module.mlp
        h_QH = h_QH + drop(layer.attn.out_drop, layer.attn.Wo(context_QH), 1)
        expanded, gate = mlp.Wi(layer.mlp_norm(h_QH)).chunk(2, dim=-1)
        added: Tensor = h_QH + mlp.Wo(drop(mlp.drop, mlp.act(expanded) * gate, 2))
        return added


class NomicBertLayer(Layer):
    """Post-norm, with rotary positions and SwiGLU."""

    rotary = "full_attention"

    @property
    def attention_dropout(self) -> float:
        return float(self.module.self_attn.attention_dropout)

    def weights(self, names: Sequence[Projection]) -> Weights:
        return _side_by_side([getattr(self.module.self_attn, f"{name[0]}_proj") for name in names])

    def finish(self, h_QH: Tensor, context_QH: Tensor, drop: Drop) -> Tensor:
        layer = self.module
        attended = drop(layer.post_attention_dropout, layer.self_attn.o_proj(context_QH), 1)
        h_QH = layer.post_attention_layernorm(h_QH + attended)
        normed: Tensor = layer.post_mlp_layernorm(h_QH + drop(layer.post_mlp_dropout, layer.mlp(h_QH), 2))
        return normed
