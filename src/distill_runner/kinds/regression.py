"""Regression tasks: one score for each example."""

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import field_validator

from distill_runner.common.errors import UserError, as_list
from distill_runner.datasets.metrics import REGRESSION_METRICS
from distill_runner.datasets.reading.split_table import SplitTable
from distill_runner.kinds.text import TextTask, is_empty
from distill_runner.models.head import Head

if TYPE_CHECKING:
    from distill_runner.methods.outputs import Outputs


class RegressionTask(TextTask):
    """Regression task: one score for each example.

    Attributes:
        labels: must be null, because scores have no class names.
    """

    known_metrics = REGRESSION_METRICS

    kind: Literal["regression"] = "regression"
    labels: None = None

    @field_validator("labels", mode="before")
    @classmethod
    def _has_no_classes(cls, labels: Any) -> Any:
        if labels is not None:
            shown = as_list([str(label) for label in labels])
            raise UserError("task.labels", shown, "a regression task has no class names", "task.labels=null")
        return labels

    @property
    def head(self) -> Head:
        return Head("AutoModelForSequenceClassification", ("score",), 1, "regression", self.name)

    @property
    def outputs(self) -> "Outputs":
        from distill_runner.methods.outputs import Score

        return Score()

    def as_lines(self, outputs: np.ndarray, names: bool = True) -> list[str]:
        return [f"{value:.3f}" for value in outputs[:, 0]]

    def is_unlabelled(self, value: Any) -> bool:
        return is_empty(value)

    def encode(self, values: list[Any], table: SplitTable, split: str) -> np.ndarray:
        """Return the scores, float32 (N,)."""
        for value in values:
            try:
                finite = math.isfinite(float(value))
            except (TypeError, ValueError):
                finite = False
            if not finite:
                problem = f"split '{split}' holds {value!r}, which is not a finite number"
                remedy = "Repair the file, or for classes: task.kind=classification task.metrics=[accuracy]"
                raise UserError("task.label", self.label, problem, remedy)
        return np.asarray(values, dtype=np.float32)
