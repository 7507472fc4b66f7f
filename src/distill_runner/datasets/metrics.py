"""Metrics of predictions: those of GLUE and others, as fractions (a report multiplies by 100)."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

import numpy as np

from distill_runner.common.errors import TrainingError, override
from distill_runner.common.terminal import Undefined
from distill_runner.datasets.evaluate_metrics import external_metric, is_external

OF_PROBABILITIES, OF_SECOND_CLASS = ("auc", "brier", "ece"), ("f1", "accuracy_f1")
"""Metrics of probabilities, and those that depend on which of two classes is the second, the positive one."""
Metric = Callable[[np.ndarray, np.ndarray], float]
"""Maps the outputs of a model, shape (N, C), and labels, shape (N,) or (N, C), to one number."""


class NonFiniteOutputs(TrainingError):
    """Outputs of a model are not finite: training has diverged."""

    remedy = "Use a lower optim.lr, or " + override("runtime.precision", "fp32") + "."


ScoreOfSums = Callable[[np.ndarray], np.ndarray]
"""Maps sums (..., S) of the statistics of a sample of examples to its scores (...)."""


# --- Scores of sums over examples


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Return the ratio, and 0 where ``denominator`` is not positive."""
    return np.divide(numerator, denominator, out=np.zeros(np.shape(numerator)), where=denominator > 0)


def mean_of_sums(sums: np.ndarray) -> np.ndarray:
    """Return the mean of scores, of the sum of scores and their number."""
    return ratio(sums[..., 0], sums[..., 1])


def f1_of_counts(counts: np.ndarray) -> np.ndarray:
    """Return F1 of the numbers of true positives, predicted positives and actual positives."""
    return ratio(2 * counts[..., 0], counts[..., 1] + counts[..., 2])


def _is_correct(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    correct = ((outputs > 0) == (labels > 0)).all(axis=1) if labels.ndim == 2 else outputs.argmax(axis=1) == labels
    return np.stack([correct, np.ones_like(correct)], axis=1)


def _class_counts(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return, for each example and class, whether it is correctly predicted, predicted, and the label: (N, 3C)."""
    classes = np.arange(outputs.shape[1])
    predicted = outputs > 0 if labels.ndim == 2 else outputs.argmax(axis=1)[:, None] == classes
    actual = labels > 0 if labels.ndim == 2 else labels[:, None] == classes
    return np.concatenate([predicted & actual, predicted, actual], axis=1)


def _by_class(sums: np.ndarray) -> np.ndarray:
    """Return the counts of each class (..., C, 3)."""
    return np.moveaxis(sums.reshape(*sums.shape[:-1], 3, -1), -2, -1)


def _f1(sums: np.ndarray) -> np.ndarray:
    """F1 of class 1 of two classes."""
    return f1_of_counts(_by_class(sums)[..., 1, :])


def _f1_micro(sums: np.ndarray) -> np.ndarray:
    """F1 over all pairs of an example and a label."""
    return f1_of_counts(_by_class(sums).sum(axis=-2))


def _f1_macro(sums: np.ndarray) -> np.ndarray:
    """Unweighted mean of the F1 of the classes or labels that are predicted or present."""
    counts = _by_class(sums)
    return ratio(f1_of_counts(counts).sum(axis=-1), (counts[..., 1:].sum(axis=-1) > 0).sum(axis=-1))


def _f1_weighted(sums: np.ndarray) -> np.ndarray:
    """Mean of the F1 of all classes, weighted by the number of examples of each class.

    Source: Internal representations, Table 1. Only this average fits the table's pairs of accuracy and "F1".
    """
    counts = _by_class(sums)
    return (counts[..., 2] * f1_of_counts(counts)).sum(axis=-1) / counts[..., 2].sum(axis=-1)


def _accuracy_f1(sums: np.ndarray) -> np.ndarray:
    """Mean of accuracy and F1, by which GLUE ranks MRPC and QQP."""
    counts = _by_class(sums).sum(axis=-2)
    return (ratio(counts[..., 0], counts[..., 2]) + _f1(sums)) / 2


def _matthews(sums: np.ndarray) -> np.ndarray:
    """Gorodkin's correlation for K classes, which equals Matthews' correlation for two classes."""
    correct, predicted, actual = np.moveaxis(_by_class(sums), -1, 0)
    total = actual.sum(axis=-1)
    variances = (total**2 - (actual**2).sum(axis=-1)) * (total**2 - (predicted**2).sum(axis=-1))
    return ratio(correct.sum(axis=-1) * total - (actual * predicted).sum(axis=-1), np.sqrt(variances))


def _errors(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the squared error of the probabilities, summed over classes, and 1: (N, 2)."""
    probabilities = softmax(outputs)
    probabilities[np.arange(len(labels)), labels] -= 1
    return np.stack([np.square(probabilities).sum(axis=1), np.ones(len(labels))], axis=1)


def _gaps(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return correct minus confidence in the bin of the confidence, and 1: (N, BINS + 1).

    The expected calibration error (Guo et al. 2017) has 15 equal bins of the largest probability.
    """
    probabilities = softmax(outputs)
    confidence, gaps = probabilities.max(axis=1), np.zeros((len(labels), BINS + 1))
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps[np.arange(len(labels)), bins] = (probabilities.argmax(axis=1) == labels) - confidence
    gaps[:, -1] = 1
    return gaps


def _moments(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    columns = np.stack([outputs.reshape(len(labels)), labels]).astype(np.float64)
    columns -= columns.mean(axis=1, keepdims=True)  # on one scale, methods may swap them
    x, y = columns / np.maximum(columns.std(axis=1, keepdims=True), np.finfo(float).tiny)
    return np.stack([np.ones_like(x), x, y, x * x, x * y, y * y], axis=1)


def _rank_moments(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return _moments(ranks(outputs.reshape(len(labels))), ranks(labels))


def _pearson(sums: np.ndarray) -> np.ndarray:
    """Pearson correlation, -1 to 1; of ranks it is Spearman's. GLUE ranks STS-B by the mean of both."""
    x, y, xx, xy, yy = np.moveaxis(sums[..., 1:] / sums[..., :1], -1, 0)
    return np.clip(ratio(xy - x * y, np.sqrt(np.maximum(xx - x**2, 0) * np.maximum(yy - y**2, 0))), -1, 1)


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the ranks (N,) of values (N,), from 1; equal values have their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[place])


SUMMED: dict[str, tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], ScoreOfSums]] = {
    "accuracy": (_is_correct, mean_of_sums),
    "subset_accuracy": (_is_correct, mean_of_sums),
    "f1": (_class_counts, _f1),
    "f1_micro": (_class_counts, _f1_micro),
    "f1_macro": (_class_counts, _f1_macro),
    "f1_weighted": (_class_counts, _f1_weighted),
    "accuracy_f1": (_class_counts, _accuracy_f1),
    "matthews": (_class_counts, _matthews),
    "brier": (_errors, mean_of_sums),
    "ece": (_gaps, lambda sums: np.abs(sums[..., :-1]).sum(axis=-1) / sums[..., -1]),
    "pearson": (_moments, _pearson),
    "spearman": (_rank_moments, _pearson),
    "pearson_spearman": (
        lambda outputs, labels: np.hstack([_moments(outputs, labels), _rank_moments(outputs, labels)]),
        lambda sums: (_pearson(sums[..., :6]) + _pearson(sums[..., 6:])) / 2,
    ),
}
"""Statistics (N, S) of outputs and labels, and the score of their sums; of all metrics that have them."""


def _undefined(name: str, outputs: np.ndarray, labels: np.ndarray) -> str:
    """Return why a metric of ``SUMMED`` is 0 by convention; empty if it is defined."""
    predicted = outputs.argmax(axis=-1)
    if name in OF_SECOND_CLASS and not ((labels == 1) | (predicted == 1)).any():
        return "the second class is neither predicted nor present"
    if name == "matthews" and (np.ptp(predicted) == 0 or np.ptp(labels) == 0):
        return "one class is predicted for all examples" if np.ptp(predicted) == 0 else "all examples have one class"
    if name in ("f1_micro", "f1_macro") and not _class_counts(outputs, labels).any():
        return "no label is predicted or present"
    if name in ("pearson", "spearman", "pearson_spearman") and (np.ptp(outputs) == 0 or np.ptp(labels) == 0):
        return "all predicted scores are equal" if np.ptp(outputs) == 0 else "all labels are equal"
    return ""


def _of_sums(name: str, outputs: np.ndarray, labels: np.ndarray) -> float:
    statistics, score = SUMMED[name]
    value = float(score(statistics(outputs, labels).sum(axis=0, dtype=np.float64)))
    return Undefined(value, reason) if (reason := _undefined(name, outputs, labels)) else value


# --- Metrics


def mean(values: Sequence[float]) -> float:
    """Return the mean of metrics; it is undefined if one of them is."""
    value = fmean(values)
    reasons = [one.reason for one in values if isinstance(one, Undefined)]
    return Undefined(value, reasons[0]) if reasons else value


def mean_average_precision(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Mean over labels of the area under the precision-recall curve.

    Labels without any example are left out; the result is undefined, 0, if no label has an example.
    """
    from sklearn.metrics import average_precision_score

    areas = [average_precision_score(labels[:, c], outputs[:, c]) for c in np.flatnonzero(labels.any(axis=0))]
    return float(np.mean(areas)) if areas else Undefined(0.0, "no label has an example")


def auc(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve: of class 1 for two classes, otherwise the mean of each class against the rest.

    Classes that no example or every example has are left out; the result is undefined, 0.5, if no class is left.
    """
    areas = []
    for own, values in one_against_rest(outputs, labels):
        if 0 < (count := own.sum()) < len(own):
            areas.append((ranks(values)[own].mean() - (count + 1) / 2) / (len(own) - count))
    return float(np.mean(areas)) if areas else Undefined(0.5, "all examples have one class")


def one_against_rest(outputs: np.ndarray, labels: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return, for each class whose area ``auc`` averages, which labels it is, and its probabilities (N,)."""
    classes = range(outputs.shape[-1])[1 if outputs.shape[-1] == 2 else 0 :]
    return [(labels == c, values) for c, values in zip(classes, softmax(outputs).T[classes.start :], strict=True)]


def softmax(outputs: np.ndarray) -> np.ndarray:
    """Return the probabilities of classes, float64, of shape (N, C) as their logits."""
    shares = np.exp(outputs.astype(np.float64) - outputs.max(axis=-1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=-1, keepdims=True))


BINS = 15
LOWER_IS_BETTER = frozenset({"brier", "ece"})
"""Metrics that are reported but cannot select the best epoch, since selection takes the highest value."""


METRICS: dict[str, Metric] = {name: partial(_of_sums, name) for name in SUMMED}
METRICS |= {"auc": auc, "mean_average_precision": mean_average_precision}
CLASSIFICATION_METRICS = ("accuracy", "f1", "f1_weighted", "matthews", "f1_macro", "auc", "brier", "ece", "accuracy_f1")
REGRESSION_METRICS = ("pearson", "spearman", "pearson_spearman")
MULTILABEL_METRICS = ("f1_micro", "f1_macro", "subset_accuracy", "mean_average_precision")


def metric_function(name: str) -> Metric:
    """Return a metric by its name in ``METRICS``, or a metric of ``evaluate``, which is imported only for it.

    Raises:
        KeyError: there is no such metric.
        UserError: a metric of ``evaluate`` cannot be loaded.
    """
    return external_metric(name) if is_external(name) else METRICS[name]


def require_finite(outputs: np.ndarray) -> None:
    """Raise NonFiniteOutputs if an output (N, C) is infinite or not a number."""
    if not np.isfinite(outputs).all():
        count = int((~np.isfinite(outputs)).any(axis=-1).sum())
        raise NonFiniteOutputs(f"{count} of {len(outputs)} outputs are not finite: the model has diverged")


def compute_metrics(metrics: Sequence[str], outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the named metrics, in the order of ``metrics``.

    Args:
        metrics: keys of ``METRICS``, or metrics of ``evaluate``.
        outputs: logits or regression outputs, shape (N, C), C = 1 for regression.
        labels: shape (N,), class indices or scores; (N, C) of 0 and 1 for multi-label tasks.
    Raises:
        NonFiniteOutputs: an output is infinite or not a number.
    """
    require_finite(outputs)
    return {name: metric_function(name)(outputs, labels) for name in metrics}
