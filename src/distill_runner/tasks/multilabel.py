"""Multi-label classification tasks: any number of labels, including none, for each example."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from pydantic import model_validator

from distill_runner.common.errors import UserError, format_list
from distill_runner.datasets.metrics import MULTILABEL_METRICS
from distill_runner.datasets.readers.table import is_missing
from distill_runner.datasets.readers.tables import SplitTable
from distill_runner.models.config import normalized_label
from distill_runner.tasks.classification import MIN_PROBABILITY, ClassesTask
from distill_runner.tasks.columns import is_empty
from distill_runner.tasks.printed import printed_list
from distill_runner.tasks.task import ExamplePredictions
from distill_runner.tasks.text import as_int, typed_values

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
        flags: whether the lists hold a 0 or 1 for each label, as ``transformers`` wants them, instead of names or
            numbers of labels. null: they do if all have the same length and no other values, and one repeats a value.
        labels: label names in the order of the model's outputs; null reads them from the data.
    """

    served_reply = "dict(zip(labels, (1 / (1 + numpy.exp(-row))).tolist()))"
    metric_functions = MULTILABEL_METRICS
    output_kind = "label_sets"
    problem_type = "multi_label_classification"
    example_fields = ClassesTask.example_fields | {"separator", "flags"}

    type: Literal["multilabel"]
    label: str | list[str] = "labels"  # type: ignore[assignment]
    separator: Literal["comma", "semicolon", "bar", "blank"] | None = None
    flags: bool | None = None

    @model_validator(mode="after")
    def _columns_match_the_names(self) -> Self:
        for option, value in (("separator", self.separator), ("flags", self.flags)):
            if isinstance(self.label, list) and value is not None:
                problem = "is read for a column of lists or texts, but task.label names columns of 0 and 1"
                raise UserError(f"task.{option}", value, problem, "Leave it out.")
        if isinstance(self.label, list) and self.labels and len(self.labels) != len(self.label):
            problem = f"names {len(self.labels)} labels, but task.label names {len(self.label)} columns"
            remedy = "Leave task.labels out: the columns name them."
            raise UserError("task.labels", format_list(self.labels), problem, remedy)
        return self

    @property
    def label_columns(self) -> list[str]:
        return [self.label] if isinstance(self.label, str) else self.label

    def read_names(self) -> list[str]:
        return self.label if isinstance(self.label, list) and self.gold != "none" else super().read_names()

    def distinct_names(self, table: SplitTable) -> list[str]:
        values = [value for value in self.label_values(table) if not self.is_unlabeled(value)]
        rows = [self._items(value, self.train) for value in values]
        if self._are_flags(rows, None, self.train):
            return list(map(str, range(len(rows[0]))))
        names = {name for items in rows for name in self._names(items, table, self.train)}
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

    def confidence(self, outputs: np.ndarray) -> np.ndarray:
        probabilities_NC = self.probabilities_of(outputs)
        confidence: np.ndarray = np.maximum(probabilities_NC, 1 - probabilities_NC).min(axis=1)
        return confidence

    def favored_labels(self, outputs: np.ndarray) -> np.ndarray:
        return (outputs > 0).astype(np.float32)

    def to_logits(self, probabilities_NC: np.ndarray, split: str, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the logit of each probability, after clipping the probabilities to 1e-12 .. 1 - 1e-12."""
        from scipy.special import logit

        if len(places := np.flatnonzero(((probabilities_NC < 0) | (probabilities_NC > 1)).any(1))):
            values, row = probabilities_NC[places[0]].tolist(), places[0] if rows is None else rows[places[0]]
            problem = f"row {row} of split '{split}' has {values}, not all from 0 to 1"
            columns = format_list(self.prediction_columns)
            remedy = "Raw outputs: use task.logits. Percentages: divide them by 100."
            raise UserError(self.prediction_key, columns, problem, remedy)
        logits: np.ndarray = logit(np.clip(probabilities_NC, MIN_PROBABILITY, 1 - MIN_PROBABILITY))
        return logits

    def is_unlabeled(self, value: Any) -> bool:
        """Return whether the labels of an example are missing.

        An example without any label has an empty list, or an empty text if there is a ``separator``.
        """
        return is_missing(value) or (is_empty(value) and self.separator is None)

    def label_values(self, table: SplitTable) -> list[Any]:
        """Return the labels of each example as stored in the data, for ``encode``.

        Returns:
            The values of the label column. Of several columns, the list of the cells of each example, or None if one
            of the cells is empty. Empty if a column does not exist.
        """
        if isinstance(self.label, str):
            return typed_values(table, self.label)
        columns = [typed_values(table, name) for name in self.label if name in table.columns]
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
        rows = [self._items(value, split) for value in values]
        if self._are_flags(rows, len(labels), split):
            return np.asarray([[_is_set(item) for item in items] for items in rows], dtype=np.float32)
        for row, items in enumerate(rows):
            for name in self._names(items, table, split):
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

    def _items(self, value: Any, split: str) -> list[Any]:
        """Return the labels of one example as they are written: names, numbers or flags."""
        if isinstance(value, str) and (items := printed_list(value)) is not None:
            return items
        if self.separator is not None and isinstance(value, str | int | float):  # a file of numbers has one in each row
            return [name.strip() for name in str(as_int(value)).split(SEPARATORS[self.separator]) if name.strip()]
        if not isinstance(value, list):
            problem = f"split '{split}' holds {str(value)[:40]!r}, which is not a list of labels"
            remedy = "task.separator=comma (semicolon, bar, blank), or columns of 0 and 1: 'task.label=[<one>,<other>]'"
            raise UserError("task.label", self.label, problem, remedy)
        if wrong := [item for item in value if not isinstance(item, str) and not isinstance(as_int(item), int)]:
            problem = f"split '{split}' has the label {str(wrong[0])[:40]}, which is neither a name nor a whole number"
            raise UserError("task.label", self.label, problem, "Probabilities of labels: task.probabilities.")
        return value

    def _are_flags(self, rows: Sequence[list[Any]], count: int | None, split: str) -> bool:
        """Return whether lists hold a 0 or 1 for each label instead of names or numbers of labels.

        Args:
            count: number of labels; None if it is not known yet.
        Raises:
            UserError: the lists can be read in both ways, or are flags of another number of labels.
        """
        lengths = {len(items) for items in rows}
        binary = all(str(as_int(item)) in ("0", "1", "True", "False") for items in rows for item in items)
        repeats = any(len(set(map(str, items))) < len(items) for items in rows)
        if self.flags is False or (self.flags is None and (not binary or max(lengths, default=0) < 2)):
            return False
        if self.flags is None and not repeats:
            if len(lengths) > 1 or count not in (None, *lengths):
                return False
            problem = (
                f"split '{split}' has lists such as {rows[0]}: the labels 0 and 1, or a flag for each of two labels"
            )
            raise UserError("task.flags", None, problem, "task.flags=true for flags, task.flags=false for labels.")
        if not binary or len(lengths) > 1 or count not in (None, *lengths):
            lengths_text = " and ".join(map(str, sorted(lengths)[:3])) + ("" if binary else ", not all 0 or 1")
            needed = f"{count} labels" if count else "the same number in each row"
            problem = f"split '{split}' has lists of flags of length {lengths_text}; the task needs {needed}"
            raise UserError(
                "task.flags", self.flags, problem, "Name all labels in task.labels, in the order of the flags."
            )
        return True

    def _names(self, items: Sequence[Any], table: SplitTable, split: str) -> list[str]:
        """Return the label names of one example; numbers are indices if the data store class names."""
        stored = table.class_names
        if stored and (unknown := [one for one in items if isinstance(one, int) and not 0 <= one < len(stored)]):
            problem = f"split '{split}' has the label number {unknown[0]}, but the data name labels 0 to "
            raise UserError("task.label", self.label, f"{problem}{len(stored) - 1}", "Remove or repair such rows.")
        if stored is None and all(isinstance(one, int) for one in items) and len(set(items)) < len(items):
            problem = (
                f"split '{split}' has {items}: neither a flag for each label, nor labels, of which none comes twice"
            )
            raise UserError("task.label", self.label, problem, "Give each label a column of 0 and 1.")
        return [stored[one] if stored is not None and isinstance(one, int) else str(as_int(one)) for one in items]


def _is_set(item: Any) -> bool:
    return str(as_int(item)) in ("1", "True")
