"""Scores in columns of the data as outputs of a task's head."""

from typing import Any

import numpy as np

from distill_runner.tasks.scores import training_scores


def column_outputs(task: Any) -> np.ndarray:
    """Return the scores of the training examples, float32 (N, C)."""
    scores = training_scores(task, None)
    return scores.outputs[scores.is_used]
