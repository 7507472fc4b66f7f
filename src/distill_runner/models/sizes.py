"""Check that a configuration describes a model that this machine can build, before anything is built."""

import os
from typing import Any

from transformers import PreTrainedConfig

from distill_runner.common.errors import UserError

COUNTS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
SHARES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps", "initializer_range")
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation")
COMMON_ACTIVATIONS = frozenset({"gelu", "gelu_new", "relu", "silu", "tanh"})
FLOAT32 = 4


def check(config: PreTrainedConfig, key: str, value: Any) -> None:
    """Check that the fields of ``config`` are valid, fit each other, and fit into the memory of this machine.

    Args:
        key, value: the option of the run that names the model, for the message.
    Raises:
        UserError: a field is not valid, or the fields do not fit.
    """

    def refuse(problem: str) -> UserError:
        return UserError(key, value, f"its configuration {problem}", "Correct its config.json, or use another model.")

    if getattr(config, "is_encoder_decoder", False):
        raise refuse(f"describes an encoder-decoder ({config.model_type}); only encoders are supported")
    for name in (*COUNTS, "max_position_embeddings"):
        number = getattr(config, name, 1)
        if type(number) is not int or number < 1:
            raise refuse(f"has {name}={str(number)[:40]}, which is not a whole number above 0")
    for name in SHARES:
        number = getattr(config, name, 0.0)
        if not isinstance(number, int | float) or not 0 <= number < 1:
            raise refuse(f"has {name}={str(number)[:40]}, which is not a number from 0 to below 1")
    for name in ACTIVATIONS:
        chosen = getattr(config, name, None)
        if isinstance(chosen, str) and not _is_activation(chosen):
            raise refuse(f"has {name}={chosen[:40]}, which is not a known activation")
    width, heads = getattr(config, "hidden_size", 1), getattr(config, "num_attention_heads", 1)
    if getattr(config, "true_hidden_size", width) % heads:
        raise refuse(f"has {heads} heads, which do not divide its width, {width}")
    needed, there = FLOAT32 * _parameters(config), _memory()
    if needed > there:
        raise refuse(f"needs {needed / 1e9:,.0f} GB, and this machine has {there / 1e9:.0f} GB of memory")


def _is_activation(name: str) -> bool:
    """Whether ``transformers`` has an activation of this name. Its list takes seconds to import."""
    if name in COMMON_ACTIVATIONS:
        return True
    from transformers.activations import ACT2FN

    return name in ACT2FN


def _parameters(config: Any) -> int:
    """Return the approximate number of parameters of an encoder: its embeddings and the matrices of its layers."""
    layers, width, _, inner, words = (getattr(config, name, 1) for name in COUNTS)
    positions = getattr(config, "max_position_embeddings", 1)
    alike = min(layers, getattr(config, "num_hidden_groups", layers))  # ALBERT's layers share weights in groups
    width_inside = getattr(config, "true_hidden_size", width)
    embedded = (words + positions) * min(getattr(config, "embedding_size", width), width)
    return int(embedded + alike * (4 * width_inside**2 + 2 * width_inside * inner))


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
