"""Classification tasks, and what they share with multi-label tasks: outputs that are named classes."""

import re
import shlex
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import field_validator, model_validator

from distill_runner.common.errors import UserError, format_list, quantity
from distill_runner.datasets.metrics import CLASSIFICATION_METRICS
from distill_runner.datasets.readers.dataset import BY_CLASS, parse_split
from distill_runner.datasets.readers.tables import SplitTable, listed_names, read_table
from distill_runner.models.config import Head, normalized_label
from distill_runner.tasks.columns import MIN_ROWS, is_empty
from distill_runner.tasks.score_columns import class_of_column, names_of_columns
from distill_runner.tasks.scores import EXACT, MAX_ROUNDING, ROUNDING
from distill_runner.tasks.task import ExamplePredictions, names_as_text
from distill_runner.tasks.text import TextTask, as_int

if TYPE_CHECKING:
    from distill_runner.datasets.splits import Split
    from distill_runner.methods.outputs import Outputs

MIN_PROBABILITY = 1e-12
"""Lower bound of a probability before its logarithm."""
MAX_CLASSES = 20
"""Number of classes up to which a message lists all of them."""
TRUTH = {"true", "false"}
"""Names of two classes that flags are read as."""
MISSING = ("-", "?", "nan", "n/a", "#n/a", "<na>")
"""Marks of a missing label, in lower case: of SNLI, of UCI's files, of pandas and of spreadsheets. NA and none may be
classes: they are counted among them where the data are listed."""
SNLI_LABEL = "gold_label"
"""Column of the labels in SNLI and MultiNLI as published, where - means that the annotators did not agree."""


class ClassesTask(TextTask):
    """Base class of the tasks whose outputs are named classes, of which an example has one or several.

    Attributes:
        labels: class names in the order of the model's outputs; null reads them from the data.
    """

    has_classes = True
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    problem_type: ClassVar[Literal["single_label_classification", "multi_label_classification"]]

    labels: list[str] | None = None

    _names_are_text = field_validator("labels", mode="before")(names_as_text)

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Self:
        if self.labels is None:
            return self
        names = format_list(self.labels)
        if re.search("[\ud800-\udfff]", names):
            problem = "a name holds half of a surrogate pair, which is no character"
            raise UserError("task.labels", names, problem, "Repair the labels in the data: their text was cut.")
        if len(self.labels) < 2:
            raise UserError("task.labels", names, f"a task of type {self.type} needs two classes or more")
        if len({normalized_label(label) for label in self.labels}) < len(self.labels):
            raise UserError("task.labels", names, "two names differ only in case, spaces, '_' and '-'")
        return self

    @property
    def names(self) -> list[str]:
        """The class names of the resolved task."""
        assert self.labels is not None, "resolved"
        return self.labels

    def resolved(self) -> Self:
        task = super().resolved()
        return task if task.labels is not None else type(self)(**task.model_dump() | {"labels": task.read_names()})

    def read_names(self) -> list[str]:
        """Return the class names of the data: the names stored with the data, else the distinct labels, sorted.

        If the validation splits are parts of the same split as the training split, all of its rows count.
        """
        if not self.has_train_labels or self.gold == "none":
            if names := self.names_of_scores():
                return names
            if self.gold == "none":
                problem = "cannot be read from the names of the columns of scores"
                raise UserError("task.labels", None, problem, "Name the classes, such as task.labels=[no,yes].")
        splits = {parse_split(split)[0] for split in (self.train, *self.validation.values())}
        table = read_table(self, splits.pop() if len(splits) == 1 else self.labeled_split)
        if table.class_names is not None:
            return table.class_names
        self.require_names(names := self.distinct_names(table))
        return names

    def require_names(self, names: Sequence[str]) -> None:
        """Check that the validation splits name the classes too, if their names are inferred from the training split.

        Raises:
            UserError: they do not.
        """

    def _names_of_columns(self) -> list[str]:
        """Return the gold labels that end the names of the columns, or else the ends in which these names differ."""
        columns = self.prediction_columns
        if self.gold == "evaluation":
            with suppress(UserError):  # of the gold labels, which is raised when they are read as such
                table = read_table(self, self.labeled_split)
                gold = table.class_names if table.class_names is not None else self.distinct_names(table)
                classes = [class_of_column(column, gold) for column in columns]
                if None not in classes and len(set(classes)) == len(classes) == len(gold):
                    return [gold[number] for number in classes if number is not None]
        return names_of_columns(columns)

    def names_of_scores(self) -> list[str]:
        """Return the class names that the columns of scores have, or that their answers name; empty without any."""
        columns = self.prediction_columns
        if not self.answers:
            return self._names_of_columns() if len(columns) > 1 else []
        if self.gold != "none":
            return []  # gold labels of an evaluation split name the classes; answers may lack some
        table, skipped = self.score_table(self.train), {word.casefold() for word in self.no_answer or ()}
        names = set[str]()
        for column in columns:
            task = self.model_copy(update={"label": column})
            values = [value for value in table.columns[column] if not task.is_no_answer(value, skipped)]
            names |= set(task.distinct_names(SplitTable({column: values}, None, table.untyped)) if values else ())
        return sorted(names)

    @abstractmethod
    def distinct_names(self, table: SplitTable) -> list[str]:
        """Return the distinct labels of the training split, sorted."""

    @property
    def head(self) -> Head:
        return Head(self.auto_class, tuple(self.names), len(self.names), self.problem_type, self.name)

    @abstractmethod
    def probabilities_of(self, outputs: np.ndarray) -> np.ndarray:
        """Return the probability of each class, float64 (N, C)."""

    def class_probabilities(self, outputs: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(self.names, self.probabilities_of(outputs).T, strict=True))


class ClassificationTask(ClassesTask):
    """Classification task: exactly one of several classes for each example.

    Attributes:
        labels: class names in the order of the model's outputs; null reads them from the data.
        class_weights: weight of the examples of each class in the loss on gold labels, in the order of ``labels``.
            ``balanced`` gives every class the same total weight, with a mean of 1 over the training examples.
    """

    served_reply = "dict(zip(labels, numpy.exp(row - numpy.logaddexp.reduce(row)).tolist()))"
    metric_functions = CLASSIFICATION_METRICS
    output_kind = "classes"
    problem_type = "single_label_classification"
    slice_order = BY_CLASS

    type: Literal["classification"] = "classification"
    class_weights: Literal["balanced"] | list[float] | None = None

    @model_validator(mode="after")
    def _fits_its_labels(self) -> Self:
        if self.labels is None:
            return self
        if isinstance(self.class_weights, list) and (
            len(self.class_weights) != len(self.labels) or min(self.class_weights) <= 0
        ):
            problem = f"must be balanced, or {len(self.labels)} numbers greater than 0"
            order = format_list(self.labels)
            raise UserError("task.class_weights", self.class_weights, problem, f"In the order {order}.")
        for metric in self.metrics:
            if metric in ("f1", "accuracy_f1") and len(self.labels) != 2:
                problem = f"is defined for two classes, but the task has {len(self.labels)}"
                raise UserError("task.metrics", metric, problem, "task.metrics=[accuracy]")
        return self

    def resolved(self) -> Self:
        task = super().resolved()
        if task.class_weights == "balanced":
            task = type(self)(**task.model_dump() | {"class_weights": task._balanced_weights()})
        return task

    def _balanced_weights(self) -> list[float]:
        """Return the weights n / (C * n_c) of C classes, where n_c of n training examples belong to class c."""
        if not self.has_train_labels:
            problem = "needs the gold labels of the training examples, which have none (task.gold=evaluation)"
            raise UserError("task.class_weights", "balanced", problem, "Leave it out: no loss term reads it.")
        counts = np.bincount(self.examples(self.train).labels, minlength=len(self.names))  # type: ignore[arg-type]
        if not counts.all():
            absent = self.names[int(counts.argmin())]
            raise UserError("task.class_weights", "balanced", f"no training example has the label {absent}")
        return [round(float(weight), 6) for weight in counts.sum() / (len(counts) * counts)]

    @property
    def outputs(self) -> "Outputs":
        from distill_runner.methods.outputs import Classes

        return Classes(None if isinstance(self.class_weights, str) else self.class_weights)

    def prediction_texts(self, outputs: np.ndarray, names: bool = True) -> list[str]:
        return [self.names[number] if names else str(number) for number in outputs.argmax(axis=1)]

    def probabilities_of(self, outputs: np.ndarray) -> np.ndarray:
        from scipy.special import softmax

        probabilities_NC: np.ndarray = softmax(outputs.astype(np.float64), axis=1)
        return probabilities_NC

    def example_predictions(self, outputs: np.ndarray, split: "Split") -> ExamplePredictions:
        names, labels, predicted = self.names, np.asarray(split.labels), outputs.argmax(axis=1)
        probabilities_NC = self.probabilities_of(outputs)
        return ExamplePredictions(
            correct=predicted == labels,
            label_probability=probabilities_NC[np.arange(len(labels)), labels],
            prediction_text=lambda number: f"{names[predicted[number]]} ({probabilities_NC[number].max():.4f})",
            label_text=lambda number: names[labels[number]],
        )

    def prediction_warnings(self, outputs: np.ndarray, split: "Split") -> list[str]:
        predicted = np.unique(outputs.argmax(axis=1))
        if len(predicted) > 1 or len(np.unique(np.asarray(split.labels))) < 2:
            return []
        return [f"the student predicts {self.names[predicted[0]]} for all {len(outputs):,} examples"]

    def normalized(self, probabilities_NC: np.ndarray) -> tuple[np.ndarray, list[str]]:
        """Return probabilities that sum to 1: percentages are divided by 100, and errors of rounding removed."""
        remarks = []
        sums = probabilities_NC.sum(1, keepdims=True)
        if probabilities_NC.max(initial=0) > 1 + EXACT and (np.abs(sums / 100 - 1) <= self._sum_tolerance).all():
            probabilities_NC, sums = probabilities_NC / 100, sums / 100
            remarks.append("percentages, divided by 100")
        error = np.abs(sums - 1)
        is_rounded = (error > EXACT) & (error <= self._sum_tolerance)
        if is_rounded.any():
            probabilities_NC = np.where(is_rounded, probabilities_NC / sums, probabilities_NC)
            low, high = sums[is_rounded].min(), sums[is_rounded].max()
            remarks.append(
                f"{quantity(int(is_rounded.sum()), 'row', ',')} with sums from {low:.4g} to {high:.4g} normalized"
            )
        return probabilities_NC, remarks

    @property
    def _sum_tolerance(self) -> float:
        return min(MAX_ROUNDING, ROUNDING * len(self.names)) + EXACT

    def to_logits(self, probabilities_NC: np.ndarray, split: str, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the logarithms of the probabilities as logits; probabilities below 1e-12 are raised to 1e-12."""
        invalid = (probabilities_NC < 0).any(1) | (np.abs(probabilities_NC.sum(1) - 1) > 2 * EXACT)
        if len(places := np.flatnonzero(invalid)):
            values, row = probabilities_NC[places[0]].tolist(), places[0] if rows is None else rows[places[0]]
            problem = f"row {row} of split '{split}' has {values}, not a distribution"
            remedy = f"They must sum to 1 (within {self._sum_tolerance:.2g}); for raw outputs: task.logits."
            if self._column_class is not None:
                problem = f"row {row} of split '{split}' has {values[self._column_class]}, not from 0 to 1"
                remedy = "Raw outputs: use task.logits. Percentages: divide them by 100."
            raise UserError(self.prediction_key, format_list(self.prediction_columns), problem, remedy)
        return np.log(np.maximum(probabilities_NC, MIN_PROBABILITY))

    @property
    def _column_class(self) -> int | None:
        """Class of the only column of scores of a task with two classes; None if there are more columns."""
        if self.answers or len(self.prediction_columns) != 1 or len(self.names) != 2:
            return None
        number = class_of_column(self.prediction_columns[0], self.names)
        return 1 if number is None else number

    def ordered_outputs(self, values: np.ndarray, key: str) -> tuple[np.ndarray, list[str]]:
        """Return the values of columns as those of the classes; a single column is that of a class of two."""
        number = self._column_class
        if number is None:
            return super().ordered_outputs(values, key)
        other = 1 - values if self.probabilities else np.zeros_like(values)
        pair = [other, values] if number else [values, other]
        return np.concatenate(pair, axis=1), [f"{self.prediction_columns[0]} is that of {self.names[number]}"]

    def label_indicators(self, labels: np.ndarray) -> np.ndarray:
        return np.eye(len(self.names))[labels]

    def confidence(self, outputs: np.ndarray) -> np.ndarray:
        confidence: np.ndarray = self.probabilities_of(outputs).max(axis=1)
        return confidence

    def favored_labels(self, outputs: np.ndarray) -> np.ndarray:
        labels: np.ndarray = outputs.argmax(axis=1)
        return labels

    def is_no_label(self, value: Any, has_names: bool) -> bool:
        """Return whether ``value`` is the -1 of a dataset that names its classes, or the - of SNLI's gold labels.

        Anywhere else such a value could be a class, and its rows are refused.
        """
        is_mark = value == -1 if has_names else value == "-" and self.label == SNLI_LABEL
        return is_mark and not isinstance(value, bool) and str(value) not in (self.labels or [])

    def is_unlabeled(self, value: Any) -> bool:
        """Return whether ``value`` is empty, the -1 of hub datasets, or a mark of ``MISSING`` that is no class."""
        if is_empty(value) or (isinstance(value, str) and not value.strip()):
            return True
        is_mark = value == -1 or (isinstance(value, str) and value.strip().casefold() in MISSING)
        return is_mark and str(value) not in (self.labels or [])

    def distinct_names(self, table: SplitTable) -> list[str]:
        """Return the distinct labels of the training split, sorted.

        Raises:
            UserError: the labels are fractions, as in regression, or are not single values.
        """
        rows = self.label_values(table)
        self._require_single_values(rows, self.train)
        values = {as_int(value) for value in rows if not self.is_unlabeled(value)}
        signs = {value for value in rows if isinstance(value, str) and value in ("-", "?")}
        if signs and values and not any(re.search(r"\w", str(value)) for value in values):
            values |= signs  # classes, such as + and -
        if any(isinstance(value, float) for value in values):
            problem = "the labels are fractions, so there are no classes to infer"
            raise UserError("task.label", self.label, problem, "task.type=regression task.metrics=[pearson]")
        if len(values) > max(MAX_CLASSES, len(rows) / 2) or len(values) > max(MIN_ROWS, 0.9 * len(rows)):
            problem = f"has {len(values):,} different values in {quantity(len(rows), 'row', ',')}: is this an id?"
            remedy = "Name the column of the classes, or the classes in task.labels."
            raise UserError("task.label", self.label, problem, remedy)
        numeric = all(isinstance(value, int) for value in values)
        names = [str(value) for value in sorted(values, key=None if numeric else str)]
        return list(dict.fromkeys(names))  # JSON may have both 28 and "28"

    def require_names(self, names: Sequence[str]) -> None:
        if any(re.fullmatch(r"-?\d+", name) for name in names) or {name.casefold() for name in names} <= TRUTH:
            return
        for split in self.validation.values():
            if parse_split(split)[0] == parse_split(self.labeled_split)[0]:
                continue
            try:
                table = read_table(self, split)
            except UserError:  # raised again when the split is read
                continue
            numbers = (value for value in self.label_values(table) if not self.is_unlabeled(value))
            value = next((value for value in numbers if isinstance(as_int(value), int)), None)
            if value is not None and table.class_names is None:
                problem = f"split '{split}' has numbers such as {value}, and split '{self.labeled_split}' names"
                remedy = (
                    f"Name the classes in the order of the numbers, such as task.labels={format_list(list(names))}."
                )
                raise UserError("task.labels", None, problem, remedy)

    def _require_single_values(self, values: list[Any], split: str) -> None:
        """Raise a UserError if a label is a list or a mapping instead of a single value."""
        nested = next((value for value in values if isinstance(value, list | dict)), None)
        if nested is not None:
            problem = f"split '{split}' has a label that is a {type(nested).__name__}: {str(nested)[:40]}"
            raise UserError("task.label", self.label, problem, "Choose a column with one class for each example.")

    def encode(self, values: list[Any], table: SplitTable, split: str) -> np.ndarray:
        """Return class indices, int64 (N,). Names are matched, so the data may number the classes in another order."""
        self._require_single_values(values, split)
        labels = self.labels or []
        index = {normalized_label(name): i for i, name in enumerate(labels)}
        codes: dict[Any, int] = {}
        for value in dict.fromkeys(values):
            name = _class_name(value, table.class_names, labels)
            if name is None or normalized_label(name) not in index:
                raise self._unknown_label(value, name, values, table, split)
            codes[value] = index[normalized_label(name)]
        return np.array([codes[value] for value in values], dtype=np.int64)

    def label_values(self, table: SplitTable) -> list[Any]:
        values = table.columns.get(self.label, [])
        names = set(map(normalized_label, self.labels or ()))
        if table.untyped and all(normalized_label(value) in names for value in values):
            return values  # 007 and 3.10 are names if they are listed as such
        return super().label_values(table)

    def _unknown_label(
        self, value: Any, name: str | None, values: list[Any], table: SplitTable, split: str
    ) -> UserError:
        """Return the error for a label that is not among the labels; the remedy adds those of the split to them."""
        labels = self.labels or []
        problem = f"split '{split}' has the label {name or value!r}, which is not among these labels"
        in_data = table.class_names or sorted({str(as_int(other)) for other in values})
        own, others = set(map(normalized_label, labels)), set(map(normalized_label, in_data))
        new = [other for other in in_data if normalized_label(other) not in own]
        names = in_data if own.isdisjoint(others) else [*labels, *new]
        if len(in_data) > max(MAX_CLASSES, len(values) / 2):
            remedy = f"The column {self.label} has {len(in_data):,} different values: is this an id?"
        elif len(names) <= MAX_CLASSES:
            remedy = shlex.quote(f"task.labels={format_list(names)}")
            if own.isdisjoint(others):
                remedy = f"Do all splits have the same labels? {remedy}"
        else:
            remedy = "Name all labels in task.labels, or remove these rows."
        label_list = format_list(labels) if len(labels) <= MAX_CLASSES else f"[{listed_names(labels)}]"
        return UserError("task.labels", label_list, problem, remedy)


def _class_name(value: Any, class_names: list[str] | None, labels: list[str]) -> str | None:
    """Return the class name of a label value; None if a number is out of range.

    A number n is an index, counted from 0, into the class names of the data, or else into the names of the task. It
    means "n" if the data have no class names, and a name is a number (stars 1 to 5) or all are "true" and "false".
    """
    value = as_int(value)
    if not isinstance(value, int):
        return str(value)
    numbers = any(re.fullmatch(r"-?\d+", name) for name in labels)
    if class_names is None and (numbers or {name.casefold() for name in labels} <= TRUTH):
        return str(value)
    names = labels if class_names is None else class_names
    return names[value] if 0 <= value < len(names) else None
