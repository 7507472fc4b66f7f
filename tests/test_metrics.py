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

from distill_runner.datasets.metrics import METRICS, NonFiniteOutputs, compute_metrics


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


def test_weighted_f1_by_hand() -> None:
    """Labels 0 0 0 1, predictions 0 0 1 1: F1 is 2 * 2 / 5 of class 0 and 2 * 1 / 3 of class 1, in weights 3 and 1."""
    found = compute_metrics(["f1_weighted"], logits([0, 0, 1, 1]), np.array([0, 0, 0, 1]))
    assert found["f1_weighted"] == pytest.approx((3 * 4 / 5 + 2 / 3) / 4, abs=1e-12)


def test_order_is_kept_and_three_classes_count() -> None:
    found = compute_metrics(["matthews", "accuracy"], logits([0, 1, 2, 2], 3), np.array([0, 1, 2, 1]))
    assert list(found) == ["matthews", "accuracy"]
    assert found["accuracy"] == 0.75


@pytest.mark.parametrize("metric", ["pearson", "spearman"])
@pytest.mark.parametrize(
    ("outputs", "labels"),
    [([2.0, 2.0, 2.0], [0.0, 1.0, 2.0]), ([0.0, 1.0, 2.0], [1.0, 1.0, 1.0]), ([1.0], [1.0])],
)
def test_constant_correlates_with_nothing(metric: str, outputs: list[float], labels: list[float]) -> None:
    assert compute_metrics([metric], column(outputs), np.array(labels, dtype=np.float32)) == {metric: 0.0}


@pytest.mark.parametrize("metric", ["f1", "matthews"])
@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 1, 0]])
def test_one_predicted_class_scores_nothing(metric: str, labels: list[int]) -> None:
    assert compute_metrics([metric], logits([0, 0, 0]), np.array(labels)) == {metric: 0.0}


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
    code = "import sys, distill_runner.datasets.metrics; print({'sklearn', 'scipy', 'torch'} & set(sys.modules))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert set(METRICS) == {
        "accuracy",
        "f1",
        "f1_weighted",
        "f1_macro",
        "f1_micro",
        "subset_accuracy",
        "mean_average_precision",
        "auc",
        "brier",
        "ece",
        "matthews",
        "accuracy_f1",
        "pearson",
        "spearman",
        "pearson_spearman",
    }
