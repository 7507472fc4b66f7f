"""What a task has of data, whatever its kind: its splits, what selects the best epoch, what determines it."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any, Self

from pydantic import Field, model_validator

from distill_runner.common.errors import UserError
from distill_runner.common.readings import of_file
from distill_runner.datasets.metrics import LOWER_IS_BETTER
from distill_runner.datasets.reading.dataset import Dataset
from distill_runner.datasets.reading.fingerprints import data_fingerprint
from distill_runner.datasets.reading.slices import share_rows

VALIDATION, HELD_OUT, MEAN = "validation", "held_out", "mean"
NOWHERE = ""
"""In place of the training split of a task that stands for one of its other splits."""
WHERE = {"name", "dataset", "config", "revision", "epochs"}
"""Fields that do not determine what a task trains and is judged on; its content does."""


class Splits(Dataset):
    """Where the examples of a task come from, which of them train, and which judge.

    Attributes:
        version: raised when the meaning of the task changes, so that stored results are not mistaken for it.
        kind: name of the kind, which chooses the subclass.
        metrics: the first one selects the best epoch; null is the first one of ``known_metrics``.
        validation, test: name in the results -> split. A split may name its configuration and data set, if they are not
            the task's: ``<configuration>:<split>``, ``<data set>[@<revision>]:<configuration>:<split>``.
        select_on: what selects the best epoch: the first split of ``validation``, by its name or as ``validation``, as
            all five papers do; another split by its name, or the ``mean`` of them all; or ``held_out``, a part of the
            training data, with which ``validation`` is looked at once.
        hold_out: that part's share of the training examples, of each class the same.
        by_split: each validation split is a column of the tables, such as a language.
        readings: what the file of the task takes where a paper is silent, by option.
    Raises:
        UserError: fields that contradict each other, an unknown metric, or what ``Dataset`` refuses.
    """

    name: str
    version: int = 1
    kind: str
    metrics: list[str] = Field(min_length=1)
    epochs: int = Field(ge=1)
    train: str = "train"
    validation: dict[str, str] = Field(min_length=1)
    test: dict[str, str] = Field(default_factory=dict)
    select_on: str = VALIDATION
    hold_out: float = Field(0.1, gt=0, lt=1)
    by_split: bool = False
    readings: dict[str, Any] = of_file()

    @model_validator(mode="after")
    def _selects_on_something(self) -> Self:
        if self.select_on not in (VALIDATION, HELD_OUT, MEAN, *self.validation):
            problem = "neither held_out nor a split of task.validation, nor the mean of these"
            remedy = f"Take one of {', '.join(dict.fromkeys([HELD_OUT, VALIDATION, MEAN, *self.validation]))}."
            raise UserError("task.select_on", self.select_on, problem, remedy)
        return self

    @model_validator(mode="after")
    def _selects_by_what_grows(self) -> Self:
        if self.metrics[0] in LOWER_IS_BETTER:
            problem = "is better when it is lower, and the first metric selects the highest"
            raise UserError("task.metrics", self.metrics[0], problem, f"task.metrics=[accuracy,{self.metrics[0]}]")
        return self

    @model_validator(mode="after")
    def _is_not_judged_on_what_it_learns(self) -> Self:
        for field, splits in (("validation", self.validation), ("test", self.test)):
            for name, split in splits.items():
                if share_rows(split, self.train):
                    problem = f"has rows of task.train={self.train}: it would be judged on what it was trained on"
                    remedy = "task.split_off=0.1 takes a tenth off; or write parts: train[:90%] and train[90%:]"
                    raise UserError(f"task.{field}.{name}", split, problem, remedy)
        return self

    def spec(self) -> dict[str, Any]:
        """What determines the task's data and how it is judged. An option that is not set is left out of it."""
        by_itself = set() if self.select_on == HELD_OUT else {"hold_out"}
        by_itself |= set() if self.by_split else {"by_split"}
        by_itself |= {"select_on"} if self.select_on in (VALIDATION, next(iter(self.validation))) else set()
        return {**self.model_dump(exclude=WHERE | by_itself, exclude_none=True), "content": data_fingerprint(self)}

    @property
    def columns_of(self) -> list[str]:
        """Validation splits that have columns of their own in a table."""
        return list(self.validation) if self.by_split else []

    def named(self, scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """The metrics of all validation splits by one name each, what selects first.

        Args:
            scores: metrics by split. Those of the split that selects, or the means, have the metrics' own names.
        """
        chosen = self.select_on if self.select_on in scores else next(iter(scores))
        means = len(scores) > 1 and self.select_on == MEAN
        if means:
            leading = {metric: fmean(found[metric] for found in scores.values()) for metric in scores[chosen]}
        else:
            leading = dict(scores[chosen])
        others = [name for name in scores if means or self.by_split or name != chosen]
        return leading | {f"{name}/{metric}": value for name in others for metric, value in scores[name].items()}

    @property
    def key(self) -> str:
        return "task"

    @property
    def splits(self) -> set[str]:
        return {self.train, *self.validation.values(), *self.test.values()} - {NOWHERE}

    def placed(self, split: str) -> tuple[Self, str]:
        whole, bracket, part = split.partition("[")  # of a part of a split, whose colon is another one
        *where, name = whole.rsplit(":", 2)
        name += bracket + part
        if not where:
            return self, split
        dataset, _, revision = where[0].partition("@") if len(where) > 1 else (self.dataset, "", self.revision)
        # A task that has this split alone, in the same place, so that messages name its key.
        alone = {
            "train": name if split == self.train else NOWHERE,
            "validation": {key: name for key, value in self.validation.items() if value == split},
            "test": {key: name for key, value in self.test.items() if value == split},
        }
        place = {"dataset": dataset, "config": where[-1] or None, "revision": revision or None}
        return self.model_copy(update=alone | place), name

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
