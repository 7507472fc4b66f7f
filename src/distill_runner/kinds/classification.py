"""Classification tasks: exactly one of several classes for each example."""

import re
import shlex
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from pydantic import field_validator, model_validator

from distill_runner.common.errors import UserError, as_list
from distill_runner.datasets.metrics import CLASSIFICATION_METRICS
from distill_runner.datasets.reading.split_table import SplitTable
from distill_runner.datasets.reading.tables import read
from distill_runner.kinds.text import TextTask, is_empty, whole
from distill_runner.kinds.verdicts import Verdicts
from distill_runner.models.head import Head, normal

if TYPE_CHECKING:
    from distill_runner.datasets.split import Split
    from distill_runner.methods.outputs import Outputs


TOLERANCE, SMALLEST = 1e-3, 1e-12
"""Tolerance for the sum of given probabilities, and lower bound of a probability before its logarithm."""


class ClassificationTask(TextTask):
    """Classification task: exactly one of several classes for each example.

    Attributes:
        labels: class names in the order of the model's outputs; null reads them from the data.
        class_weights: weight of the examples of each class in the loss on gold labels, in the order of ``labels``.
            ``balanced`` gives every class the same total weight, with a mean of 1 over the training examples.
    """

    known_metrics = CLASSIFICATION_METRICS
    has_classes = True

    kind: Literal["classification"] = "classification"
    labels: list[str] | None = None
    class_weights: Literal["balanced"] | list[float] | None = None

    @field_validator("labels", mode="before")
    @classmethod
    def _names_are_text(cls, labels: Any) -> Any:
        """Convert numeric names to text, since the override ``task.labels=[0,1]`` is parsed as numbers."""
        if not isinstance(labels, list | tuple):
            return labels
        return [str(label) if isinstance(label, int | float) else label for label in labels]

    @model_validator(mode="after")
    def _labels_are_sound(self) -> Self:
        if self.labels is None:
            return self
        shown = as_list(self.labels)
        if len(self.labels) < 2:
            raise UserError("task.labels", shown, "a classification task needs two classes or more")
        if len({normal(label) for label in self.labels}) < len(self.labels):
            raise UserError("task.labels", shown, "two names differ only in case, spaces, '_' and '-'")
        if isinstance(self.class_weights, list) and (
            len(self.class_weights) != len(self.labels) or min(self.class_weights) <= 0
        ):
            problem = f"must be balanced, or {len(self.labels)} numbers greater than 0"
            raise UserError("task.class_weights", self.class_weights, problem, f"In the order {shown}.")
        for metric in self.metrics:
            if metric in ("f1", "accuracy_f1") and len(self.labels) != 2:
                problem = f"is defined for two classes, but the task has {len(self.labels)}"
                raise UserError("task.metrics", metric, problem, "task.metrics=[accuracy]")
        return self

    def resolved(self) -> Self:
        found = super().resolved()
        if found.labels is None:
            found = type(self)(**found.model_dump() | {"labels": found._names_in(read(found, found.train))})
        if found.class_weights == "balanced":
            found = type(self)(**found.model_dump() | {"class_weights": found._balanced()})
        return found

    def _balanced(self) -> list[float]:
        """Return the weights n / (C * n_c) of C classes, where n_c of n training examples belong to class c."""
        assert self.labels is not None
        counts = np.bincount(self.examples(self.train).labels, minlength=len(self.labels))  # type: ignore[arg-type]
        if not counts.all():
            absent = self.labels[int(counts.argmin())]
            raise UserError("task.class_weights", "balanced", f"no training example has the label {absent}")
        return [round(float(weight), 6) for weight in counts.sum() / (len(counts) * counts)]

    @property
    def head(self) -> Head:
        assert self.labels is not None, "resolved"
        names = tuple(self.labels)
        auto, problem = "AutoModelForSequenceClassification", "single_label_classification"
        return Head(auto, names, len(names), problem, self.name)  # type: ignore[arg-type]

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | self.changed("class_weights")

    @property
    def outputs(self) -> "Outputs":
        from distill_runner.methods.outputs import Classes

        return Classes(None if isinstance(self.class_weights, str) else self.class_weights)

    def as_lines(self, outputs: np.ndarray, names: bool = True) -> list[str]:
        assert self.labels is not None
        return [self.labels[number] if names else str(number) for number in outputs.argmax(axis=1)]

    def class_probabilities(self, outputs: np.ndarray) -> dict[str, np.ndarray]:
        from scipy.special import softmax

        assert self.labels is not None
        return dict(zip(self.labels, softmax(outputs.astype(np.float64), axis=1).T, strict=True))

    def verdicts(self, outputs: np.ndarray, split: "Split") -> Verdicts:
        assert self.labels is not None
        names, labels, predicted = self.labels, np.asarray(split.labels), outputs.argmax(axis=1)
        probabilities_NC = np.stack([*self.class_probabilities(outputs).values()], axis=1)
        return Verdicts(
            right=predicted == labels,
            of_truth=probabilities_NC[np.arange(len(labels)), labels],
            said=lambda number: f"{names[predicted[number]]} ({probabilities_NC[number].max():.4f})",
            truth=lambda number: names[labels[number]],
        )

    def as_logits(self, probabilities_NC: np.ndarray, split: str) -> np.ndarray:
        """Return the logarithms of the probabilities as logits; probabilities below 1e-12 are raised to 1e-12."""
        shown, totals = as_list(self.given_columns), probabilities_NC.sum(1)
        wrong = (probabilities_NC < 0).any(1) | (np.abs(totals - 1) > TOLERANCE)
        if len(rows := np.flatnonzero(wrong)):
            problem = f"row {rows[0]} of split '{split}' has {probabilities_NC[rows[0]].tolist()}, not a distribution"
            raise UserError("task.probabilities", shown, problem, "They must sum to 1; for raw outputs: task.logits.")
        return np.log(np.maximum(probabilities_NC, SMALLEST))

    def is_unlabelled(self, value: Any) -> bool:
        """Return whether ``value`` is empty, or the -1 of hub data sets, unless -1 is the name of a class."""
        return is_empty(value) or (value == -1 and "-1" not in (self.labels or []))

    def _names_in(self, table: SplitTable) -> list[str]:
        """Return the class names of the data: the names stored with the data, else the distinct labels, sorted.

        Raises:
            UserError: the labels are fractions, as in regression, or are not single values.
        """
        if table.class_names is not None:
            return table.class_names
        self._require_names(table.columns[self.label], self.train)
        values = {whole(value) for value in table.columns[self.label] if not self.is_unlabelled(value)}
        if any(isinstance(value, float) for value in values):
            problem = "the labels are fractions, so there are no classes to infer"
            raise UserError("task.label", self.label, problem, "task.kind=regression task.metrics=[pearson]")
        numeric = all(isinstance(value, int) for value in values)
        return [str(value) for value in sorted(values, key=None if numeric else str)]

    def _require_names(self, values: list[Any], split: str) -> None:
        """Raise a UserError if a label is a list or a mapping instead of a single value."""
        if found := next((value for value in values if isinstance(value, list | dict)), None):
            problem = f"split '{split}' has a label that is a {type(found).__name__}: {str(found)[:40]}"
            raise UserError("task.label", self.label, problem, "Choose a column with one class for each example.")

    def encode(self, values: list[Any], table: SplitTable, split: str) -> np.ndarray:
        """Return class indices, int64 (N,). Names are matched, so the data may number the classes in another order."""
        self._require_names(values, split)
        labels = self.labels or []
        index = {normal(name): i for i, name in enumerate(labels)}
        codes: dict[Any, int] = {}
        for value in dict.fromkeys(values):
            name = _name(value, table.class_names, labels)
            if name is None or normal(name) not in index:
                problem = f"split '{split}' has the label {name or value!r}, which is not among these labels"
                seen = table.class_names or sorted({str(whole(other)) for other in values})
                remedy = shlex.quote(f"task.labels={as_list(seen)}") if len(seen) <= 20 else ""
                raise UserError("task.labels", as_list(labels), problem, remedy)
            codes[value] = index[normal(name)]
        return np.fromiter((codes[value] for value in values), dtype=np.int64, count=len(values))


def _name(value: Any, class_names: list[str] | None, labels: list[str]) -> str | None:
    """Return the class name of a label value; None if a number is out of range.

    A number n is an index, counted from 0, into the class names of the data, or else into the names of the task. It
    means "n" if the data have no class names, and a name is a number (stars 1 to 5) or all are "true" and "false".
    """
    value = whole(value)
    if not isinstance(value, int):
        return str(value)
    numbers = any(re.fullmatch(r"-?\d+", name) for name in labels)
    if class_names is None and (numbers or {name.casefold() for name in labels} <= {"true", "false"}):
        return str(value)
    names = labels if class_names is None else class_names
    return names[value] if 0 <= value < len(names) else None
