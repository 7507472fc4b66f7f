"""Tasks: pure data, and the few functions that read it.

``load_split`` gives texts and labels in the task's own order of classes, ``fingerprint`` identifies the
content for the store, ``match_labels`` fits a fine-tuned teacher's outputs to the task.
"""

from typing import Any

from distill_runner.common.errors import UserError
from distill_runner.datasets.examples import Examples
from distill_runner.datasets.reading.folders import locate
from distill_runner.datasets.reading.tables import fingerprint, read
from distill_runner.datasets.tasks.labels import encode, infer_names, match_labels
from distill_runner.datasets.tasks.task import Task

__all__ = ["Examples", "Task", "fingerprint", "load_split", "locate", "match_labels", "resolve"]


def load_split(task: Task, split: str) -> Examples:
    """Texts and labels of a split.

    Args:
        task: with ``labels`` filled in for classification, see ``resolve``.
        split: as the data calls it; a value of ``task.train``, ``task.validation`` or ``task.test``.
    Raises:
        UserError: anything that is missing, damaged or contradictory in the data; one or two lines.
    """
    table = read(task, split)
    texts = [_texts(table.columns[column], column, split) for column in task.columns]
    return Examples(texts, encode(table, task, split))


def resolve(task: Task) -> Task:
    """The task with its class names: those of the training data where the configuration gives none.

    Raises:
        UserError: the data cannot be read, or its classes do not fit the task's metrics.
    """
    if task.kind == "regression" or task.labels is not None:
        return task
    return Task(**(task.model_dump() | {"labels": infer_names(read(task, task.train), task)}))


def _texts(values: list[Any], column: str, split: str) -> list[str]:
    for row, value in enumerate(values):
        if value is None or isinstance(value, list | dict):
            what = "no text" if value is None else f"a {type(value).__name__} instead of a text"
            problem = f"row {row} of split '{split}' holds {what}"
            raise UserError("task.columns", column, problem, "Remove or repair such rows.")
    return [str(value) for value in values]
