"""From a column of labels to indices or scores; from a teacher's outputs to a task's classes, by name."""

import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np

from distill_runner.common.errors import UserError, as_list
from distill_runner.datasets.reading.tables import SplitTable
from distill_runner.datasets.tasks.task import Task, normal


def encode(table: SplitTable, task: Task, split: str) -> np.ndarray | None:
    """The labels of a split, shape (N,): int64 class indices or float32 scores.

    Returns:
        ``None`` for a test split without labels (no such column, empty, or all -1 as on the hub).
    Raises:
        UserError: labels are missing in a split that trains or selects, or are not among the task's.
    """
    values = table.columns.get(task.label, [])
    if task.is_test(split) and all(_is_empty(value) or value == -1 for value in values):
        return None
    if missing := sum(_is_unlabelled(value, task) for value in values):
        problem = f"{missing} of {len(values)} rows of split '{split}' have no label (-1 or empty)"
        raise UserError("task.label", task.label, problem, "Remove these rows, or choose a labelled split.")
    return _scores(values, task, split) if task.kind == "regression" else _classes(values, table, task, split)


def infer_names(table: SplitTable, task: Task) -> list[str]:
    """Class names for a task that gives none: the data's own, else the distinct labels in order.

    Raises:
        UserError: the labels are fractions, which asks for regression.
    """
    if table.class_names is not None:
        return table.class_names
    values = {_whole(value) for value in table.columns[task.label] if not _is_unlabelled(value, task)}
    if any(isinstance(value, float) for value in values):
        problem = "the labels are fractions, so there are no classes to infer"
        raise UserError("task.label", task.label, problem, "task.kind=regression task.metrics=[pearson]")
    numeric = all(isinstance(value, int) for value in values)
    return [str(value) for value in sorted(values, key=None if numeric else str)]


def match_labels(head_labels: Mapping[int, str] | None, task: Task) -> list[int]:
    """The permutation ``p`` with ``logits_of_task = logits_of_head[:, p]``.

    Args:
        head_labels: ``id2label`` of the teacher's head; ``None`` if it has none.
    Returns:
        For each class of the task the output of the head that has its name; ``[0]`` for regression.
    Raises:
        UserError: the head has other classes, or nameless ones (``LABEL_0``).
    """
    head = [head_labels[i] for i in sorted(head_labels)] if head_labels else []
    names = task.labels or []
    needed = len(names) if task.kind == "classification" else 1
    if head and len(head) != needed:
        problem = f"its head has {len(head)} outputs {as_list(head)}, the task {task.name} needs {needed}"
        problem += f" {as_list(names)}" if names else " (a score)"
        raise UserError("teacher", None, problem, f"Choose a teacher fine-tuned on {task.name}.")
    if task.kind == "regression":
        return [0]
    outputs = {normal(name): i for i, name in enumerate(head)}
    if names and outputs.keys() == {normal(name) for name in names}:
        return [outputs[normal(name)] for name in names]
    problem = f"the outputs of its head {as_list(head)} are not named like the classes of {task.name}"
    remedy = f"Name them in the head's own order, such as {shlex.quote(f'teacher.labels={as_list(names)}')}"
    raise UserError("teacher", None, problem, remedy)


def _is_empty(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _is_unlabelled(value: Any, task: Task) -> bool:
    """Empty, or the hub's -1, unless -1 is the name of a class or a score."""
    may_be_minus_one = task.kind == "regression" or "-1" in (task.labels or [])
    return _is_empty(value) or (value == -1 and not may_be_minus_one)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _scores(values: list[Any], task: Task, split: str) -> np.ndarray:
    for value in values:
        try:
            finite = math.isfinite(float(value))
        except (TypeError, ValueError):
            finite = False
        if not finite:
            problem = f"split '{split}' holds {value!r}, which is not a finite number"
            remedy = "Repair the file, or for classes: task.kind=classification task.metrics=[accuracy]"
            raise UserError("task.label", task.label, problem, remedy)
    return np.asarray(values, dtype=np.float32)


def _classes(values: list[Any], table: SplitTable, task: Task, split: str) -> np.ndarray:
    """Class indices by name, so that a data set with another order of classes is reordered."""
    labels = task.labels or []
    index = {normal(name): i for i, name in enumerate(labels)}
    codes: dict[Any, int] = {}
    for value in dict.fromkeys(values):
        name = _name(value, table.class_names, labels)
        if name is None or normal(name) not in index:
            problem = f"split '{split}' has the label {name or value!r}, which is none of them"
            seen = table.class_names or sorted({str(_whole(other)) for other in values})
            remedy = shlex.quote(f"task.labels={as_list(seen)}") if len(seen) <= 20 else ""
            raise UserError("task.labels", as_list(labels), problem, remedy)
        codes[value] = index[normal(name)]
    return np.fromiter((codes[value] for value in values), dtype=np.int64, count=len(values))


def _name(value: Any, class_names: list[str] | None, labels: list[str]) -> str | None:
    """The name that a label stands for; ``None`` if a number is out of range.

    A bare number n is the name "n" where all of the task's names are numbers (stars 1 to 5) or truth values,
    and the n-th name (from 0) otherwise.
    """
    value = _whole(value)
    if not isinstance(value, int):
        return str(value)
    if class_names is None and all(re.fullmatch(r"-?\d+|true|false", name, re.IGNORECASE) for name in labels):
        return str(value)
    names = labels if class_names is None else class_names
    return names[value] if 0 <= value < len(names) else None
