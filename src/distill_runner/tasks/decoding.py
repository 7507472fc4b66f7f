"""What the outputs of a head mean, in numbers: one class, a set of labels, or a score. No data and no options are read.

Shapes: N examples with C outputs each. Labels have the form of ``Examples.labels``.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from distill_runner.common.errors import quantity
from distill_runner.datasets.metrics import softmax

MIN_PROBABILITY = 1e-12
"""Lower bound of a probability before its logarithm."""
ROUNDING, MAX_ROUNDING = 0.005, 0.05
"""Tolerance for the sum of C probabilities: C times half of the second decimal, and at most 0.05."""
_EXACT = 1e-6
"""Sums that differ less from 1 are left as they are: float32 does not hold more digits."""
LOWEST, HIGHEST = 0.05, 20.0
"""Bounds of a temperature; scores that need more say too little, or are wrong with certainty."""


class Decoding(ABC):
    """Base of the meanings that outputs can have; the losses on them are in ``methods.outputs``.

    Attributes:
        has_probabilities: whether outputs are logits of probabilities.
    """

    has_probabilities: ClassVar[bool] = True

    @abstractmethod
    def labels(self, outputs_NC: np.ndarray) -> np.ndarray:
        """Return the labels that outputs favor."""

    def indicators(self, labels: np.ndarray, num_outputs: int) -> np.ndarray:
        """Return labels as numbers (N, C), whose mean over several answers is their share."""
        return labels.reshape(len(labels), -1).astype(np.float64)

    @abstractmethod
    def texts(self, outputs_NC: np.ndarray, names: Sequence[str]) -> list[str]:
        """Return the prediction for each example as text."""

    # Only for outputs that are logits of probabilities

    def probabilities(self, outputs_NC: np.ndarray) -> np.ndarray:
        """Return the probability of each label, float64 (N, C)."""
        raise NotImplementedError

    def likelihood(self, outputs_NC: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return the probability (N,) of the labels of each example together."""
        raise NotImplementedError

    def confidence(self, outputs_NC: np.ndarray) -> np.ndarray:
        """Return the probability (N,) of the favored class, or the lowest one that a label is present or absent."""
        return self.likelihood(outputs_NC, self.labels(outputs_NC))

    def logits(self, probabilities_NC: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Return the logits (N, C) of probabilities, which are valid (N,), and what was changed in them."""
        raise NotImplementedError


class OneClass(Decoding):
    """Logits of C classes, of which an example has one; labels are class indices (N,)."""

    def labels(self, outputs_NC: np.ndarray) -> np.ndarray:
        return np.asarray(outputs_NC.argmax(axis=1))

    def indicators(self, labels: np.ndarray, num_outputs: int) -> np.ndarray:
        return np.eye(num_outputs)[labels]

    def texts(self, outputs_NC: np.ndarray, names: Sequence[str]) -> list[str]:
        return [names[number] for number in outputs_NC.argmax(axis=1)]

    def probabilities(self, outputs_NC: np.ndarray) -> np.ndarray:
        return softmax(outputs_NC)

    def likelihood(self, outputs_NC: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return self.probabilities(outputs_NC)[np.arange(len(labels)), labels]

    def logits(self, probabilities_NC: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Percentages are divided by 100, errors of rounding removed, and probabilities below 1e-12 raised to that."""
        remarks, tolerance = list[str](), min(MAX_ROUNDING, ROUNDING * probabilities_NC.shape[1]) + _EXACT
        sums = probabilities_NC.sum(1, keepdims=True)
        if probabilities_NC.max(initial=0) > 1 + _EXACT and (np.abs(sums / 100 - 1) <= tolerance).all():
            probabilities_NC, sums = probabilities_NC / 100, sums / 100
            remarks.append("percentages, divided by 100")
        error = np.abs(sums - 1)
        is_rounded = (error > _EXACT) & (error <= tolerance)
        if is_rounded.any():
            probabilities_NC = np.where(is_rounded, probabilities_NC / sums, probabilities_NC)
            rounded = sums[is_rounded]
            sizes = f"sums from {rounded.min():.4g} to {rounded.max():.4g}"
            remarks.append(f"{quantity(len(rounded), 'row', ',')} with {sizes} normalized")
        is_valid = np.all(probabilities_NC >= 0, axis=1) & (np.abs(probabilities_NC.sum(1) - 1) <= 2 * _EXACT)
        return np.log(np.maximum(probabilities_NC, MIN_PROBABILITY)), is_valid, remarks


class LabelSet(Decoding):
    """Logits of C labels, of which an example has any number; labels are 0 or 1, float32 (N, C)."""

    def labels(self, outputs_NC: np.ndarray) -> np.ndarray:
        return (outputs_NC > 0).astype(np.float32)

    def texts(self, outputs_NC: np.ndarray, names: Sequence[str]) -> list[str]:
        """Labels are divided by ``;``, or a list of JSON where a name holds a mark that may divide labels."""
        rows = [[names[number] for number in np.flatnonzero(row > 0).tolist()] for row in outputs_NC]
        has_marks = bool(re.search(r"[;|,\[\]\n]", "".join(names)))
        return [json.dumps(row, ensure_ascii=False) if has_marks else ";".join(row) for row in rows]

    def probabilities(self, outputs_NC: np.ndarray) -> np.ndarray:
        from scipy.special import expit

        return np.asarray(expit(outputs_NC.astype(np.float64)))

    def likelihood(self, outputs_NC: np.ndarray, labels: np.ndarray) -> np.ndarray:
        probabilities_NC = self.probabilities(outputs_NC)
        return np.asarray(np.where(labels > 0, probabilities_NC, 1 - probabilities_NC).prod(axis=1))

    def confidence(self, outputs_NC: np.ndarray) -> np.ndarray:
        probabilities_NC = self.probabilities(outputs_NC)
        return np.asarray(np.maximum(probabilities_NC, 1 - probabilities_NC).min(axis=1))

    def logits(self, probabilities_NC: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Probabilities are clipped to 1e-12 .. 1 - 1e-12."""
        from scipy.special import logit

        is_valid = np.all((probabilities_NC >= 0) & (probabilities_NC <= 1), axis=1)
        return logit(np.clip(probabilities_NC, MIN_PROBABILITY, 1 - MIN_PROBABILITY)), is_valid, []


class Number(Decoding):
    """One number for each example, such as a score; labels are float32 (N,)."""

    has_probabilities = False

    def labels(self, outputs_NC: np.ndarray) -> np.ndarray:
        return np.array(outputs_NC[:, 0], dtype=np.float32)

    def texts(self, outputs_NC: np.ndarray, names: Sequence[str]) -> list[str]:
        return [f"{value:.3f}" for value in outputs_NC[:, 0]]


def class_loss(outputs_NC: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean negative log-likelihood of class indices (N,) or of sets of labels (N, C) of 0 and 1."""
    from scipy.special import log_softmax

    if labels.ndim == 1:
        return float(-log_softmax(outputs_NC, axis=1)[np.arange(len(labels)), labels].mean())
    return float((np.logaddexp(0, outputs_NC) - labels * outputs_NC).mean())


def fitted_temperature(outputs_NC: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature between 0.05 and 20 with the lowest ``class_loss`` (Guo et al. 2017, arXiv 1706.04599).

    The loss is convex in the inverse of the temperature, so that it has one minimum.
    """
    from scipy.optimize import minimize_scalar

    def loss(logarithm: float) -> float:
        return class_loss(outputs_NC / np.exp(logarithm), labels)

    bounds = (np.log(LOWEST), np.log(HIGHEST))
    return float(np.exp(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-9}).x))
