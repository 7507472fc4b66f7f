"""Kinds of tasks. Each kind defines its data format, head, losses and scores in one file or folder.

A new kind needs a subclass of ``Task`` in a separate file, and a line in ``KINDS``.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny

from distill_runner.common.errors import UserError, nearest
from distill_runner.kinds.classification import ClassificationTask
from distill_runner.kinds.images import ImagesTask
from distill_runner.kinds.multilabel import MultiLabelTask
from distill_runner.kinds.questions import QuestionsTask
from distill_runner.kinds.regression import RegressionTask
from distill_runner.kinds.task import Task

__all__ = [
    "KINDS",
    "AnyTask",
    "ClassificationTask",
    "ImagesTask",
    "MultiLabelTask",
    "QuestionsTask",
    "RegressionTask",
    "Task",
    "kind_of",
    "make_task",
]

KINDS: dict[str, type[Task]] = {
    "classification": ClassificationTask,
    "multilabel": MultiLabelTask,
    "regression": RegressionTask,
    "images": ImagesTask,
    "questions": QuestionsTask,
}


def kind_of(fields: Mapping[str, Any]) -> type[Task]:
    """Return the class of a task from its configuration ``fields``; the default kind is classification.

    Raises:
        UserError: the kind in ``fields`` does not exist.
    """
    kind = fields.get("kind", "classification")
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError("task.kind", kind, "there is no such choice", nearest(kind, KINDS))
    return KINDS[kind]


def make_task(**fields: Any) -> Any:
    """Return a task of the class that the field ``kind`` selects."""
    return kind_of(fields)(**fields)


def _typed(value: Any) -> Any:
    return kind_of(value).model_validate(value) if isinstance(value, Mapping) else value


AnyTask = Annotated[SerializeAsAny[Task], BeforeValidator(_typed)]
"""Type of a configuration field that accepts a task of any kind."""
