"""What every task has, whatever its kind: data, splits, metrics, and what the rest of the program asks of a kind."""

import difflib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from distill_runner.common.errors import UserError
from distill_runner.datasets.examples import Examples
from distill_runner.datasets.metrics import LOWER_IS_BETTER, Metric, score
from distill_runner.datasets.reading.dataset import Dataset
from distill_runner.datasets.reading.fingerprints import data_fingerprint
from distill_runner.datasets.reading.slices import share_rows
from distill_runner.kinds.verdicts import Verdicts
from distill_runner.models.head import Head

if TYPE_CHECKING:
    from distill_runner.datasets.corpora import TransferSet
    from distill_runner.datasets.split import Split
    from distill_runner.methods.outputs import Outputs
    from distill_runner.models.encoders import EncoderShape

VALIDATION, HELD_OUT, MEAN = "validation", "held_out", "mean"
NOWHERE = ""
"""In place of the training split of a task that stands for one of its other splits."""
WHERE = {"name", "dataset", "config", "revision", "epochs"}
"""Fields that do not determine what a task trains and is judged on; its content does."""


class Task(Dataset):
    """Where the examples come from, which columns they have, how a model is judged on them.

    A kind of task is a subclass in a file of its own. It says how its rows become examples, which head a model gets,
    what the outputs mean and how they are scored; nothing else in the program asks which kind a task is.

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
    Raises:
        UserError: fields that contradict each other, an unknown metric, or what ``Dataset`` refuses.
    """

    known_metrics: ClassVar[Mapping[str, Metric]]
    tokenized: ClassVar[bool] = True
    """Whether its examples are texts, so that models come with a tokenizer."""
    has_ids: ClassVar[bool] = False
    """Whether official evaluators take predictions by the ids of examples."""
    read_fields: ClassVar[frozenset[str]]
    """Fields that the examples of a split depend on, beside the content of the data."""

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

    @model_validator(mode="before")
    @classmethod
    def _without_fields_of_other_kinds(cls, fields: Any) -> Any:
        """A configuration may name the fields of other kinds, as null, and leave the metric to the kind."""
        if not isinstance(fields, Mapping):
            return fields
        others = _all_fields(Task) - cls.model_fields.keys()
        own = {key: value for key, value in fields.items() if value is not None or key not in others}
        default = {"metrics": [next(iter(cls.known_metrics))]} if own.get("metrics", ()) is None else {}
        return own | default

    @model_validator(mode="after")
    def _metrics_are_known(self) -> Self:
        for metric in self.metrics:
            if metric not in self.known_metrics:
                near = difflib.get_close_matches(metric, self.known_metrics, n=1)
                hint = f"Did you mean {near[0]}? " if near else ""
                problem = f"task.kind={self.kind} has no such metric"
                raise UserError("task.metrics", metric, problem, f"{hint}Known: {', '.join(self.known_metrics)}.")
        return self

    def resolved(self) -> Self:
        """The task with what its training data say of it, such as the names of classes.

        Raises:
            UserError: the data cannot be read, or do not fit the task.
        """
        return self

    @abstractmethod
    def examples(self, split: str) -> Examples:
        """The examples of a split as they read.

        Args:
            split: as the data calls it; a value of ``train``, ``validation`` or ``test``.
        Raises:
            UserError: anything that is missing, damaged or contradictory in the data; one or two lines.
        """

    @abstractmethod
    def write(self, folder: Path, examples: Examples, tokenizer: Any) -> None:
        """Save examples as arrays that ``open`` reads."""

    @abstractmethod
    def open(self, folder: Path, views: int | None = None) -> "Split":
        """The examples that ``write`` saved, memory-mapped.

        Args:
            views: of what is cropped or flipped at random, show so many fixed pictures.
        """

    def transfer(self, transfer: "TransferSet") -> Examples:
        """The inputs of a transfer set as examples without labels."""
        return transfer.examples()

    @property
    def given_columns(self) -> list[str]:
        """Columns with the predictions of another model; empty where the data have none."""
        return []

    def given_logits(self, split: str) -> np.ndarray:
        """What those columns say, as outputs of this task's head: float32, (N, C).

        Raises:
            UserError: they are not there, or are no predictions.
        """
        raise UserError("task.kind", self.kind, "has no predictions in columns of its data")

    @property
    @abstractmethod
    def head(self) -> Head:
        """What a model for this task has on top."""

    @property
    @abstractmethod
    def outputs(self) -> "Outputs":
        """What that head's outputs mean."""

    @property
    def shown(self) -> dict[str, Any]:
        """What the look of examples depends on beside what ``write`` saved."""
        return {}

    def is_endless(self, views: int | None) -> bool:
        """Whether training examples look different in each epoch, for so many fixed views of each."""
        return False

    def check(self, shape: "EncoderShape") -> None:
        """See to it that a model of this shape reads the task's examples.

        Raises:
            UserError: it does not.
        """
        if self.tokenized and shape.reads_images:
            problem = f"a model of type {shape.model_type} reads images, and {self.name} has texts"
            raise UserError(".model", None, problem, "Take an encoder of text, or a task of images: task=cifar10.")

    def save_reader(self, folder: Path) -> None:
        """Put beside a model what others need to read such examples, unless that is its tokenizer."""

    @property
    def num_positions(self) -> int:
        """Positions that a model needs for the longest example; 0 where examples have none."""
        return 0

    def score(self, outputs: np.ndarray, split: "Split") -> dict[str, float]:
        """The task's metrics of a model's outputs for a split, in the order given, as fractions.

        Args:
            outputs: shape (``split.num_outputs``, C), in the order of the split.
        Raises:
            NotFinite: an output is not a number.
        """
        return score(self.metrics, outputs, np.asarray(split.labels))

    def save_predictions(self, file: Path, outputs: np.ndarray, split: "Split") -> None:
        """Keep what paired tests of two methods compare: ``outputs`` and ``labels``, one row for each example."""
        np.savez(file, outputs=outputs, labels=np.asarray(split.labels))

    def answers(self, outputs: np.ndarray, split: "Split") -> dict[str, str]:
        """Predictions by the ids of the examples, as official evaluators take them.

        Raises:
            UserError: examples of this kind have no ids (``has_ids``).
        """
        raise UserError("task.kind", self.kind, "its examples have no ids to predict by", "Take --file.")

    def verdicts(self, outputs: np.ndarray, split: "Split") -> Verdicts:
        """What a model says of each example, and whether that is right.

        Args:
            outputs: as for ``score``.
        Raises:
            UserError: an output of this kind is neither right nor wrong.
        """
        raise UserError("task.kind", self.kind, "has no outputs that are right or wrong, only near or far")

    def as_texts(self, name: str, split: "Split", numbers: Sequence[int]) -> list[str]:
        """Examples as a reader sees them, with the names of their columns where they have several.

        Args:
            name: of the split, as the data call it.
        """
        columns = self.examples(name).texts
        rows = ([column[number] for column in columns] for number in numbers)
        return [
            row[0] if len(row) == 1 else " ".join(map(": ".join, zip(self.columns, row, strict=True))) for row in rows
        ]

    @abstractmethod
    def as_lines(self, outputs: np.ndarray, names: bool = True) -> list[str]:
        """The prediction for each example, as a file of predictions has it.

        Args:
            names: of classes, where there are classes; else their numbers.
        """

    def class_probabilities(self, outputs: np.ndarray) -> dict[str, np.ndarray]:
        """(N,) for each class by its name; empty where outputs are no probabilities."""
        return {}

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
    def settings(self) -> dict[str, Any]:
        """What tells results on this task apart, beside its name."""
        return {}

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


def _all_fields(kind: type[Any]) -> set[str]:
    """The names of the fields of a class and of all that extend it."""
    return set(kind.model_fields).union(*map(_all_fields, kind.__subclasses__()))
