"""Metrics of predictions: those of GLUE and others, as fractions (a report multiplies by 100)."""

import warnings
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

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


def accuracy(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Share of examples whose largest output is that of the label."""
    return float((outputs.argmax(axis=-1) == labels).mean())


def f1(outputs: np.ndarray, labels: np.ndarray) -> float:
    """F1 of class 1 of two classes; undefined, 0, if class 1 is neither predicted nor present."""
    predicted = outputs.argmax(axis=-1)
    if not (labels == 1).any() and not (predicted == 1).any():
        return Undefined(0.0, "the second class is neither predicted nor present")
    return _f1(predicted, labels, average="binary", pos_label=1)


def f1_weighted(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Mean of the F1 of all classes, weighted by the number of examples of each class.

    Source: Internal representations, Table 1. Only this average fits the table's pairs of accuracy and "F1".
    """
    return _f1(outputs.argmax(axis=-1), labels, average="weighted")


def f1_macro(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Unweighted mean of the F1 of the classes or labels that are predicted or present; undefined, 0, without one."""
    if labels.ndim == 1:
        return _f1(outputs.argmax(axis=-1), labels, average="macro")
    classes = np.flatnonzero((outputs > 0).any(axis=0) | labels.any(axis=0))
    if not len(classes):
        return Undefined(0.0, "no label is predicted or present")
    return _f1(outputs > 0, labels, average="macro", labels=classes)


def f1_micro(outputs: np.ndarray, labels: np.ndarray) -> float:
    """F1 over all pairs of an example and a label; undefined, 0, if no label is predicted or present."""
    if not (outputs > 0).any() and not labels.any():
        return Undefined(0.0, "no label is predicted or present")
    return _f1(outputs > 0, labels, average="micro")


def _f1(y_pred: np.ndarray, y_true: np.ndarray, **options: Any) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(y_true, y_pred, zero_division=0.0, **options))


def matthews(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Matthews correlation of classes, -1 to 1; undefined, 0, if only one class is predicted or present."""
    from sklearn.metrics import matthews_corrcoef

    predicted = outputs.argmax(axis=-1)
    if (predicted == predicted[0]).all():
        return Undefined(0.0, "one class is predicted for all examples")
    if (labels == labels[0]).all():
        return Undefined(0.0, "all examples have one class")
    return float(matthews_corrcoef(labels, predicted))


def pearson(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Pearson correlation of the single output with the score, -1 to 1; undefined, 0, if either is constant."""
    from scipy.stats import pearsonr

    return _correlation(pearsonr, outputs, labels)


def spearman(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Spearman rank correlation of the single output with the score, -1 to 1; undefined, 0, if one is constant."""
    from scipy.stats import spearmanr

    return _correlation(spearmanr, outputs, labels)


def _correlation(function: Callable[..., Any], outputs: np.ndarray, labels: np.ndarray) -> float:
    scores = outputs.reshape(len(labels)).astype(np.float64)
    if np.ptp(scores) == 0:
        return Undefined(0.0, "all predicted scores are equal")
    if np.ptp(labels) == 0:
        return Undefined(0.0, "all labels are equal")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nearly constant input: the correlation is defined, but noisy
        value = float(function(scores, labels.astype(np.float64))[0])
    return Undefined(0.0, "the predicted scores are equal up to rounding") if np.isnan(value) else value


def accuracy_f1(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Mean of accuracy and F1, by which GLUE ranks MRPC and QQP."""
    return mean([accuracy(outputs, labels), f1(outputs, labels)])


def pearson_spearman(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Mean of Pearson and Spearman correlation, by which GLUE ranks STS-B."""
    return mean([pearson(outputs, labels), spearman(outputs, labels)])


def mean(values: Sequence[float]) -> float:
    """Return the mean of metrics; it is undefined if one of them is."""
    value = fmean(values)
    reasons = [one.reason for one in values if isinstance(one, Undefined)]
    return Undefined(value, reasons[0]) if reasons else value


def subset_accuracy(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Share of examples whose labels are all predicted correctly."""
    return float(((outputs > 0) == (labels > 0)).all(axis=-1).mean())


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
    from scipy.stats import rankdata

    probabilities, classes = softmax(outputs), range(outputs.shape[-1])[1 if outputs.shape[-1] == 2 else 0 :]
    ranks = [(labels == c, rankdata(probabilities[:, c])) for c in classes]
    areas = [(r[own].mean() - (own.sum() + 1) / 2) / (~own).sum() for own, r in ranks if 0 < own.sum() < len(own)]
    return float(np.mean(areas)) if areas else Undefined(0.5, "all examples have one class")


def brier(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Squared error of the probabilities, summed over classes and averaged over examples: 0 to 2, lower is better."""
    probabilities = softmax(outputs)
    probabilities[np.arange(len(labels)), labels] -= 1
    return float(np.square(probabilities).sum(axis=-1).mean())


def ece(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Expected calibration error (Guo et al. 2017) in 15 equal bins of the largest probability; lower is better."""
    probabilities = softmax(outputs)
    confidence, correct = probabilities.max(axis=-1), probabilities.argmax(axis=-1) == labels
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs(correct[bins == b].sum() - confidence[bins == b].sum()) for b in range(BINS)]
    return float(sum(gaps) / len(labels))


def softmax(outputs: np.ndarray) -> np.ndarray:
    """Return the probabilities of classes, float64, of shape (N, C) as their logits."""
    from scipy import special

    return np.asarray(special.softmax(outputs.astype(np.float64), axis=-1))


BINS = 15
LOWER_IS_BETTER = frozenset({"brier", "ece"})
"""Metrics that are reported but cannot select the best epoch, since selection takes the highest value."""


CLASSIFICATION_METRICS: dict[str, Metric] = {
    metric.__name__: metric for metric in (accuracy, f1, f1_weighted, matthews, f1_macro, auc, brier, ece, accuracy_f1)
}
REGRESSION_METRICS: dict[str, Metric] = {metric.__name__: metric for metric in (pearson, spearman, pearson_spearman)}
MULTILABEL_METRICS: dict[str, Metric] = {
    metric.__name__: metric for metric in (f1_micro, f1_macro, subset_accuracy, mean_average_precision)
}
METRICS = CLASSIFICATION_METRICS | REGRESSION_METRICS | MULTILABEL_METRICS


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
