"""Metrics of many samples of examples at once: as functions of sums over examples, and of ranks."""

from collections.abc import Callable

import numpy as np

ScoreOfSums = Callable[[np.ndarray], np.ndarray]
"""Maps sums (..., S) of the statistics of a sample of units to its scores (...)."""


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Return the ratio, and 0 where ``denominator`` is not positive, as in ``datasets.metrics``."""
    return np.divide(numerator, denominator, out=np.zeros(np.shape(numerator)), where=denominator > 0)


def mean_of_sums(sums: np.ndarray) -> np.ndarray:
    """Return the mean of scores, of the sum of scores and their number."""
    return _ratio(sums[..., 0], sums[..., 1])


def f1_of_counts(counts: np.ndarray) -> np.ndarray:
    """Return F1 of the numbers of true positives, predicted positives and actual positives."""
    return _ratio(2 * counts[..., 0], counts[..., 1] + counts[..., 2])


def f1_by_class(counts: np.ndarray) -> np.ndarray:
    """Return F1 (..., T) of T classes, of their counts (..., 3 T) as for ``f1_of_counts``."""
    return f1_of_counts(counts.reshape(*counts.shape[:-1], -1, 3))


def mean_f1_of_counts(counts: np.ndarray) -> np.ndarray:
    """Return the mean of ``f1_by_class``."""
    return np.asarray(f1_by_class(counts).mean(axis=-1))


def _is_correct(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    is_multilabel = labels.ndim == 2
    correct = ((outputs > 0) == (labels > 0)).all(axis=1) if is_multilabel else outputs.argmax(axis=1) == labels
    return np.stack([correct, np.ones_like(correct)], axis=1).astype(np.float64)


def _class_counts(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return, for each example and class, whether it is correctly predicted, predicted, and the label: (N, 3C)."""
    classes = np.arange(outputs.shape[1])
    predicted = outputs > 0 if labels.ndim == 2 else outputs.argmax(axis=1)[:, None] == classes
    actual = labels > 0 if labels.ndim == 2 else labels[:, None] == classes
    return np.concatenate([predicted & actual, predicted, actual], axis=1).astype(np.float64)


def _by_class(sums: np.ndarray) -> np.ndarray:
    """Return the counts of each class (..., C, 3)."""
    return np.moveaxis(sums.reshape(*sums.shape[:-1], 3, -1), -2, -1)


def _f1(sums: np.ndarray) -> np.ndarray:
    return f1_of_counts(_by_class(sums)[..., 1, :])


def _f1_macro(sums: np.ndarray) -> np.ndarray:
    counts = _by_class(sums)
    return _ratio(f1_of_counts(counts).sum(axis=-1), (counts[..., 1:].sum(axis=-1) > 0).sum(axis=-1))


def _f1_weighted(sums: np.ndarray) -> np.ndarray:
    counts = _by_class(sums)
    return (counts[..., 2] * f1_of_counts(counts)).sum(axis=-1) / counts[..., 2].sum(axis=-1)


def _accuracy_f1(sums: np.ndarray) -> np.ndarray:
    counts = _by_class(sums).sum(axis=-2)
    return (_ratio(counts[..., 0], counts[..., 2]) + _f1(sums)) / 2


def _matthews(sums: np.ndarray) -> np.ndarray:
    """Gorodkin's correlation for K classes, which equals Matthews' correlation for two classes."""
    correct, predicted, actual = np.moveaxis(_by_class(sums), -1, 0)
    total = actual.sum(axis=-1)
    variances = (total**2 - (actual**2).sum(axis=-1)) * (total**2 - (predicted**2).sum(axis=-1))
    return _ratio(correct.sum(axis=-1) * total - (actual * predicted).sum(axis=-1), np.sqrt(variances))


def _moments(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    x, y = standardized(outputs.reshape(len(labels))), standardized(labels)
    return np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=1)


def _pearson(sums: np.ndarray) -> np.ndarray:
    x, y, xx, yy, xy = np.moveaxis(sums[..., 1:] / sums[..., :1], -1, 0)
    variances = np.maximum(xx - x**2, 0) * np.maximum(yy - y**2, 0)
    return _ratio(xy - x * y, np.sqrt(variances))


def standardized(values: np.ndarray) -> np.ndarray:
    """Return values of mean 0 and standard deviation 1; zeros if all are equal."""
    centered = values.astype(np.float64) - values.astype(np.float64).mean()
    return centered / (centered.std() or 1.0)


def _correlation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the Pearson correlations (R,) of x and y (R, N); 0 for constants."""
    x, y = (one - one.mean(axis=1, keepdims=True) for one in (x.astype(np.float64), y.astype(np.float64)))
    return _ratio((x * y).sum(axis=1), np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1)))


def _spearman(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    from scipy.stats import rankdata

    return _correlation(rankdata(outputs[..., -1], axis=1), rankdata(labels, axis=1))


def _pearson_spearman(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return (_correlation(outputs[..., 0], labels) + _spearman(outputs, labels)) / 2


def _ranks(outputs: np.ndarray) -> np.ndarray:
    from scipy.stats import rankdata

    return np.asarray(rankdata(outputs))[:, None]


def _scores_and_ranks(outputs: np.ndarray) -> np.ndarray:
    return np.concatenate([standardized(outputs)[:, None], _ranks(outputs)], axis=1)


Metric = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Maps outputs (R, N, C) and labels (R, N) or (R, N, C) of R samples to scores (R,)."""
RANKED: dict[str, tuple[Metric, Callable[[np.ndarray], np.ndarray]]] = {
    "spearman": (_spearman, _ranks),
    "pearson_spearman": (_pearson_spearman, _scores_and_ranks),
}
"""Metrics of ranks, and what methods swap in place of outputs (N,), on whose scale a correlation does not depend."""

SUMMED: dict[str, tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], ScoreOfSums]] = {
    "accuracy": (_is_correct, mean_of_sums),
    "subset_accuracy": (_is_correct, mean_of_sums),
    "f1": (_class_counts, _f1),
    "f1_micro": (_class_counts, lambda sums: f1_of_counts(_by_class(sums).sum(axis=-2))),
    "f1_macro": (_class_counts, _f1_macro),
    "f1_weighted": (_class_counts, _f1_weighted),
    "accuracy_f1": (_class_counts, _accuracy_f1),
    "matthews": (_class_counts, _matthews),
    "pearson": (_moments, _pearson),
}
"""Statistics of outputs and labels, and the score of their sums, equal to ``METRICS``."""
