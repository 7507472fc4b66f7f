"""The metrics of this package as modules of Hugging Face's ``evaluate``, to score predictions that lie in a file.

>>> from distill_runner import metrics
>>> metrics.load("f1_macro").compute(predictions=[0, 1, 1, 2], references=[0, 1, 2, 2])
{'f1_macro': 0.7777777777777777}

The numbers are those of ``task.metrics``: the same functions compute both.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distill_runner.common.errors import UserError, suggestion
from distill_runner.datasets.metrics import (
    CLASSIFICATION_METRICS,
    METRICS,
    MULTILABEL_METRICS,
    OF_PROBABILITIES,
    OF_SECOND_CLASS,
    REGRESSION_METRICS,
)

if TYPE_CHECKING:
    import evaluate

RANKING = ("mean_average_precision",)


def load(name: str) -> "evaluate.Metric":
    """Return a metric of ``task.metrics`` with the interface of ``evaluate``: ``compute``, ``add_batch``, ``combine``.

    Its predictions are, for each example: the class, as an index or a name (``accuracy``, ``f1``, ``f1_macro``,
    ``f1_weighted``, ``accuracy_f1``, ``matthews``); the probabilities of all classes (``auc``, ``brier``, ``ece``); a
    0 or 1 for each label (``f1_micro``, ``f1_macro``, ``subset_accuracy``); a score for each label
    (``mean_average_precision``); or one number (``pearson``, ``spearman``, ``pearson_spearman``).

    ``compute(labels=[...])`` names all classes in their order. Without it, they are those that occur: indices up to the
    highest one, or the names in alphabetical order.

    Args:
        name: name of the metric, as in ``task.metrics``.
    Raises:
        UserError: there is no such metric.
    """
    import evaluate

    if name not in METRICS:
        raise UserError("name", name, "there is no such metric", suggestion(name, METRICS))

    class BuiltIn(evaluate.Metric):
        """See ``load``."""

        def _info(self) -> Any:
            doc = METRICS[name].__doc__ or ""
            return evaluate.MetricInfo(description=doc, citation="", inputs_description="", features=_features(name))

        def _compute(self, predictions: Any, references: Any, labels: Sequence[Any] | None = None) -> dict[str, float]:
            return {name: float(METRICS[name](*_arrays(name, predictions, references, labels)))}

    return BuiltIn(config_name=name, keep_in_memory=True)


def _features(name: str) -> list[Any]:
    from datasets import Features, Sequence, Value

    number, index, text = Value("float64"), Value("int64"), Value("string")
    labels = [(Sequence(number if name in RANKING else index), Sequence(index))] if name in MULTILABEL_METRICS else []
    classes = [(index, index), (text, text)] if name in CLASSIFICATION_METRICS else []
    if name in REGRESSION_METRICS:
        classes = [(number, number)]
    elif name in OF_PROBABILITIES:
        classes = [(Sequence(number), index)]
    return [Features({"predictions": one, "references": other}) for one, other in (*classes, *labels)]


def _arrays(
    name: str, predictions: Any, references: Any, labels: Sequence[Any] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs and labels as ``compute_metrics`` takes them."""
    predicted, true = np.asarray(predictions), np.asarray(references)
    if name in REGRESSION_METRICS:
        return predicted.reshape(-1, 1), true
    if name in OF_PROBABILITIES:
        with np.errstate(divide="ignore"):
            return np.maximum(np.log(predicted), np.finfo(np.float64).min / 4), true
    if true.ndim == 2:
        return (predicted if name in RANKING else 2 * predicted - 1), true
    values = {*predicted.tolist(), *true.tolist()}
    if labels is None and true.dtype.kind in "US" and name in OF_SECOND_CLASS:
        remedy = "For example: compute(predictions=..., references=..., labels=['no', 'yes'])"
        raise UserError("labels", None, f"{name} is that of the second class: name both classes in order", remedy)
    if labels is None:
        labels = sorted(values) if true.dtype.kind in "US" else range(1 + max(values))
    index = {label: number for number, label in enumerate(labels)}
    if unknown := values - index.keys():
        raise UserError("labels", str([*labels]), f"lacks {min(unknown)}")
    codes = [np.array([index[value] for value in array.tolist()]) for array in (predicted, true)]
    return np.eye(len(index))[codes[0]], codes[1]
