"""Splits of a task of any kind: training, validation and test data, epoch selection, and the data's fingerprint."""

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
"""Training split of the copies that ``Splits.placed`` makes for a single validation or test split."""
WHERE = {"name", "dataset", "config", "revision", "epochs"}
"""Fields that are not part of ``Splits.spec``, which holds a fingerprint of the content of the data instead."""


class Splits(Dataset):
    """Data of a task: training, validation and test splits, and the data that select the best epoch.

    Attributes:
        name: name of the task in results and tables. Recipes and published numbers are found by this name.
        version: version of the task; increase it when the meaning of the task changes, so that older stored results
            are not reused.
        kind: kind of task: ``classification``, ``multilabel``, ``regression``, ``images`` or ``questions``.
        metrics: names of the metrics; the first one selects the best epoch. null takes the first metric of the kind.
        epochs: number of passes over the training examples, for teacher and student, unless the recipe or ``optim``
            sets another number.
        train: split to train on. It may be a part, such as ``train[:90%]`` or ``train[1000:]``, and ``train[~:90%]``
            takes rows in a fixed random order.
        validation, test: name in the results -> split, which may be a part as in ``train``. In all three options a
            split of another configuration or data set is written ``<configuration>:<split>`` or
            ``<data set>[@<revision>]:<configuration>:<split>``.
        select_on: data that select the best epoch. ``validation`` is the first split of ``validation``, as in all five
            papers. The name of another validation split selects by that split, and ``mean`` by the mean of all.
            ``held_out`` selects by a part of the training data; validation splits are then evaluated only once.
        hold_out: share of the training examples in the held-out set if ``select_on`` is ``held_out``. The share is the
            same in each class (regression: in each of ten score ranges).
        by_split: give each validation split, such as a language, a separate column in the tables.
        readings: choices of the task's configuration file where a paper is silent, by option.
    Raises:
        UserError: fields contradict each other, a metric is unknown, or ``Dataset`` refuses a field.
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
            problem = "is better when it is lower, but the epoch with the highest first metric is selected"
            raise UserError("task.metrics", self.metrics[0], problem, f"task.metrics=[accuracy,{self.metrics[0]}]")
        return self

    @model_validator(mode="after")
    def _is_not_judged_on_what_it_learns(self) -> Self:
        for field, splits in (("validation", self.validation), ("test", self.test)):
            for name, split in splits.items():
                if share_rows(split, self.train):
                    problem = f"has rows of task.train={self.train}: the model would be evaluated on training examples"
                    can_split = "split_off" in type(self).model_fields
                    other = "task.split_off=0.1 sets a tenth aside; or give" if can_split else "Give"
                    remedy = f"{other} slices: train[:90%] and train[90%:]"
                    raise UserError(f"task.{field}.{name}", split, problem, remedy)
        return self

    def spec(self) -> dict[str, Any]:
        """Return what determines the task's data and evaluation, without options that are not set or have no effect."""
        by_itself = set() if self.select_on == HELD_OUT else {"hold_out"}
        by_itself |= set() if self.by_split else {"by_split"}
        by_itself |= {"select_on"} if self.select_on != HELD_OUT and self._scored_on == self._first else set()
        return {**self.model_dump(exclude=WHERE | by_itself, exclude_none=True), "content": data_fingerprint(self)}

    @property
    def used(self) -> dict[str, Any]:
        """Data that train, select and score a student, as its result records them: options that have an effect.

        ``scored_on`` lists the validation splits whose mean is the score; it is one split unless ``mean`` selects.
        """
        scored = self._scored_on
        columns = {"columns": self.columns} if self.columns else {}  # else they are found in the data
        held_out = {"hold_out": self.hold_out} if self.select_on == HELD_OUT else {}
        return {
            "config": self.config,
            "revision": self.revision,
            **columns,
            "labels": self.label_columns,
            "train": self.train,
            "validation": self.validation,
            "select_on": self.select_on if len(scored) > 1 or self.select_on == HELD_OUT else scored[0],
            "scored_on": scored,
            **held_out,
        }

    @property
    def _first(self) -> list[str]:
        return [next(iter(self.validation))]

    @property
    def _scored_on(self) -> list[str]:
        """Names of the validation splits whose mean is the score."""
        if self.select_on in self.validation:
            return [self.select_on]
        return list(self.validation) if self.select_on == MEAN else self._first

    @property
    def columns_of(self) -> list[str]:
        """Names of the validation splits that have separate columns in a table."""
        return list(self.validation) if self.by_split else []

    def named(self, scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return the metrics of all validation splits in one mapping, those that select the best epoch first.

        The selecting split, or the mean over splits, keeps the plain metric names. Metrics of other splits are named
        ``<split>/<metric>``.

        Args:
            scores: metrics by the name of the split.
        """
        chosen = [name for name in self._scored_on if name in scores] or [next(iter(scores))]  # a split may be missing
        leading = {metric: fmean(scores[name][metric] for name in chosen) for metric in scores[chosen[0]]}
        others = [name for name in scores if len(chosen) > 1 or self.by_split or name not in chosen]
        return leading | {f"{name}/{metric}": value for name in others for metric, value in scores[name].items()}

    @property
    def key(self) -> str:
        return "task"

    @property
    def splits(self) -> set[str]:
        return {self.train, *self.validation.values(), *self.test.values()} - {NOWHERE}

    def placed(self, split: str) -> tuple[Self, str]:
        whole, bracket, part = split.partition("[")  # the slice, such as [:90%], has a colon too
        *where, name = whole.rsplit(":", 2)
        name += bracket + part
        if not where:
            return self, split
        dataset, _, revision = where[0].partition("@") if len(where) > 1 else (self.dataset, "", self.revision)
        # The copy has only this split, under the same configuration key, so that messages name the right key.
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
        """Return the configuration key that names ``split``; ``task.train`` if no other key does."""
        for field, splits in (("validation", self.validation), ("test", self.test)):
            for name, value in splits.items():
                if value == split and split != self.train:
                    return f"task.{field}.{name}"
        return "task.train"

    def is_test(self, split: str) -> bool:
        """Return whether ``split`` is only a test split, which may lack labels."""
        return self.role(split).startswith("task.test.")
