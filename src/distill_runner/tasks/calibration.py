"""The temperature that calibrates scores on labeled examples (Guo et al. 2017, arXiv 1706.04599, section 4.2)."""

from collections.abc import Callable

import numpy as np

LOWEST, HIGHEST = 0.05, 20.0
"""Bounds of the temperature; scores that need more say too little, or are wrong with certainty."""
STEPS = 60
GOLDEN = (5**0.5 - 1) / 2


def fitted_temperature(loss: Callable[[float], float]) -> float:
    """Return the temperature between 0.05 and 20 with the lowest loss, by golden section over its logarithm.

    The loss of classes and of label sets is convex in the inverse of the temperature, so that it has one minimum.

    Args:
        loss: function of the temperature: the mean loss of the scaled scores on labeled examples.
    """
    low, high = np.log(LOWEST), np.log(HIGHEST)
    inner = [high - GOLDEN * (high - low), low + GOLDEN * (high - low)]
    values = [loss(float(np.exp(point))) for point in inner]
    for _ in range(STEPS):
        if values[0] <= values[1]:
            high, inner[1], values[1] = inner[1], inner[0], values[0]
            inner[0] = high - GOLDEN * (high - low)
            values[0] = loss(float(np.exp(inner[0])))
        else:
            low, inner[0], values[0] = inner[0], inner[1], values[1]
            inner[1] = low + GOLDEN * (high - low)
            values[1] = loss(float(np.exp(inner[1])))
    return float(np.exp((low + high) / 2))


def class_loss(outputs_NC: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean negative log-likelihood of class indices (N,) or of sets of labels (N, C) of 0 and 1."""
    from scipy.special import log_softmax

    if labels.ndim == 1:
        return float(-log_softmax(outputs_NC, axis=1)[np.arange(len(labels)), labels].mean())
    return float((np.logaddexp(0, outputs_NC) - labels * outputs_NC).mean())
