"""The account of scores in columns of the data: what they were taken for, and how good they are.

Where a validation split has gold labels and the columns, the scores are measured before any training.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from distill_runner.common.account import AccountLine
from distill_runner.common.errors import quantity
from distill_runner.datasets.metrics import compute_metrics
from distill_runner.datasets.readers.tables import SplitTable, read_table
from distill_runner.tasks.account import short_list
from distill_runner.tasks.scores import MAX_ROUNDING, TRANSFER, ScoredTask, selected_rows

if TYPE_CHECKING:
    from distill_runner.datasets.corpora import TransferSet

STEP, MANY, MIN_VALUES, MAX_VALUES = 0.05, 0.95, 5, 21
"""Probabilities count as stated ones if this share of them is a multiple of 0.05, with 5 to 21 different values."""
RANGES = ((0.0, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 0.9), (0.9, 0.99), (0.99, 1.01))
"""Ranges of confidence of which the share of right predictions is told."""
STATED = (
    "almost all probabilities are multiples of 0.05, as a language model states them: such numbers are no"
    " probabilities. Take the log-probabilities of its answer's token, or several samples (task.answers)"
)

NOT_RAW = (
    "task.logits takes numbers before the softmax, but all are from 0 to 1, as probabilities are: if they are,"
    " name the columns in task.probabilities"
)


def scores_line(task: ScoredTask, transfer: "TransferSet | None") -> AccountLine:
    """Return the line on the scores that a student learns from.

    Args:
        transfer: transfer set whose scores the student learns from; None for those of the training split.
    Raises:
        UserError: the columns do not exist, or do not hold scores.
    """
    split = TRANSFER if transfer is not None else task.train
    table = task.transfer_table(transfer) if transfer is not None else task.score_table(split)
    scores = task.scores(table, split)
    columns, names = task.prediction_columns, task.head.names or ()
    parts = [short_list(columns)]
    if task.answers is None and len(columns) == len(names):
        parts[0] += f" = {short_list(names)}"
    parts[0] += f": {quantity(int(scores.is_used.sum()), 'row', ',')}"
    parts += scores.remarks
    warnings = [STATED] if task.probabilities and are_stated(scores.outputs[scores.has_score]) else []
    if task.logits and not task.calibrate and are_probabilities(scores.outputs[scores.has_score], task):
        warnings.append(NOT_RAW)
    if task.gold == "none":
        warnings.append("no gold labels: all metrics are the agreement with these scores")
    quality: dict[str, Any] = {}
    for name, validation in task.validation.items() if task.gold != "none" else ():
        measured = quality_of(task, validation)
        if measured is None:
            parts.append(f"{name} has none, so that their quality is unknown")
            continue
        quality[name] = measured
        parts.append(f"{name}: {', '.join(_measures(measured))}")
        if measured.get("accuracy", 1.0) < measured.get("chance", 0.0):
            warnings.append(f"on {name} the scores are right less often than one constant class: are columns swapped?")
    details = {"rows": int(scores.is_used.sum()), "columns": columns, "quality": quality}
    return AccountLine("scores", "; ".join(parts), tuple(warnings), details)


def quality_of(task: ScoredTask, split: str) -> dict[str, Any] | None:
    """Return the metrics of the scores of a split against its gold labels; None if it lacks one of the two.

    ``reliability`` has for each range of confidence its lower end, the number of examples and the share of right ones.
    """
    table = read_table(task, split)
    if any(name not in table.columns for name in task.prediction_columns):
        return None
    if np.isnan(task.raw_outputs(table, split)[0]).any(axis=1).all():
        return None
    scores = task.scores(table, split)
    rows: SplitTable = selected_rows(table, scores.has_score)
    outputs, labels = scores.outputs[scores.has_score], task.gold_labels(rows, None, split)
    if labels is None:
        return None
    metrics = list(dict.fromkeys([*task.metrics, *(["accuracy", "ece"] if "ece" in task.metric_functions else [])]))
    metric_names = [metric for metric in metrics if metric in task.metric_functions]
    measured: dict[str, Any] = {"examples": len(outputs), **compute_metrics(metric_names, outputs, labels)}
    if np.issubdtype(labels.dtype, np.integer):
        measured["chance"] = float(np.bincount(labels).max() / len(labels))
        confidence, right = task.confidence(outputs), outputs.argmax(axis=1) == labels
        measured["reliability"] = [
            [low, int(own.sum()), float(right[own].mean())]
            for low, high in RANGES
            if (own := (confidence >= low) & (confidence < high)).any()
        ]
    return measured


def are_stated(outputs: np.ndarray) -> bool:
    """Return whether outputs (N, C), logarithms of probabilities, are round numbers as a language model states them."""
    values = np.exp(outputs.astype(np.float64)).ravel()
    steps = values / STEP
    is_round = np.abs(steps - steps.round()) < 1e-3
    count = len(np.unique(steps[is_round].round()))
    return bool(is_round.mean() >= MANY and MIN_VALUES <= count <= MAX_VALUES)


def are_probabilities(outputs: np.ndarray, task: ScoredTask) -> bool:
    """Return whether outputs (N, C) that are named as raw are numbers from 0 to 1, which sum to 1 for classes."""
    kind = task.head.problem_type
    if kind == "regression" or (outputs < 0).any() or (outputs > 1).any():
        return False
    has_distributions = kind == "single_label_classification" and len(task.prediction_columns) > 1
    return not has_distributions or bool(np.allclose(outputs.sum(1), 1, atol=MAX_ROUNDING))


def _measures(measured: dict[str, Any]) -> Iterator[str]:
    for name, value in measured.items():
        if name not in ("examples", "chance", "reliability"):
            yield f"{name} {100 * value:.1f}"
    if "reliability" in measured:
        ends = dict(RANGES)
        shares = [
            f"{100 * right:.0f} % right of {count:,} with {_range(low, ends[low])}"
            for low, count, right in measured["reliability"]
        ]
        yield " / ".join(shares)


def _range(low: float, high: float) -> str:
    if low == 0:
        return f"under {100 * high:.0f} %"
    return f"{100 * low:.0f} to {100 * high:.0f} %" if high <= 1 else f"over {100 * low:.0f} %"
