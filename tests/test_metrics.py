"""Metrics against numbers computed by hand."""

import math
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_runner.common.terminal import Undefined
from distill_runner.datasets.metrics import NonFiniteOutputs, compute_metrics


def logits(predictions: list[int], classes: int = 2) -> np.ndarray:
    """Outputs whose argmax is ``predictions``, shape (N, classes)."""
    return np.eye(classes, dtype=np.float32)[predictions] * 3 - 1


def column(values: list[float]) -> np.ndarray:
    return np.array(values, dtype=np.float32)[:, None]


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> None:
    warnings.simplefilter("error")


# predictions 1 1 1 0 0 0, labels 1 1 0 1 0 0: TP 2, FP 1, FN 1, TN 2
CONFUSION = (logits([1, 1, 1, 0, 0, 0]), np.array([1, 1, 0, 1, 0, 0]))


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("accuracy", 4 / 6),
        ("f1", 2 * 2 / (2 * 2 + 1 + 1)),
        # class 1: 2 * 2 / 6 = 2/3 of 3 examples; class 0 likewise
        ("f1_weighted", 2 / 3),
        ("matthews", (2 * 2 - 1 * 1) / math.sqrt(3 * 3 * 3 * 3)),
        ("accuracy_f1", 2 / 3),  # both are
    ],
)
def test_classification_by_hand(metric: str, expected: float) -> None:
    assert compute_metrics([metric], *CONFUSION) == {metric: pytest.approx(expected, abs=1e-12)}


@pytest.mark.parametrize(
    ("metric", "expected"),
    # x = 1 2 3 6, y = 1 3 2 4: means 3 and 2.5; sum xy 7, xx 14, yy 5; ranks differ by 0 1 1 0
    [
        ("pearson", 7 / math.sqrt(14 * 5)),
        ("spearman", 1 - 6 * 2 / (4 * 15)),
        ("pearson_spearman", (7 / math.sqrt(14 * 5) + 0.8) / 2),
    ],
)
def test_correlation_by_hand(metric: str, expected: float) -> None:
    outputs, labels = column([1, 2, 3, 6]), np.array([1, 3, 2, 4], dtype=np.float32)
    assert compute_metrics([metric], outputs, labels) == {metric: pytest.approx(expected, abs=1e-12)}


LOG3, LOG9 = math.log(3), math.log(9)


def test_calibration_by_hand() -> None:
    """Probabilities (3/4, 1/4) twice, (1/10, 9/10) and (1, 0), the last one wrong."""
    outputs = np.array([[LOG3, 0], [LOG3, 0], [0, LOG9], [50, 0]], dtype=np.float32)
    found = compute_metrics(["brier", "ece"], outputs, np.array([0, 1, 1, 1]))
    # In bins 11, 13 and 14: |1 - 3/2| + |1 - 9/10| + |0 - 1| of 4 examples.
    assert found["ece"] == pytest.approx((0.5 + 0.1 + 1) / 4, abs=1e-6)
    assert found["brier"] == pytest.approx((2 / 16 + 2 * 9 / 16 + 2 / 100 + 2) / 4, abs=1e-6)


def test_area_under_the_curve_by_hand() -> None:
    """Of class 1 for two classes; for three, the mean of those classes that are present and not all there is."""
    two = np.array([[0, 1], [0, 3], [0, 2], [0, 4]], dtype=np.float32)
    assert compute_metrics(["auc"], two, np.array([0, 1, 1, 0])) == {"auc": 2 / 4}
    assert compute_metrics(["auc"], two, np.array([0, 1, 0, 1])) == {"auc": 1.0}
    for labels in ([0, 0, 0, 0], [1, 1, 1, 1]):
        assert compute_metrics(["auc"], two, np.array(labels)) == {"auc": 0.5}
    three = np.log(np.array([[0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.2, 0.7, 0.1], [0.4, 0.5, 0.1]]))
    # Class 0 of examples 0 and 3: 0.6 beats both others, 0.4 one of them; class 1 of 1 and 2: 0.1 none, 0.7 both.
    assert compute_metrics(["auc"], three, np.array([0, 1, 1, 0])) == {"auc": pytest.approx((3 / 4 + 2 / 4) / 2)}
    # Fewer examples than classes, one of each: class 0 is right, class 2 has equal outputs, and class 1 is not there.
    few = np.log(np.array([[0.6, 0.3, 0.1], [0.3, 0.6, 0.1]]))
    assert compute_metrics(["auc"], few, np.array([0, 2])) == {"auc": (1 + 1 / 2) / 2}


def test_f1_of_classes_by_hand() -> None:
    """As in scikit-learn, the mean counts the fourth class, which is only predicted, and not the absent fifth."""
    outputs, labels = logits([0, 0, 1, 2, 2, 3], 5), np.array([0, 1, 1, 2, 2, 2])
    found = compute_metrics(["f1_macro", "f1_weighted"], outputs, labels)
    assert found["f1_macro"] == pytest.approx((2 / 3 + 2 / 3 + 4 / 5 + 0) / 4)
    assert found["f1_weighted"] == pytest.approx((2 / 3 + 2 * 2 / 3 + 3 * 4 / 5) / 6)


def test_metrics_of_label_sets_by_hand() -> None:
    """Predicted are (1, 0, 0), (1, 1, 0) and none; an output of 0 is no label. No example has the third one."""
    outputs = np.array([[2, -1, -3], [1, 3, -3], [0, -2, -3]], dtype=np.float32)
    labels = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 0]])
    found = compute_metrics(["f1_micro", "f1_macro", "subset_accuracy", "mean_average_precision"], outputs, labels)
    assert found["f1_micro"] == pytest.approx(2 * 2 / (3 + 3))  # 2 of 3 predicted, and 2 of 3 present
    assert found["f1_macro"] == pytest.approx((1 / 2 + 1) / 2)
    assert compute_metrics(["f1_macro"], labels - 0.5, labels) == {"f1_macro": 1.0}
    assert found["subset_accuracy"] == 1 / 3
    assert compute_metrics(["subset_accuracy"], labels - 0.5, labels) == {"subset_accuracy": 1.0}
    # Label 0 is at places 1 and 3: (1 / 1 + 2 / 3) / 2; label 1 at place 1.
    assert found["mean_average_precision"] == pytest.approx((5 / 6 + 1) / 2)


@pytest.mark.parametrize(
    ("metric", "reason"), [("f1_micro", "no label is"), ("mean_average_precision", "no label has")]
)
def test_without_labels_a_metric_is_undefined(metric: str, reason: str) -> None:
    value = compute_metrics([metric], np.full((3, 2), -1.0), np.zeros((3, 2), dtype=int))[metric]
    assert value == 0
    assert isinstance(value, Undefined)
    for output, is_undefined in ((0.0, True), (0.5, False)):
        value = compute_metrics(["f1_micro"], np.full((3, 2), output), np.zeros((3, 2), dtype=int))["f1_micro"]
        assert (value, isinstance(value, Undefined)) == (0, is_undefined)
    missed = compute_metrics(["f1_micro"], np.full((3, 2), -1.0), np.ones((3, 2), dtype=int))["f1_micro"]
    assert (missed, isinstance(missed, Undefined)) == (0, False)


@pytest.mark.parametrize("metric", ["f1", "matthews", "accuracy_f1"])
def test_one_class_alone_is_undefined(metric: str) -> None:
    """A 0 of a model that always says one class looks like a bad model; a reader must be told which it is."""
    value = compute_metrics([metric], logits([0, 0, 0]), np.array([0, 0, 0]))[metric]
    assert isinstance(value, Undefined)
    assert value == (0.5 if metric == "accuracy_f1" else 0)
    missed = compute_metrics(["f1"], logits([0, 0, 0]), np.array([0, 1, 0]))["f1"]
    assert (missed, isinstance(missed, Undefined)) == (0, False)


@pytest.mark.parametrize("metric", ["pearson", "spearman"])
@pytest.mark.parametrize(
    ("outputs", "labels"), [([2.0, 2.0, 2.0], [0.0, 1.0, 2.0]), ([0.0, 1.0, 2.0], [1.0, 1.0, 1.0]), ([1.0], [1.0])]
)
def test_constant_correlates_with_nothing(metric: str, outputs: list[float], labels: list[float]) -> None:
    value = compute_metrics([metric], column(outputs), np.array(labels, dtype=np.float32))[metric]
    assert (float(value), isinstance(value, Undefined)) == (0.0, True)


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.floats(0.1, 10))
def test_perfect_predictions_and_scale(labels: list[bool], scale: float) -> None:
    truth = np.array(labels, dtype=np.int64)
    outputs = logits(truth.tolist()) * scale
    assert compute_metrics(["accuracy"], outputs, truth) == {"accuracy": 1.0}
    if 0 < truth.sum() < len(truth):
        assert compute_metrics(["f1", "matthews"], outputs, truth) == {"f1": 1.0, "matthews": 1.0}
        exact = compute_metrics(["pearson", "spearman"], truth[:, None] * scale, truth.astype(np.float32))
        assert exact == {"pearson": pytest.approx(1), "spearman": pytest.approx(1)}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_diverged_model_is_said(bad: float) -> None:
    outputs = logits([0, 1])
    outputs[1, 0] = bad
    with pytest.raises(NonFiniteOutputs, match="1 of 2 outputs are not finite"):
        compute_metrics(["accuracy"], outputs, np.array([0, 1]))


def test_importing_is_light() -> None:
    """Planning a grid and completing a command import the names of metrics alone."""
    code = "import sys, distill_runner.datasets.metrics; print({'sklearn', 'scipy', 'torch'} & set(sys.modules))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
