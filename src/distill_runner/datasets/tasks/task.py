"""What a task is: pure data, checked when it is made."""

import difflib
import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from distill_runner.common.errors import UserError, as_list
from distill_runner.datasets.metrics import CLASSIFICATION_METRICS, METRICS, REGRESSION_METRICS
from distill_runner.datasets.reading.dataset import Dataset


class Task(Dataset):
    """Where the examples come from, which columns they have, how a model is judged on them.

    Attributes:
        version: raised when the meaning of the task changes, so that stored results are not mistaken for it.
        labels: class names in the order of the model's outputs; ``None`` for regression, and for a
            classification task that has not gone through ``resolve`` yet.
        metrics: the first one selects the best epoch.
        max_length: tokens of an example, special tokens included.
        validation, test: name in the results -> split; the first validation split selects the best epoch.
    Raises:
        UserError: fields that contradict each other, an unknown metric, or what ``Dataset`` refuses.
    """

    name: str
    version: int = 1
    label: str = "label"
    labels: list[str] | None = None
    kind: Literal["classification", "regression"] = "classification"
    metrics: list[str] = Field(min_length=1)
    max_length: int = Field(ge=4)
    epochs: int = Field(ge=1)
    train: str = "train"
    validation: dict[str, str] = Field(min_length=1)
    test: dict[str, str] = Field(default_factory=dict)

    @field_validator("labels", mode="before")
    @classmethod
    def _names_are_text(cls, labels: Any) -> Any:
        """``task.labels=[0,1]`` arrives as numbers."""
        if not isinstance(labels, list | tuple):
            return labels
        return [str(label) if isinstance(label, int | float) else label for label in labels]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_labels()
        self._check_metrics()
        return self

    def _check_labels(self) -> None:
        if self.labels is None:
            return
        shown = as_list(self.labels)
        if self.kind == "regression":
            raise UserError("task.labels", shown, "a regression task has no class names", "task.labels=null")
        if len(self.labels) < 2:
            raise UserError("task.labels", shown, "a classification task needs two classes or more")
        if len({normal(label) for label in self.labels}) < len(self.labels):
            raise UserError("task.labels", shown, "two names are equal but for case, spaces, '_' and '-'")

    def _check_metrics(self) -> None:
        fitting = CLASSIFICATION_METRICS if self.kind == "classification" else REGRESSION_METRICS
        for metric in self.metrics:
            if metric not in METRICS:
                near = difflib.get_close_matches(metric, METRICS, n=1)
                hint = f"Did you mean {near[0]}? " if near else ""
                known = f"{hint}Known: {', '.join(METRICS)}."
                raise UserError("task.metrics", metric, "no such metric", known)
            if metric not in fitting:
                choices = f"Choose from {', '.join(fitting)}."
                raise UserError("task.metrics", metric, f"does not fit task.kind={self.kind}", choices)
            if metric in ("f1", "accuracy_f1") and self.labels is not None and len(self.labels) != 2:
                problem = f"is defined for two classes, the task has {len(self.labels)}"
                raise UserError("task.metrics", metric, problem, "task.metrics=[accuracy]")

    @property
    def key(self) -> str:
        return "task"

    @property
    def splits(self) -> set[str]:
        return {self.train, *self.validation.values(), *self.test.values()}

    @property
    def label_column(self) -> str | None:
        return self.label

    def needed(self, split: str) -> dict[str, str]:
        """The label may be absent where it is only tested on."""
        return dict.fromkeys(self.columns, "columns") | ({} if self.is_test(split) else {self.label: "label"})

    def can_lack(self, split: str) -> bool:
        return self.is_test(split) or (self.role(split) != "task.train" and len(self.validation) > 1)

    def role(self, split: str) -> str:
        """The configuration key that names ``split``; ``task.train`` for one that no key names."""
        for field, splits in (("validation", self.validation), ("test", self.test)):
            for name, value in splits.items():
                if value == split and split != self.train:
                    return f"task.{field}.{name}"
        return "task.train"

    def is_test(self, split: str) -> bool:
        """Whether ``split`` is only tested on, so that it may lack labels."""
        return self.role(split).startswith("task.test.")


def normal(name: str) -> str:
    """A class name without case; spaces, ``_`` and ``-`` are equal (but ``-1`` and ``1`` differ)."""
    return re.sub(r"[\s_-]+", " ", name.strip()).casefold()
