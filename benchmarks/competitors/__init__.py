"""Competitors that are timed. A function in the module of each prepares the training and returns a ``Train``."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.setting import Setting

Train = Callable[[Any, int], list[float]]
"""Trains a student for a number of steps and returns the losses. The student then has all its parameters in place."""


@dataclass(frozen=True)
class Competitor:
    """Competitor: ``function`` of ``module`` in this package, called with ``options``."""

    title: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    function: str = "make"

    @property
    def dtype(self) -> torch.dtype:
        """Data type of its matrix products."""
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
"""Other parts of the cost of a whole grid: training the teacher, and evaluation."""


def competitor(name: str) -> tuple[Competitor, int]:
    """Return the competitor and its number of processes from a name such as ``ours`` or ``ours*2``."""
    base, _, workers = name.partition("*")
    return (COMPETITORS | BESIDE)[base], int(workers or 1)
