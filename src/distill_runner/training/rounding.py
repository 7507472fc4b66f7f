"""Weights rounded to bf16 or fp16 for a pass through a model, all by one kernel.

Autocast gives the same numbers, but starts a kernel for each weight, and another one for its gradient.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Function

Place = tuple[dict[str, Any], str]
"""The parameters of a module by name, and one of the names."""
_PLACES: WeakKeyDictionary[nn.Module, list[Place]] = WeakKeyDictionary()


@contextmanager
def rounded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Give the linear layers of ``model`` weights of ``dtype`` within the context, whose gradients reach the originals.

    A weight that a module of another kind shares, such as a vocabulary, stays as it is. So does a model whose layers
    the backward pass computes again, when the originals are back.
    """
    if model not in _PLACES:
        _PLACES[model] = _places(model)
    places = _PLACES[model]
    originals = [parameters[name] for parameters, name in places]
    if originals:
        _put(places, _Rounded.apply(dtype, *originals))
    try:
        yield
    finally:
        _put(places, originals)


def _put(places: Sequence[Place], tensors: Sequence[Tensor]) -> None:
    for (parameters, name), tensor in zip(places, tensors, strict=True):
        parameters[name] = tensor


def _places(model: nn.Module) -> list[Place]:
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return []
    uses = Counter(id(one) for module in model.modules() for one in module._parameters.values())
    linear = [module._parameters for module in model.modules() if isinstance(module, nn.Linear)]
    return [(where, name) for where in linear for name, one in where.items() if one is not None and uses[id(one)] == 1]


class _Rounded(Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # the optimizer leaves a weight without a gradient as it is
        ctx.dtype = weights[0].dtype
        return tuple(_cast(weights, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        there = iter(_cast([one for one in gradients if one is not None], ctx.dtype))
        return None, *(None if one is None else next(there) for one in gradients)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(one, dtype=dtype) for one in tensors]
    torch._foreach_copy_(copies, list(tensors))
    return copies
