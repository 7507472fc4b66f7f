"""Classification tasks: exactly one of several classes for each example."""

import re
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from pydantic import model_validator

from distill_runner.common.errors import UserError, format_typed, listed_names, override, quantity
from distill_runner.datasets.metrics import CLASSIFICATION_METRICS
from distill_runner.datasets.readers.content import SplitTable, read_table
from distill_runner.datasets.readers.dataset import BY_CLASS, parse_split
from distill_runner.models.config import normalized_label
from distill_runner.tasks.class_names import balanced_weights, class_scores, weights_in_losses
from distill_runner.tasks.columns import MIN_ROWS, as_int, is_blank, typed_values
from distill_runner.tasks.decoding import OneClass
from distill_runner.tasks.text import TextTask

if TYPE_CHECKING:
    from distill_runner.datasets.splits import Split
    from distill_runner.methods.outputs import Outputs

MAX_CLASSES = 20
"""Number of classes up to which a message lists all of them."""
TRUTH = {"true", "false"}
"""Names of two classes that flags are read as."""
MISSING = ("-", "?", "nan", "n/a", "#n/a", "<na>")
"""Marks of a missing label, in lower case: of SNLI, of UCI's files, of pandas and of spreadsheets. NA and none may be
classes: they are counted among them where the data are listed."""
SNLI_LABEL = "gold_label"
"""Column of the labels in SNLI and MultiNLI as published, where - means that the annotators did not agree."""


class ClassificationTask(TextTask):
    """Classification task: exactly one of several classes for each example.

    Attributes:
        class_weights: weight of the examples of each class in the loss on gold labels, in the order of ``labels``.
            ``balanced`` gives every class the same total weight, with a mean of 1 over the training examples.
    """

    served_reply = "dict(zip(labels, numpy.exp(row - numpy.logaddexp.reduce(row)).tolist()))"
    has_classes = True
    decoding = OneClass()
    metric_names = CLASSIFICATION_METRICS
    output_kind = "classes"
    problem_type = "single_label_classification"
    slice_order = BY_CLASS

    type: Literal["classification"] = "classification"
    class_weights: Literal["balanced"] | list[float] | None = None

    @model_validator(mode="after")
    def _metrics_fit_the_classes(self) -> Self:
        for metric in self.metrics:
            if metric in ("f1", "accuracy_f1") and self.labels is not None and len(self.labels) != 2:
                problem = f"is defined for two classes, but the task has {len(self.labels)}"
                raise UserError("task.metrics", metric, problem, override("task.metrics", ["accuracy"]))
        return self

    def resolved(self) -> Self:
        task = super().resolved()
        if task.class_weights != "balanced":
            return task
        if not task.has_train_labels:
            problem = "needs the gold labels of the training examples, which have none (task.gold=evaluation)"
            raise UserError("task.class_weights", "balanced", problem, "Leave it out: no loss term reads it.")
        weights = balanced_weights(np.asarray(task.examples(task.train).labels), task.names, "example")
        return type(task)(**task.model_dump() | {"class_weights": weights})

    @property
    def outputs(self) -> "Outputs":
        from distill_runner.methods.outputs import Classes

        return Classes(weights_in_losses(self.class_weights))

    def prediction_warnings(self, outputs: np.ndarray, split: "Split") -> list[str]:
        sides = outputs.argmax(axis=1), np.asarray(split.labels)
        predicted, actual = (np.bincount(side, minlength=len(self.names)) for side in sides)
        if len(labels := actual.nonzero()[0]) > 1 and len(only := predicted.nonzero()[0]) == 1:
            return [f"the student predicts {self.names[only[0]]} for all {len(outputs):,} examples"]
        missing = labels[predicted[labels] == 0]
        never = [f"{self.names[label]} ({quantity(actual[label], 'example', ',')})" for label in missing]
        rest = f" and {len(never) - MAX_CLASSES:,} more" if len(never) > MAX_CLASSES else ""
        return [f"the student never predicts {', '.join(never[:MAX_CLASSES])}{rest}"] if never else []

    def scores_by_class(self, outputs: np.ndarray, split: "Split") -> dict[str, dict[str, float]]:
        return class_scores(self.names, np.asarray(split.labels), outputs.argmax(axis=1))

    # Labels

    def is_no_label(self, value: Any, has_names: bool) -> bool:
        """Return whether ``value`` is the -1 of a dataset that names its classes, or the - of SNLI's gold labels.

        Anywhere else such a value could be a class, and its rows are refused.
        """
        is_mark = value == -1 if has_names else value == "-" and self.label == SNLI_LABEL
        return is_mark and not isinstance(value, bool) and str(value) not in self.names

    def is_unlabeled(self, value: Any) -> bool:
        """Return whether ``value`` is empty, the -1 of hub datasets, or a mark of ``MISSING`` that is no class."""
        is_mark = value == -1 or (isinstance(value, str) and value.strip().casefold() in MISSING)
        return is_blank(value) or (is_mark and str(value) not in self.names)

    def label_values(self, table: SplitTable) -> list[Any]:
        values = table.columns.get(self.label, [])
        nested = next((value for value in values if isinstance(value, list | dict | bytes)), None)
        if nested is not None:
            remedy = "Choose a column with one class for each example, or " + override("task.type", "multilabel")
            raise UserError("task.label", self.label, f"holds a {type(nested).__name__}: {str(nested)[:40]}", remedy)
        names, own = set(map(normalized_label, self.names)), set(table.class_names or ())
        # Of the stars 1 to 5, numbered from 0, a text 1 could be two: it is a number, as load_dataset reads it.
        are_numbered = own & set(map(str, range(len(own)))) and all(re.fullmatch(r"-?\d+", name) for name in own)
        if table.untyped and not are_numbered and all(normalized_label(value) in names for value in values):
            return values  # 007 and 3.10 are names if they are listed as such
        return super().label_values(table)

    def distinct_names(self, table: SplitTable) -> list[str]:
        """Return the distinct labels of the training split, sorted.

        Raises:
            UserError: the labels are fractions, as in regression, or are not single values; or they are names, and
                the labels of a validation split are numbers.
        """
        rows = self.label_values(table)
        values = {as_int(value) for value in rows if not self.is_unlabeled(value)}
        if len(values) == 1 and any(value == -1 for value in rows):
            problem = f"has {values.copy().pop()} and -1, which is taken as 'no label' unless it is named"
            remedy: str = "If -1 is a class: " + override("task.labels", [-1, *values])
            raise UserError("task.label", self.label, problem, remedy)
        signs = {value for value in rows if isinstance(value, str) and value in ("-", "?")}
        if signs and values and not any(re.search(r"\w", str(value)) for value in values):
            values |= signs  # classes, such as + and -
        if any(isinstance(value, float) for value in values):
            problem = "the labels are fractions, so there are no classes to infer"
            remedy = override("task.type", "regression", "task.metrics", ["pearson"])
            raise UserError("task.label", self.label, problem, remedy)
        if len(values) > max(MAX_CLASSES, len(rows) / 2) or len(values) > max(MIN_ROWS, 0.9 * len(rows)):
            problem = f"has {len(values):,} different values in {quantity(len(rows), 'row', ',')}: is this an id?"
            remedy = "Name the column of the classes, or the classes in task.labels."
            raise UserError("task.label", self.label, problem, remedy)
        numeric = all(isinstance(value, int) for value in values)
        names = list(dict.fromkeys(map(str, sorted(values, key=None if numeric else str))))  # JSON may have 28 and "28"
        if not self._are_numbers(names):
            self._require_no_numbers(names, table)
        return names

    def _are_numbers(self, names: list[str]) -> bool:
        """Return whether a number in the data is the name of a class, and not its index."""
        return any(re.fullmatch(r"-?\d+", name) for name in names) or {*map(str.casefold, names)} <= TRUTH

    def _require_no_numbers(self, names: list[str], table: SplitTable) -> None:
        """Raise a UserError if a split has numbers as labels, which would be taken for indices into sorted names.

        Args:
            table: the split that has the names.
        """
        for split in (self.labeled_split, self.train, *self.validation.values()):
            other = table if split == self.labeled_split else SplitTable({}, None)
            if parse_split(split)[0] != parse_split(self.labeled_split)[0]:
                with suppress(UserError):  # raised again when the split is read
                    other = read_table(self, split)
            columns = self.label_values(other), *(typed_values(other, name) for name in self.answers or ())
            number = next((value for value in map(as_int, chain(*columns)) if type(value) is int), -1)
            if number != -1 and other.class_names is None:
                problem = f"split '{split}' has numbers such as {number}, and split '{self.labeled_split}' names"
                remedy = "Name the classes in the order of the numbers, such as " + override("task.labels", names)
                raise UserError("task.labels", None, problem, remedy)

    def encode(self, values: list[Any], table: SplitTable, split: str) -> np.ndarray:
        """Return class indices, int64 (N,). Names are matched, so the data may number the classes in another order.

        A number n is an index, counted from 0, into the class names of the data, or else into the names of the task. It
        means "n" if the data have no class names, and a name is a number (stars 1 to 5) or all are "true" and "false".
        """
        labels, in_data = self.names, table.class_names
        index = {normalized_label(name): number for number, name in enumerate(labels)}
        are_numbers = self._are_numbers(labels)
        codes: dict[Any, int] = {}
        for value in dict.fromkeys(values):
            number = as_int(value)
            name = str(number)
            if in_data is not None and isinstance(number, int) and not 0 <= number < len(in_data):
                problem = f"split '{split}' has the number {number}, and its data name {len(in_data)} classes, from 0"
                raise UserError("task.labels", format_typed(labels), problem, "Correct these names, or the labels.")
            if isinstance(number, int) and not (in_data is None and (are_numbers or isinstance(number, bool))):
                name = dict(enumerate(labels if in_data is None else in_data)).get(number, f"number {number}")
            if normalized_label(name) not in index:
                own = [*dict.fromkeys([*in_data, name])] if in_data else sorted({str(as_int(x)) for x in values})
                raise self._unknown_label(name, own, split)
            codes[value] = index[normalized_label(name)]
        return np.array([codes[value] for value in values], dtype=np.int64)

    def _unknown_label(self, name: str, in_data: list[str], split: str) -> UserError:
        """Return the error for a label that is not among the task's; the remedy adds those of the split to them.

        Args:
            in_data: all labels of the split, and the one that is not among them.
        """
        problem = f"split '{split}' has the label {name!r}, which is not among these labels"
        labels, columns = self.names, self.probabilities or self.logits or []  # of scores, one for each class
        own = set(map(normalized_label, labels))
        new = [other for other in in_data if normalized_label(other) not in own]
        names = in_data if len(new) == len(in_data) else [*labels, *new]
        remedy: str = override("task.labels", names)
        if len(names) > MAX_CLASSES:
            remedy = f"Is the column {self.label} an id? It has {len(in_data):,} different values."
            remedy += " Or name all in task.labels."
        elif len(columns) == len(labels):
            remedy = f"The data have {format_typed(in_data)}; in the order of the columns: "
            remedy += override("task.labels", [f"<that of {column}>" for column in columns])
        elif names is in_data:
            remedy = "Do all splits have the same labels? " + remedy
        label_list = format_typed(labels) if len(labels) <= MAX_CLASSES else f"[{listed_names(labels)}]"
        return UserError("task.labels", label_list, problem, remedy)
