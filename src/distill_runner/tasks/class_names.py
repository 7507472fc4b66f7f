"""Names of classes: how they are read from the data if the user does not list them, and their weights.

``task`` is a ``TextTask``, which is built on this module.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from distill_runner.common.errors import UserError, format_typed, override
from distill_runner.datasets.readers.content import read_table
from distill_runner.datasets.readers.dataset import parse_split
from distill_runner.models.config import normalized_label
from distill_runner.tasks.scores import class_of_column, score_table, task_of_answers


def names_as_text(labels: Any) -> Any:
    """Convert numeric names of classes to text, since the override ``task.labels=[0,1]`` is parsed as numbers."""
    is_list = isinstance(labels, list | tuple)
    return [str(label) if isinstance(label, int | float) else label for label in labels] if is_list else labels


def check_names(labels: list[str], task_type: str, weights: Any = None) -> None:
    """Check that names of classes differ, and that there is a weight for each class.

    Raises:
        UserError: they do not, or there is not.
    """
    names = format_typed(labels)
    if re.search("[\ud800-\udfff]", names):
        problem = "a name holds half of a surrogate pair, which is no character"
        raise UserError("task.labels", names, problem, "Repair the labels in the data: their text was cut.")
    if len(labels) < 2:
        raise UserError("task.labels", names, f"a task of type {task_type} needs two classes or more")
    if len(set(map(normalized_label, labels))) < len(labels):
        one_each = {normalized_label(name): name.strip() for name in reversed(labels)}
        remedy = "If they are one class: " + override("task.labels", [*reversed(one_each.values())])
        raise UserError("task.labels", names, "two names differ only in case, spaces, '_' and '-'", remedy)
    if isinstance(weights, list) and (len(weights) != len(labels) or min(weights) <= 0):
        problem = f"must be balanced, or {len(labels)} numbers greater than 0"
        raise UserError("task.class_weights", weights, problem, f"In the order {names}.")


def weights_in_losses(weights: str | Sequence[float] | None) -> Sequence[float] | None:
    """Return the weights of classes in the losses; None if all are 1, or are still to be counted in the data."""
    return None if isinstance(weights, str) or {*(weights or ())} == {1} else weights


def balanced_weights(labels: np.ndarray, names: Sequence[str], unit: str) -> list[float]:
    """Return the weights n / (C * n_c) of C classes, where n_c of n training examples or words belong to class c.

    Raises:
        UserError: a class has none.
    """
    counts = np.bincount(labels, minlength=len(names))
    if not counts.all():
        problem = f"no training {unit} has the label {names[int(counts.argmin())]}"
        raise UserError("task.class_weights", "balanced", problem)
    return [round(float(weight), 6) for weight in counts.sum() / (len(counts) * counts)]


def read_names(task: Any) -> list[str]:
    """Return the class names of the data: the names stored with the data, else the distinct labels, sorted.

    If the validation splits are parts of the same split as the training split, all of its rows count.
    """
    if not task.has_train_labels or task.gold == "none":
        if names := names_of_scores(task):
            return names
        if task.gold == "none":
            problem = "cannot be read from the names of the columns of scores"
            raise UserError("task.labels", None, problem, override("task.labels", ["<first class>", "<second class>"]))
    splits = {parse_split(split)[0] for split in (task.train, *task.validation.values())}
    table = read_table(task, splits.pop() if len(splits) == 1 else task.labeled_split)
    return task.distinct_names(table) if table.class_names is None else table.class_names


def names_of_scores(task: Any) -> list[str]:
    """Return the class names that the columns of scores have, or that their answers name; empty without any."""
    columns = task.prediction_columns
    if task.answers and task.gold == "none":
        table = score_table(task, task.train)
        answers = (task_of_answers(task, column, table) for column in columns)
        return sorted({name for own, own_table in answers for name in own.distinct_names(own_table)})
    if task.answers or len(columns) < 2:
        return []  # gold labels of an evaluation split name the classes; answers may lack some
    if task.gold == "evaluation":
        with suppress(UserError):  # of the gold labels, which is raised when they are read as such
            table = read_table(task, task.labeled_split)
            gold = task.distinct_names(table) if table.class_names is None else table.class_names
            classes = [class_of_column(column, gold) for column in columns]
            if {*classes} == {*range(len(gold))} and len(classes) == len(gold):
                return [gold[number] for number in classes if number is not None]
    # What all begin with up to a mark is no part of the names: p_no, p_yes
    parts = [re.findall(r"[^\W_]*[\W_]*", column) for column in columns]
    shared = 0
    while all(len(own) > shared + 2 and own[shared] == parts[0][shared] for own in parts):  # the last part is empty
        shared += 1
    return ["".join(own[shared:]) for own in parts]


def class_scores(names: Sequence[str], labels: np.ndarray, predicted: np.ndarray) -> dict[str, dict[str, float]]:
    """Return precision, recall, F1 and number of examples of each class, as scikit-learn computes them.

    Args:
        labels, predicted: class indices, (N,), or 0 and 1 of each of C labels, (N, C).
    """
    from sklearn.metrics import precision_recall_fscore_support

    scores = precision_recall_fscore_support(labels, predicted, labels=range(len(names)), zero_division=0.0)
    rows = zip(names, *(column.tolist() for column in scores), strict=True)
    return {name: dict(zip(("precision", "recall", "f1", "support"), row, strict=True)) for name, *row in rows}
