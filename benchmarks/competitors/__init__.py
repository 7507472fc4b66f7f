"""The timed competitors. In the module of each, a function prepares the training and returns a ``Train``."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.setting import Setting

Train = Callable[..., list[float]]
"""Trains a student for a number of steps and returns the losses. The student then has all its parameters in place.

Without steps it does only what comes before the first update and after the last one. A callback as third argument, for
those that record graphs, is called when all are recorded.
"""


@dataclass(frozen=True)
class Competitor:
    """Competitor: ``function`` of ``module`` in this package, called with ``options``.

    ``compared`` are options of the run whose losses are compared, for a competitor that would draw other batches.
    """

    title: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    function: str = "make"
    compared: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of its matrix products."""
        return torch.bfloat16 if self.options.get("precision") == "bf16" else torch.float32

    def make(self, setting: Setting, **options: Any) -> Train:
        module: Any = importlib.import_module(f"{__name__}.{self.module}")
        train: Train = getattr(module, self.function)(setting, **{**self.options, **options})
        return train


EACH = {"log_every": 1}
"""Each loss is read where losses are compared; a run reads them all ten updates."""
CLEVER = "clever loop: cached outputs, sorted, padded by batch, fused"

COMPETITORS = {
    "naive": Competitor("naive loop", "naive"),
    "naive_bf16": Competitor("naive loop, bf16", "naive", {"precision": "bf16"}),
    "clever": Competitor(CLEVER, "clever", compared={"sort": False}),
    "clever_bf16": Competitor(f"{CLEVER}, bf16", "clever", {"precision": "bf16"}, compared={"sort": False}),
    "textbrewer": Competitor("TextBrewer, as its examples", "textbrewer"),
    "textbrewer_tuned": Competitor("TextBrewer, tuned: padded by batch, cached outputs", "textbrewer", {"tuned": True}),
    "torchdistill": Competitor("torchdistill, padded to the maximum", "torchdistill"),
    "torchdistill_tuned": Competitor("torchdistill, padded by batch", "torchdistill", {"tuned": True}),
    "distill_run": Competitor("distill-run, fp32", "distill_run", compared=EACH),
    "distill_run_bf16": Competitor("distill-run, bf16", "distill_run", {"precision": "bf16"}, compared=EACH),
    "distill_run_branches": Competitor(
        "distill-run, bf16, 4 students in a graph",
        "distill_run",
        {"precision": "bf16", "students": 4},
        compared={**EACH, "students": 1},
    ),
    "distill_run_eager": Competitor(
        "distill-run, bf16, without graphs", "distill_run", {"precision": "bf16", "graphs": False}, compared=EACH
    ),
}

OTHER_COSTS = {
    "naive_teacher": Competitor("naive loop, its teacher", "naive", function="make_teacher"),
    "naive_evaluation": Competitor("naive loop, its evaluation", "naive", function="make_evaluation"),
}
"""Other parts of the cost of a full grid: training the teacher, and evaluation."""


def competitor(name: str) -> tuple[Competitor, int]:
    """Return the competitor and its number of processes from a name such as ``distill_run`` or ``distill_run*2``."""
    base, _, workers = name.partition("*")
    return (COMPETITORS | OTHER_COSTS)[base], int(workers or 1)
