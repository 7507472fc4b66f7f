"""Low precision: checks of the hardware, and weights rounded to bf16 or fp16 for a pass through a model.

One kernel rounds all weights. Autocast gives the same numbers, but starts a kernel for each weight, and another one for
its gradient.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Function

from distill_runner.common.errors import UserError
from distill_runner.training.config import Precision

log = logging.getLogger(__name__)

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
WeightSlot = tuple[dict[str, Any], str]
"""The parameters of a module by name, and one of the names."""
_SLOTS: WeakKeyDictionary[nn.Module, list[WeightSlot]] = WeakKeyDictionary()


def check_precision(precision: Precision, device: torch.device) -> None:
    """Check that ``device`` computes in ``precision``, and warn if it gains nothing from it.

    Raises:
        UserError: the device lacks the precision.
    """
    if precision in ("fp16", "tf32") and device.type != "cuda":
        raise UserError("runtime.precision", precision, "needs a GPU", "Take bf16 or fp32 on a CPU.")
    if precision == "bf16" and device.type == "cpu" and not cpu_has_bf16():
        log.warning("runtime.precision=bf16: this CPU has no bf16 units and is many times faster in fp32")
    if precision in ("bf16", "tf32") and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:  # a GPU older than Ampere accepts bf16 and tf32, but computes them more slowly
            gpu = f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
            log.warning("runtime.precision=%s: %s has no units for it; its fast precision is fp16", precision, gpu)


def cpu_has_bf16() -> bool:
    """Return whether the CPU has instructions for bf16 products; other CPUs need many instructions for one."""
    return any(available for name, available in torch.cpu.get_capabilities().items() if "bf16" in name)


@contextmanager
def rounded_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Give the linear layers of ``model`` weights of ``dtype`` within the context, whose gradients reach the originals.

    A weight that another module shares, such as a vocabulary, stays as it is. So does a model with gradient
    checkpointing: the backward pass computes its layers again after the originals are back.
    """
    if model not in _SLOTS:
        _SLOTS[model] = _weight_slots(model)
    slots = _SLOTS[model]
    originals = [parameters[name] for parameters, name in slots]
    if originals:
        _fill_slots(slots, _RoundedWeights.apply(dtype, *originals))
    try:
        yield
    finally:
        _fill_slots(slots, originals)


def _fill_slots(slots: Sequence[WeightSlot], tensors: Sequence[Tensor]) -> None:
    for (parameters, name), tensor in zip(slots, tensors, strict=True):
        parameters[name] = tensor


def _weight_slots(model: nn.Module) -> list[WeightSlot]:
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return []
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    linear = [module._parameters for module in model.modules() if isinstance(module, nn.Linear)]
    return [
        (parameters, name)
        for parameters in linear
        for name, parameter in parameters.items()
        if parameter is not None and uses[id(parameter)] == 1
    ]


class _RoundedWeights(Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # the optimizer leaves a weight without a gradient as it is
        ctx.dtype = weights[0].dtype
        return tuple(_cast(weights, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        casts = iter(_cast([gradient for gradient in gradients if gradient is not None], ctx.dtype))
        return None, *(None if gradient is None else next(casts) for gradient in gradients)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, list(tensors))
    return copies
