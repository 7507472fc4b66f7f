"""Task types. Each defines its data format, head, losses and scores in one module or package.

A new task type needs a subclass of ``Task`` and one entry in ``TASK_TYPES``.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny

from distill_runner.common.errors import require_choice
from distill_runner.tasks.classification import ClassificationTask
from distill_runner.tasks.images import ImagesTask
from distill_runner.tasks.multilabel import MultiLabelTask
from distill_runner.tasks.questions import QuestionsTask
from distill_runner.tasks.regression import RegressionTask
from distill_runner.tasks.task import Task
from distill_runner.tasks.tokens import TokensTask
from distill_runner.tasks.vectors import EmbeddingsTask, RetrievalTask

__all__ = ["TASK_TYPES", "AnyTask", "Task", "make_task", "task_type"]

TASK_TYPES: dict[str, type[Task]] = {
    "classification": ClassificationTask,
    "multilabel": MultiLabelTask,
    "regression": RegressionTask,
    "images": ImagesTask,
    "questions": QuestionsTask,
    "tokens": TokensTask,
    "embeddings": EmbeddingsTask,
    "retrieval": RetrievalTask,
}


def task_type(fields: Mapping[str, Any]) -> type[Task]:
    """Return the class of a task from its configuration ``fields``; the default type is classification.

    Raises:
        UserError: there is no such task type.
    """
    name = fields.get("type", "classification")
    require_choice("task.type", name, [*TASK_TYPES], "there is no such choice")
    return TASK_TYPES[name]


def make_task(**fields: Any) -> Any:
    """Return a task of the type that the field ``type`` names."""
    return task_type(fields)(**fields)


AnyTask = Annotated[
    SerializeAsAny[Task],
    BeforeValidator(lambda value: task_type(value).model_validate(value) if isinstance(value, Mapping) else value),
]
"""Type of a configuration field that accepts a task of any type."""
