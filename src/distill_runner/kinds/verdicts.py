"""Predictions of a model by example, with correctness and probability, to compare models example by example."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Verdicts:
    """Predictions of a model for N examples.

    Attributes:
        right: (N,), whether the prediction is right.
        of_truth: (N,), the probability that the model gives to the true label or answer.
        said: function from the number of an example to its prediction as a text, with the probability.
        truth: function from the number of an example to its true label or answer as a text.
    """

    right: np.ndarray
    of_truth: np.ndarray
    said: Callable[[int], str]
    truth: Callable[[int], str]
