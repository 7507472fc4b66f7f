"""Multi-label classification tasks: any number of labels, including none, for each example."""

from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from pydantic import model_validator

from distill_runner.common.errors import UserError, format_list
from distill_runner.datasets.metrics import MULTILABEL_METRICS
from distill_runner.datasets.readers.tables import SplitTable
from distill_runner.models.config import normalized_label
from distill_runner.tasks.classification import MIN_PROBABILITY, ClassesTask
from distill_runner.tasks.task import ExamplePredictions
from distill_runner.tasks.text import as_int, is_empty

if TYPE_CHECKING:
    from distill_runner.datasets.splits import Split
    from distill_runner.methods.outputs import Outputs

NO_LABELS = "no label"
YES, NO = ("1", "true", "yes"), ("0", "false", "no")
"""Values for yes and no in a column of a single label, in any letter case."""
SEPARATORS = {"comma": ",", "semicolon": ";", "bar": "|", "blank": None}


class MultiLabelTask(ClassesTask):
    """Multi-label classification task: any number of labels, including none, for each example.

    Attributes:
        label: column whose values are lists of labels, or texts of labels divided by ``separator``; or several columns
            of 0 and 1, one for each label.
        separator: what divides the labels in a text; ``blank`` is any whitespace. null if the values are lists, or if
            there are several columns.
        labels: label names in the order of the model's outputs; null reads them from the data.
    """

    metric_functions = MULTILABEL_METRICS
    problem_type = "multi_label_classification"
    example_fields = ClassesTask.example_fields | {"separator"}

    type: Literal["multilabel"]
    label: str | list[str] = "labels"  # type: ignore[assignment]
    separator: Literal["comma", "semicolon", "bar", "blank"] | None = None

    @model_validator(mode="after")
    def _columns_match_the_names(self) -> Self:
        if isinstance(self.label, list) and self.labels and len(self.labels) != len(self.label):
            problem = f"names {len(self.labels)} labels, but task.label names {len(self.label)} columns"
            remedy = "Leave task.labels out: the columns name them."
            raise UserError("task.labels", format_list(self.labels), problem, remedy)
        return self

    @property
    def label_columns(self) -> list[str]:
        return [self.label] if isinstance(self.label, str) else self.label

    def read_names(self) -> list[str]:
        return self.label if isinstance(self.label, list) else super().read_names()

    def distinct_names(self, table: SplitTable) -> list[str]:
        values = [value for value in self.label_values(table) if not self.is_unlabeled(value)]
        names = {name for value in values for name in self._names(value, table, self.train)}
        return sorted(names, key=(lambda name: f"{int(name):09d}") if all(name.isdigit() for name in names) else None)

    @property
    def outputs(self) -> "Outputs":
        from distill_runner.methods.outputs import LabelSets

        return LabelSets()

    def prediction_texts(self, outputs: np.ndarray, names: bool = True) -> list[str]:
        """Return the labels with a probability above one half for each example, joined by ``;``."""
        texts = [name if names else str(number) for number, name in enumerate(self.names)]
        return [";".join(texts[number] for number in np.flatnonzero(row > 0)) for row in outputs]

    def probabilities_of(self, outputs: np.ndarray) -> np.ndarray:
        from scipy.special import expit

        probabilities_NC: np.ndarray = expit(outputs.astype(np.float64))
        return probabilities_NC

    def example_predictions(self, outputs: np.ndarray, split: "Split") -> ExamplePredictions:
        """Return the predictions for each example.

        A prediction is correct if it has exactly the labels of the example. The probability of these labels is the
        product of the probabilities of the true labels and of the absence of the others.
        """
        labels_NC = np.asarray(split.labels)
        probabilities_NC = self.probabilities_of(outputs)
        confidence_N = np.maximum(probabilities_NC, 1 - probabilities_NC).prod(axis=1)
        predicted, true = self.prediction_texts(outputs), self.prediction_texts(labels_NC)
        return ExamplePredictions(
            correct=((outputs > 0) == (labels_NC > 0)).all(axis=1),
            label_probability=np.where(labels_NC > 0, probabilities_NC, 1 - probabilities_NC).prod(axis=1),
            prediction_text=lambda number: f"{predicted[number] or NO_LABELS} ({confidence_N[number]:.4f})",
            label_text=lambda number: true[number] or NO_LABELS,
        )

    def to_logits(self, probabilities_NC: np.ndarray, split: str) -> np.ndarray:
        """Return the logit of each probability, after clipping the probabilities to 1e-12 .. 1 - 1e-12."""
        from scipy.special import logit

        if len(rows := np.flatnonzero(((probabilities_NC < 0) | (probabilities_NC > 1)).any(1))):
            problem = f"row {rows[0]} of split '{split}' has {probabilities_NC[rows[0]].tolist()}, not all from 0 to 1"
            columns = format_list(self.prediction_columns)
            raise UserError("task.probabilities", columns, problem, "Raw outputs: use task.logits.")
        logits: np.ndarray = logit(np.clip(probabilities_NC, MIN_PROBABILITY, 1 - MIN_PROBABILITY))
        return logits

    def is_unlabeled(self, value: Any) -> bool:
        """Return whether the labels of an example are missing.

        An example without any label has an empty list, or an empty text if there is a ``separator``.
        """
        return value is None or (is_empty(value) and self.separator is None)

    def label_values(self, table: SplitTable) -> list[Any]:
        """Return the labels of each example as stored in the data, for ``encode``.

        Returns:
            The values of the label column. Of several columns, the list of the cells of each example, or None if one
            of the cells is empty. Empty if a column does not exist.
        """
        if isinstance(self.label, str):
            return table.columns.get(self.label, [])
        columns = [table.columns[name] for name in self.label if name in table.columns]
        if len(columns) < len(self.label):  # only a test split may lack columns
            return []
        rows = zip(*columns, strict=True)
        return [None if any(map(is_empty, row)) else list(row) for row in rows]

    def encode(self, values: list[Any], table: SplitTable, split: str) -> np.ndarray:
        """Return float32 (N, C): 1 where an example has the label, else 0."""
        if isinstance(self.label, list):
            flags = [
                [self._flag(value, name, split) for value, name in zip(row, self.label, strict=True)] for row in values
            ]
            return np.asarray(flags, dtype=np.float32)
        labels = self.labels or []
        encoded = np.zeros((len(values), len(labels)), dtype=np.float32)
        index = {normalized_label(name): i for i, name in enumerate(labels)}
        for row, value in enumerate(values):
            for name in self._names(value, table, split):
                if normalized_label(name) not in index:
                    problem = f"split '{split}' has the label {name}, which is not among these labels"
                    raise UserError("task.labels", format_list(labels), problem, "Name all labels, or remove it.")
                encoded[row, index[normalized_label(name)]] = 1
        return encoded

    def _flag(self, value: Any, column: str, split: str) -> bool:
        word = str(as_int(value)).casefold()
        if word not in YES + NO:
            problem = f"split '{split}' holds {value!r} in a column of 0 and 1"
            raise UserError("task.label", column, problem, "Give each label a column of 0 and 1.")
        return word in YES

    def _names(self, value: Any, table: SplitTable, split: str) -> list[str]:
        """Return the label names of one example; numbers are indices if the data store class names."""
        if self.separator is not None and isinstance(value, str | int | float):  # a file of numbers has one in each row
            return [name.strip() for name in str(as_int(value)).split(SEPARATORS[self.separator]) if name.strip()]
        if not isinstance(value, list):
            problem = f"split '{split}' holds {str(value)[:40]!r}, which is not a list of labels"
            remedy = "task.separator=comma (semicolon, bar, blank), or columns of 0 and 1: 'task.label=[<one>,<other>]'"
            raise UserError("task.label", self.label, problem, remedy)
        stored = table.class_names
        if stored and (unknown := [one for one in value if isinstance(one, int) and not 0 <= one < len(stored)]):
            problem = f"split '{split}' has the label number {unknown[0]}, but the data name labels 0 to "
            raise UserError("task.label", self.label, f"{problem}{len(stored) - 1}", "Remove or repair such rows.")
        return [stored[one] if stored is not None and isinstance(one, int) else str(as_int(one)) for one in value]
