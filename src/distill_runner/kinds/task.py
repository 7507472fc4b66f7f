"""The base class of all kinds of tasks, which defines their interface to the rest of the program."""

import difflib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from pydantic import model_validator

from distill_runner.common.errors import UserError
from distill_runner.datasets.examples import Examples
from distill_runner.datasets.metrics import Metric, score
from distill_runner.kinds.splits import Splits
from distill_runner.kinds.verdicts import Verdicts
from distill_runner.models.head import Head

if TYPE_CHECKING:
    from distill_runner.datasets.batches import Batch
    from distill_runner.datasets.corpora import TransferSet
    from distill_runner.datasets.split import Split
    from distill_runner.methods.outputs import Outputs
    from distill_runner.models.encoders import EncoderShape


class Task(Splits):
    """Base class of tasks: their examples, model head, outputs and metrics.

    Each kind of task is a subclass in a separate file. The subclass defines how rows become examples, which head a
    model gets, what the outputs mean and how they are scored. No other code depends on the kind of a task.

    Raises:
        UserError: a metric is unknown, or ``Splits`` refuses a field.
    """

    known_metrics: ClassVar[Mapping[str, Metric]]
    tokenized: ClassVar[bool] = True
    """Whether the examples are texts, so that models need a tokenizer."""
    has_classes: ClassVar[bool] = False
    """Whether the names of the head's outputs are names of classes, which the option ``labels`` takes."""
    has_ids: ClassVar[bool] = False
    """Whether official evaluation scripts read predictions by the ids of the examples (``answers``)."""
    framed: ClassVar[bool] = False
    """Whether ``write`` puts special tokens and segment ids around texts itself, with ``Frame``."""
    read_fields: ClassVar[frozenset[str]]
    """Fields on which the stored examples of a split depend, besides the content of the data."""

    @model_validator(mode="before")
    @classmethod
    def _without_fields_of_other_kinds(cls, fields: Any) -> Any:
        """Drop null fields that belong to other kinds, and replace null metrics by the first metric of the kind."""
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
        """Return the task with the fields that are read from its training data, such as the names of classes.

        Raises:
            UserError: the data cannot be read, or do not fit the task.
        """
        return self

    @abstractmethod
    def examples(self, split: str) -> Examples:
        """Return the examples of a split before tokenisation or decoding.

        Args:
            split: the split as written in ``train``, or in the values of ``validation`` or ``test``.
        Raises:
            UserError: data are missing, damaged or contradictory.
        """

    @abstractmethod
    def write(self, folder: Path, examples: Examples, tokenizer: Any) -> None:
        """Tokenise or decode ``examples`` and save them in ``folder`` as arrays for ``open``."""

    @abstractmethod
    def open(self, folder: Path, views: int | None = None) -> "Split":
        """Return the examples that ``write`` saved, memory-mapped.

        Args:
            views: number of fixed random crops and flips of each image; None draws new ones in each epoch.
        """

    def transfer(self, transfer: "TransferSet") -> Examples:
        """Return the inputs of a transfer set as examples without labels."""
        return transfer.examples()

    @property
    def given_columns(self) -> list[str]:
        """Columns of the data with the predictions of another model; empty if there are none."""
        return []

    def given_logits(self, split: str) -> np.ndarray:
        """Return the predictions in ``given_columns`` as outputs of this task's head: float32, (N, C).

        Raises:
            UserError: the columns do not exist, or do not hold predictions.
        """
        raise UserError("task.kind", self.kind, "cannot read predictions from columns of the data")

    @property
    @abstractmethod
    def head(self) -> Head:
        """The head of a model for this task."""

    @property
    @abstractmethod
    def outputs(self) -> "Outputs":
        """The meaning of the head's outputs, and the losses on them."""

    @property
    def shown(self) -> dict[str, Any]:
        """Settings besides the saved arrays on which a model's input, and so a cached teacher output, depends."""
        return {}

    def is_endless(self, views: int | None) -> bool:
        """Return whether training examples look different in each epoch, given ``views`` as in ``open``."""
        return False

    def check(self, shape: "EncoderShape") -> None:
        """Check that a model of this ``shape`` reads the examples of the task.

        Raises:
            UserError: the model does not read them.
        """
        if self.tokenized and shape.reads_images:
            problem = f"a model of type {shape.model_type} reads images, but {self.name} has texts"
            raise UserError(".model", None, problem, "Take a text encoder, or a task of images: task=cifar10.")

    def save_reader(self, folder: Path) -> None:
        """Save preprocessing files other than the tokenizer's in the folder of a model, such as those for images."""

    @property
    def num_positions(self) -> int:
        """Number of positions that a model needs for the longest example; 0 if examples have no positions."""
        return 0

    def score(self, outputs: np.ndarray, split: "Split") -> dict[str, float]:
        """Return the metrics of a model's outputs for a split, in the order of ``metrics``, as fractions.

        Args:
            outputs: shape (``split.num_outputs``, C), in the order of the split.
        Raises:
            NotFinite: an output is infinite or not a number.
        """
        return score(self.metrics, outputs, np.asarray(split.labels))

    def save_predictions(self, file: Path, outputs: np.ndarray, split: "Split") -> None:
        """Save ``outputs`` and ``labels``, one row for each example, for paired tests of two methods."""
        np.savez(file, outputs=outputs, labels=np.asarray(split.labels))

    def save_pictures(self, folder: Path, epochs: "Iterator[Batch]", outputs: np.ndarray, split: "Split") -> None:
        """Save PNG files of training examples and of wrong predictions, if examples of this kind can be looked at.

        Args:
            epochs: the same few training examples, as one epoch after the other shows them.
            outputs: as for ``score``.
        """

    def answers(self, outputs: np.ndarray, split: "Split") -> dict[str, str]:
        """Return the predictions by the ids of the examples, as official evaluation scripts read them.

        Raises:
            UserError: examples of this kind have no ids (``has_ids``).
        """
        raise UserError("task.kind", self.kind, "its examples have no ids for the predictions", "Use --file.")

    def verdicts(self, outputs: np.ndarray, split: "Split") -> Verdicts:
        """Return the prediction for each example, and whether it is right.

        Args:
            outputs: as for ``score``.
        Raises:
            UserError: predictions of this kind are neither right nor wrong.
        """
        raise UserError("task.kind", self.kind, "has predictions that are neither right nor wrong, only close or far")

    def as_texts(self, name: str, split: "Split", numbers: Sequence[int]) -> list[str]:
        """Return examples as readable texts, with the names of the columns if there are several.

        Args:
            name: the split, as for ``examples``.
            split: the same split, opened.
            numbers: indices of the examples in the split.
        """
        columns = self.examples(name).texts
        rows = ([column[number] for column in columns] for number in numbers)
        return [
            row[0] if len(row) == 1 else " ".join(map(": ".join, zip(self.columns, row, strict=True))) for row in rows
        ]

    @abstractmethod
    def as_lines(self, outputs: np.ndarray, names: bool = True) -> list[str]:
        """Return the prediction for each example as a line of a prediction file.

        Args:
            names: write the names of classes; False writes their indices.
        """

    def class_probabilities(self, outputs: np.ndarray) -> dict[str, np.ndarray]:
        """Return the probabilities (N,) of each class by name; empty if the outputs are not probabilities."""
        return {}

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that distinguish results on this task, besides the name of the task."""
        return {}

    def changed(self, *names: str) -> dict[str, Any]:
        """Return the fields ``names`` whose value is not their default."""
        return self.model_dump(include=set(names), exclude_defaults=True)


def _all_fields(kind: type[Any]) -> set[str]:
    """Return the field names of a class and of all its subclasses."""
    return set(kind.model_fields).union(*map(_all_fields, kind.__subclasses__()))
