"""What the rest of the program asks of a kind of task."""

import difflib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
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
    from distill_runner.datasets.corpora import TransferSet
    from distill_runner.datasets.split import Split
    from distill_runner.methods.outputs import Outputs
    from distill_runner.models.encoders import EncoderShape


class Task(Splits):
    """Examples of one kind: how a model reads them, what it says of them, and how it is judged.

    A kind of task is a subclass in a file of its own. It says how its rows become examples, which head a model gets,
    what the outputs mean and how they are scored; nothing else in the program asks which kind a task is.

    Raises:
        UserError: an unknown metric, or what ``Splits`` refuses.
    """

    known_metrics: ClassVar[Mapping[str, Metric]]
    tokenized: ClassVar[bool] = True
    """Whether its examples are texts, so that models come with a tokenizer."""
    has_ids: ClassVar[bool] = False
    """Whether official evaluators take predictions by the ids of examples."""
    read_fields: ClassVar[frozenset[str]]
    """Fields that the examples of a split depend on, beside the content of the data."""

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

    @property
    def settings(self) -> dict[str, Any]:
        """What tells results on this task apart, beside its name."""
        return {}


def _all_fields(kind: type[Any]) -> set[str]:
    """The names of the fields of a class and of all that extend it."""
    return set(kind.model_fields).union(*map(_all_fields, kind.__subclasses__()))
