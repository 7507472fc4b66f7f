"""Who is timed. Each has a module and in it a function, which prepares what may be prepared and returns a ``Train``."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.setting import Setting

Train = Callable[[Any, int], list[float]]
"""Trains a student for so many steps and leaves it whole; returns the losses."""


@dataclass(frozen=True)
class Competitor:
    """``function`` of ``module`` in this package, and what it is told."""

    title: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    function: str = "make"

    @property
    def dtype(self) -> torch.dtype:
        """Of its matrix products."""
        return torch.bfloat16 if self.options.get("precision") == "bf16" else torch.float32

    def make(self, setting: Setting, **options: Any) -> Train:
        module: Any = importlib.import_module(f"{__name__}.{self.module}")
        made: Train = getattr(module, self.function)(setting, **self.options, **options)
        return made


COMPETITORS = {
    "naive": Competitor("naive loop", "naive"),
    "naive_bf16": Competitor("naive loop, bf16", "naive", {"precision": "bf16"}),
    "textbrewer": Competitor("TextBrewer, as its examples", "textbrewer"),
    "textbrewer_tuned": Competitor("TextBrewer, tuned: padded by batch, cached outputs", "textbrewer", {"tuned": True}),
    "torchdistill": Competitor("torchdistill, padded to the maximum", "torchdistill"),
    "torchdistill_tuned": Competitor("torchdistill, padded by batch", "torchdistill", {"tuned": True}),
    "ours": Competitor("distill-run, fp32", "ours"),
    "ours_bf16": Competitor("distill-run, bf16", "ours", {"precision": "bf16"}),
    "ours_compiled": Competitor("distill-run, bf16, compiled", "ours", {"precision": "bf16", "compiled": True}),
}

BESIDE = {
    "naive_teacher": Competitor("naive loop, its teacher", "naive", function="make_teacher"),
    "naive_evaluation": Competitor("naive loop, its evaluation", "naive", function="make_evaluation"),
}
"""What a whole grid takes besides the training of students."""


def competitor(name: str) -> tuple[Competitor, int]:
    """The competitor and its number of processes, from ``ours`` or ``ours*2``."""
    base, _, workers = name.partition("*")
    return (COMPETITORS | BESIDE)[base], int(workers or 1)
