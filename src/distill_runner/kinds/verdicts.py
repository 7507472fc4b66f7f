"""Right or wrong, and how sure: what models are compared by, example by example."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Verdicts:
    """What a model says of N examples.

    Attributes:
        right: (N,), whether it is right.
        of_truth: (N,), the probability that it gives to what is right.
        said, truth: what it says of an example by its number, with the probability of that, and what is right.
    """

    right: np.ndarray
    of_truth: np.ndarray
    said: Callable[[int], str]
    truth: Callable[[int], str]
