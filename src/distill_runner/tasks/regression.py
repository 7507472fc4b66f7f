"""Regression tasks: one score for each example."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from distill_runner.common.errors import UserError, override
from distill_runner.common.schema import Assumption
from distill_runner.datasets.metrics import REGRESSION_METRICS
from distill_runner.datasets.readers.content import SplitTable
from distill_runner.tasks.columns import numbers
from distill_runner.tasks.text import TextTask

if TYPE_CHECKING:
    from distill_runner.datasets.splits import Split
    from distill_runner.methods.outputs import Outputs


class RegressionTask(TextTask):
    """Regression task: one score for each example; ``labels`` must be null."""

    served_reply = "float(row[0])"
    metric_names = REGRESSION_METRICS
    output_kind = "scores"

    type: Annotated[
        Literal["regression"],
        Assumption("soft labels: squared error of the two outputs, without a temperature", "ALP-KD"),
    ] = "regression"

    @property
    def outputs(self) -> "Outputs":
        from distill_runner.methods.outputs import Score

        return Score()

    def prediction_warnings(self, outputs: np.ndarray, split: "Split") -> list[str]:
        spread, of_labels = np.std(outputs), np.std(np.asarray(split.labels))
        return [] if spread > 1e-3 * of_labels else [f"the student predicts {outputs.mean():.3f} for all examples"]

    def encode(self, values: list[Any], table: SplitTable, split: str) -> np.ndarray:
        """Return the scores, float32 (N,)."""
        remedy = "Repair the file, or for classes: "
        remedy += override("task.type", "classification", "task.metrics", ["accuracy"])
        return encode_scores(values, self.label, split, remedy)


def encode_scores(values: list[Any], column: str, split: str, remedy: str = "Repair the file.") -> np.ndarray:
    """Return the scores in a column as float32, (N,).

    Raises:
        UserError: a value is not a finite number.
    """
    scores = numbers(values)
    if len(rows := np.flatnonzero(np.isnan(scores))):
        problem = f"split '{split}' holds {values[rows[0]]!r}, which is not a finite number in 32 bits"
        raise UserError("task.label", column, problem, remedy)
    return scores.astype(np.float32)
