"""Kinds: what a kind of task asks of data, head, losses and scores; one file each.

A new kind is a subclass of ``Task`` in a file of its own, and a line in ``KINDS``.
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
    """The class of a task with these fields; classification where no kind is named.

    Raises:
        UserError: there is no such kind.
    """
    kind = fields.get("kind", "classification")
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError("task.kind", kind, "there is no such choice", nearest(kind, KINDS))
    return KINDS[kind]


def make_task(**fields: Any) -> Any:
    """A task of the kind that ``kind`` names; its class depends on it."""
    return kind_of(fields)(**fields)


def _typed(value: Any) -> Any:
    return kind_of(value).model_validate(value) if isinstance(value, Mapping) else value


AnyTask = Annotated[SerializeAsAny[Task], BeforeValidator(_typed)]
"""A field that takes a task of any kind."""
