"""Layers of packed models as compiled graphs, which a GPU gets in fewer and larger kernels."""

import logging
from functools import cache
from typing import Any

import torch

from distill_runner.common.errors import first_line
from distill_runner.models.extract import PACKED

log = logging.getLogger(__name__)


def compile_layers(module: Any, device: torch.device) -> None:
    """Let ``extract`` run the layers of a model as compiled graphs on ``device``; other modules stay as they are.

    Where this is impossible the model stays as it is too, and a line says why.
    """
    model_type = getattr(getattr(module, "config", None), "model_type", None)
    if model_type is None:
        return
    if model_type not in PACKED:
        _left_out(f"models of type {model_type} do not run layer by layer")
    elif _compiles(device):
        for layer in PACKED[model_type].layers(module.base_model):
            layer.module.compiled = True


@cache
def _compiles(device: torch.device) -> bool:
    """Try a small graph, since torch needs a C++ compiler for CPUs and Triton for GPUs."""
    try:
        torch.compile(torch.sin)(torch.zeros(2, device=device))
    except Exception as error:  # torch names no class for it, and what it needs is not ours to list
        _left_out(first_line(error))
        return False
    return True


@cache
def _left_out(reason: str) -> None:
    log.warning("runtime.compile=true: not compiled (%s)", reason)
