"""Queries, keys and values of families that ``AttentionInterface`` of ``transformers`` does not serve, by hooks.

A hook reads the output of the linear layer that makes them. They are the projections of the tokens alone: what these
families add to their attention scores for relative positions is not part of them.

Shapes: B texts of L tokens, padded; H features, of which each of the heads has d.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

Projections = tuple[Tensor, ...]
"""Queries, keys and values of one layer, each (B, L, H), all heads side by side."""
HOOKED = {
    "deberta": ("attention.self", ("in_proj",)),
    "deberta-v2": ("attention.self", ("query_proj", "key_proj", "value_proj")),
    "mpnet": ("attention.attn", ("q", "k", "v")),
}
"""The attention module of a layer and the linear layers in it that make its projections, by model type."""


@contextmanager
def hooked_projections(backbone: Any, tape: list[Projections]) -> Iterator[None]:
    """Append the projections of each layer to ``tape`` when the context ends, after a forward pass within it.

    DeBERTa applies its layers to embeddings of relative positions as well, later in the pass; only the first call of
    each counts.
    """
    attention, names = HOOKED[backbone.config.model_type]
    modules = [layer.get_submodule(attention) for layer in backbone.encoder.layer]
    outputs: dict[Any, Tensor] = {}

    def keep(linear: Any, _inputs: Any, output: Tensor) -> None:
        outputs.setdefault(linear, output)

    hooks = [getattr(module, name).register_forward_hook(keep) for module in modules for name in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for module in modules:
        projections = tuple(outputs[getattr(module, name)] for name in names)
        if len(names) == 1:  # DeBERTa's one product has query, key and value of each head side by side, without biases
            parts = projections[0].unflatten(2, (module.num_attention_heads, 3, -1)).unbind(3)
            query, key, value = (part.flatten(2) for part in parts)
            projections = query + module.q_bias, key, value + module.v_bias
        tape.append(projections)
