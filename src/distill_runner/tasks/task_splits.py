"""Data of a task of any type: training, validation and test splits, epoch selection, and the data's fingerprint."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from distill_runner.common.errors import UserError, override, require_choice
from distill_runner.datasets.metrics import LOWER_IS_BETTER, mean
from distill_runner.datasets.readers.content import data_fingerprint, require_own_rows, share_rows
from distill_runner.datasets.readers.dataset import Dataset, parse_split, splits_overlap
from distill_runner.datasets.readers.files import has_local_split

VALIDATION, HELD_OUT, _MEAN = "validation", "held_out", "mean"
_TEST, OPTIONAL = "test", "?"
"""End of the name of a test split that is scored only if the files of the dataset contain it."""
NO_SPLIT = ""
"""Training split of the copies that ``TaskSplits.locate`` makes for a single validation or test split."""
_MAX_NAME = 100
"""Characters of a name that becomes a part of files' names."""
LOCATION = {"name", "dataset", "config", "revision", "encoding", "epochs"}
"""Fields that are not part of ``TaskSplits.spec``: the content of the data has a fingerprint there, wherever it is."""


class TaskSplits(Dataset):
    """Data of a task: training, validation and test splits, and the data that select the best epoch.

    Attributes:
        inferred_fields: options besides columns and class names that ``resolved`` or ``with_model`` fills in if they
            are null; ``data_summary`` records them.
        not_held_out: why training examples cannot be held out to select the epoch, and a remedy; None if they can.
        name: name of the task in results and tables. Recipes and published numbers are found by this name.
        version: version of the task; increase it when the meaning of the task changes, so that older stored results
            are not reused.
        type: task type; each has options of its own. The default is ``classification``.
        metrics: names of the metrics; the first one selects the best epoch. null takes the task type's first metric.
        epochs: number of passes over the training examples, for teacher and student, unless the recipe or ``optim``
            sets another number.
        train: split to train on. It may be a part, such as ``train[:90%]`` or ``train[1000:]``, and ``train[~:90%]``
            takes rows in a fixed random order.
        validation, test: name in the results -> split, which may be a part as in ``train``. In all three options a
            split of another configuration or dataset is written ``<configuration>:<split>`` or
            ``<dataset>[@<revision>]:<configuration>:<split>``. Test splits with labels are scored once, at the end,
            with the student and its teacher; they choose nothing and change no training. ``test?`` is the split
            ``test`` if the folder of the dataset has one. ``test`` is short for ``{test: test}``; null scores none.
        select_on: data that select the best epoch. ``validation`` is the first split of ``validation``, as in all five
            papers. The name of another validation split selects by that split, and ``mean`` by the mean of all.
            ``held_out`` selects by a part of the training data; validation splits are then evaluated only once.
        hold_out: share of the training examples in the held-out set if ``select_on`` is ``held_out``. The share is the
            same in each class (regression: in each of ten score ranges).
        by_split: give each of several validation or test splits, such as languages, a separate column in the tables.
            The score is then their mean, whatever selects the epoch.
        assumptions: choices of the task's configuration file where a paper is silent, by option.
    Raises:
        UserError: fields contradict each other, a metric is unknown, or ``Dataset`` refuses a field.
    """

    inferred_fields: ClassVar[tuple[str, ...]] = ()
    not_held_out: ClassVar[tuple[str, str] | None] = None
    key: ClassVar[str] = "task"

    name: str
    version: int = 1
    type: str
    metrics: list[str] = Field(min_length=1)
    epochs: int = Field(ge=1)
    train: str = "train"
    validation: dict[str, str] = Field(min_length=1)
    test: Annotated[
        dict[str, str],
        BeforeValidator(lambda test: {_TEST: test} if isinstance(test, str) else {} if test is None else test),
    ] = Field(default_factory=dict)
    select_on: str = VALIDATION
    hold_out: float = Field(0.1, gt=0, lt=1)
    by_split: bool = False
    assumptions: dict[str, Any] = Field(default_factory=dict, exclude=True)

    @model_validator(mode="after")
    def _names_and_splits_fit(self) -> Self:
        names = [("task.name", self.name)]  # names that become a part of files' names
        names += [(f"task.{kind}", name) for kind in ("validation", "test") for name in getattr(self, kind)]
        for key, name in names:
            if not name.strip() or name.startswith(".") or re.search(r"[/\\\0-\x1f]", name) or len(name) > _MAX_NAME:
                problem = "cannot be a part of a file's name"
                raise UserError(key, name, problem, "Take a short name without slashes that does not begin with a dot.")
            if key != "task.name" and name == "train":
                raise UserError(key, name, "is the name of the split to train on in results", "Take another name.")
        choices = dict.fromkeys([HELD_OUT, VALIDATION, _MEAN, *self.validation])
        problem = "must be held_out, mean, or the name of a split in task.validation"
        require_choice("task.select_on", self.select_on, choices, problem)
        if self.select_on == HELD_OUT and self.not_held_out:
            raise UserError("task.select_on", HELD_OUT, *self.not_held_out)
        if self.metrics[0] in LOWER_IS_BETTER:
            problem = "is better when it is lower, but the epoch with the highest first metric is selected"
            remedy = override("task.metrics", ["accuracy", self.metrics[0]])
            raise UserError("task.metrics", self.metrics[0], problem, remedy)
        required = {name: split for name, split in self.test.items() if not split.endswith(OPTIONAL)}
        for field, splits in (("validation", self.validation), ("test", required)):
            for name, split in splits.items():
                if splits_overlap(split, self.train):
                    problem = f"has rows of task.train={self.train}: the model would be evaluated on training examples"
                    key, first, rest = f"task.{field}.{name}", "train[:90%]", "train[90%:]"
                    raise UserError(key, split, problem, "Take parts: " + override("task.train", first, key, rest))
        for name, split in required.items():
            if other := next((key for key, value in self.validation.items() if splits_overlap(split, value)), None):
                problem = f"has rows of task.validation.{other}={self.validation[other]}, which is scored already"
                remedy = "Give another split, or leave it out: " + override(f"~task.test.{name}")
                raise UserError(f"task.test.{name}", split, problem, remedy)
        return self

    def resolved(self) -> Self:
        """Return the task with the fields that are read from its data, here without optional test splits that are none.

        These do not exist, or overlap with a training or validation split.

        Raises:
            UserError: the data cannot be read, or do not fit the task.
        """
        if not any(split.endswith(OPTIONAL) for split in self.test.values()):
            return self
        test = {}
        for name, split in self.test.items():
            plain = split.removesuffix(OPTIONAL)
            others, task = (self.train, *self.validation.values()), self.model_copy(update={"test": {name: plain}})
            has_rows = not any(splits_overlap(plain, other) for other in others) and task.has_files(plain)
            if plain == split or (has_rows and not any(other and share_rows(task, plain, other) for other in others)):
                test[name] = plain
        return self.model_copy(update={"test": test})

    def has_files(self, split: str) -> bool:
        """Return whether the folder of a split, if it is local, has the split's files."""
        source, name = self.locate(split)
        return has_local_split(source, parse_split(name)[0])

    @property
    def ignored_options(self) -> frozenset[str]:
        """Options that have no effect beside the others."""
        return frozenset() if self.select_on == HELD_OUT else frozenset({"hold_out"})

    def spec(self) -> dict[str, Any]:
        """Return what determines training and the choice of its epoch, without options that have no effect on them.

        Test splits choose nothing, and scores by further metrics are computed from the predictions.
        """
        unused = LOCATION | {"test", "by_split"} | (set() if self.select_on == HELD_OUT else {"select_on", "hold_out"})
        options = self.model_dump(exclude=unused, exclude_none=True)
        require_own_rows(self)
        content = self.model_copy(update={"test": {}}).fingerprint()
        return {**options, "metrics": self.metrics[:1], "scored_on": self.plain_splits, "content": content}

    def test_content(self, split: str) -> str:
        """Return the fingerprint of the data of a test split."""
        only = {"train": NO_SPLIT, "validation": {}, "test": {self.split_key(split).rpartition(".")[2]: split}}
        return self.model_copy(update=only).fingerprint()

    def fingerprint(self) -> str:
        """Return a fingerprint of the content of all splits, see ``data_fingerprint``."""
        return data_fingerprint(self)

    @property
    def data_summary(self) -> dict[str, Any]:
        """Data that a student is trained, selected and scored on, as its result records them: options with an effect.

        ``scored_on`` lists the validation splits whose mean is the score.
        """
        plain = self.plain_splits
        columns = {"columns": self.columns} if self.columns else {}  # otherwise they are inferred from the data
        held_out = {"hold_out": self.hold_out} if self.select_on == HELD_OUT else {}
        return {
            "config": self.config,
            "revision": self.revision,
            **columns,
            "labels": self.label_columns,
            "train": self.train,
            "validation": self.validation,
            "select_on": self.select_on if len(plain) > 1 or self.select_on == HELD_OUT else plain[0],
            "scored_on": self.scored_splits,
            **held_out,
            **{name: value for name in self.inferred_fields if (value := getattr(self, name)) is not None},
        }

    @property
    def scored_splits(self) -> list[str]:
        """Names of the validation splits whose mean is the score: all of them if each has a column."""
        return self.split_columns or self.plain_splits

    @property
    def plain_splits(self) -> list[str]:
        """Names of the validation splits whose mean has the plain names of the metrics: those that select the epoch."""
        if self.select_on in self.validation:
            return [self.select_on]
        return list(self.validation) if self.select_on == _MEAN else [next(iter(self.validation))]

    @property
    def split_columns(self) -> list[str]:
        """Names of the validation splits that have separate columns in a table."""
        return list(self.validation) if self.by_split and len(self.validation) > 1 else []

    def combined_metrics(self, scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return the metrics of all validation splits in one mapping, those that select the best epoch first.

        The selecting split, or the mean over splits, keeps the plain metric names. Metrics of other splits are named
        ``<split>/<metric>``.

        Args:
            scores: metrics by the name of the split.
        """
        selecting = [name for name in self.plain_splits if name in scores] or [next(iter(scores))]  # one may be missing
        plain = {metric: mean([scores[name][metric] for name in selecting]) for metric in scores[selecting[0]]}
        others = [name for name in scores if len(selecting) > 1 or self.by_split or name not in selecting]
        return plain | {f"{name}/{metric}": value for name in others for metric, value in scores[name].items()}

    @property
    def inferred_from(self) -> str:
        """Split from which what the user leaves out is read: the training split, if the task has one."""
        return self.train or next(iter({**self.validation, **self.test}.values()))

    @property
    def splits(self) -> set[str]:
        return {self.train, *self.validation.values(), *self.test.values()} - {NO_SPLIT}

    def locate(self, split: str) -> tuple[Self, str]:
        address, bracket, part = split.partition("[")  # the slice, such as [:90%], has a colon too
        *location, name = address.rsplit(":", 2)
        name += bracket + part
        if not location:
            return self, split
        dataset, _, revision = location[0].partition("@") if len(location) > 1 else (self.dataset, "", self.revision)
        # The copy has only this split, under the same configuration key, so that messages name the right key.
        splits = {
            "train": name if split == self.train else NO_SPLIT,
            "validation": {key: name for key, value in self.validation.items() if value == split},
            "test": {key: name for key, value in self.test.items() if value == split},
        }
        source = {"dataset": dataset, "config": location[-1] or None, "revision": revision or None}
        return self.model_copy(update=splits | source), name

    def is_optional(self, split: str) -> bool:
        return self.is_test(split) or (self.split_key(split) != "task.train" and len(self.validation) > 1)

    def split_key(self, split: str) -> str:
        """Return the configuration key that names ``split``; ``task.train`` if no other key does."""
        for field, splits in (("validation", self.validation), ("test", self.test)):
            for name, value in splits.items():
                if value == split and split != self.train:
                    return f"task.{field}.{name}"
        return "task.train"

    def is_test(self, split: str) -> bool:
        """Return whether ``split`` is only a test split, which may lack labels."""
        return self.split_key(split).startswith("task.test.")
