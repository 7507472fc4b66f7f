"""Queries, keys and values of families that ``AttentionInterface`` of ``transformers`` does not serve, by hooks.

A hook reads the output of the linear layer that makes them. They are the projections of the tokens alone: what these
families add to their attention scores for relative positions is not part of them.

Shapes: B texts of L tokens, padded; H features, of which each of the heads has d.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Projections = tuple[Tensor, ...]
"""Queries, keys and values of one layer, each (B, L, H), all heads side by side."""


@dataclass(frozen=True)
class HookedFamily:
    """Where a family makes its queries, keys and values.

    Attributes:
        attention: function that returns the attention module of a layer.
        linear: names of the linear layers in the attention module.
        split: function of the attention module and the outputs of these layers that returns the projections.
    """

    attention: Callable[[Any], Any]
    linear: tuple[str, ...]
    split: Callable[[Any, Sequence[Tensor]], Projections]


def _as_they_are(attention: Any, outputs: Sequence[Tensor]) -> Projections:
    return tuple(outputs)


def _of_one_product(attention: Any, outputs: Sequence[Tensor]) -> Projections:
    """Divide the product of DeBERTa, which has query, key and value of each head side by side, and add its biases."""
    heads = attention.num_attention_heads
    query, key, value = (part.flatten(2) for part in outputs[0].unflatten(2, (heads, 3, -1)).unbind(3))
    return query + attention.q_bias, key, value + attention.v_bias


HOOKED = {
    "deberta": HookedFamily(lambda layer: layer.attention.self, ("in_proj",), _of_one_product),
    "deberta-v2": HookedFamily(
        lambda layer: layer.attention.self, ("query_proj", "key_proj", "value_proj"), _as_they_are
    ),
    "mpnet": HookedFamily(lambda layer: layer.attention.attn, ("q", "k", "v"), _as_they_are),
}
"""Families by model type."""


@contextmanager
def hooked_projections(backbone: Any, family: HookedFamily, tape: list[Projections]) -> Iterator[None]:
    """Append the projections of each layer to ``tape`` when the context ends, after a forward pass within it.

    DeBERTa applies its layers to embeddings of relative positions as well, later in the pass; only the first call of
    each counts.
    """
    modules = [family.attention(layer) for layer in backbone.encoder.layer]
    outputs: dict[Any, Tensor] = {}

    def keep(linear: Any, _inputs: Any, output: Tensor) -> None:
        outputs.setdefault(linear, output)

    hooks = [getattr(module, name).register_forward_hook(keep) for module in modules for name in family.linear]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    tape += [family.split(module, [outputs[getattr(module, name)] for name in family.linear]) for module in modules]
