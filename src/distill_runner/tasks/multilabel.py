"""Multi-label classification tasks: any number of labels, including none, for each example."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from pydantic import model_validator

from distill_runner.common.errors import UserError, format_typed, override, short_list
from distill_runner.datasets.metrics import MULTILABEL_METRICS
from distill_runner.datasets.readers.content import SplitTable
from distill_runner.datasets.readers.table import is_missing
from distill_runner.models.config import normalized_label
from distill_runner.tasks.class_names import class_scores
from distill_runner.tasks.columns import as_int, is_blank, printed_value, typed_values
from distill_runner.tasks.decoding import LabelSet
from distill_runner.tasks.text import TextTask

if TYPE_CHECKING:
    from distill_runner.datasets.splits import Split
    from distill_runner.methods.outputs import Outputs

FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
"""Values for yes and no, in any letter case."""
_SEPARATORS = {"comma": ",", "semicolon": ";", "bar": "|", "blank": None}


class MultiLabelTask(TextTask):
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
    has_classes = True
    decoding = LabelSet()
    metric_names = MULTILABEL_METRICS
    output_kind = "label_sets"
    problem_type = "multi_label_classification"
    example_fields = TextTask.example_fields | {"separator", "flags"}

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
            raise UserError("task.labels", format_typed(self.labels), problem, remedy)
        return self

    @property
    def label_columns(self) -> list[str]:
        return [self.label] if isinstance(self.label, str) else self.label

    @property
    def outputs(self) -> "Outputs":
        from distill_runner.methods.outputs import LabelSets

        return LabelSets()

    def scores_by_class(self, outputs: np.ndarray, split: "Split") -> dict[str, dict[str, float]]:
        return class_scores(self.names, np.asarray(split.labels), outputs > 0)

    def prediction_warnings(self, outputs: np.ndarray, split: "Split") -> list[str]:
        is_missed = (np.asarray(split.labels) > 0).any(axis=0) & ~(outputs > 0).any(axis=0)
        missed = short_list([self.names[place] for place in np.flatnonzero(is_missed)])
        text = f"never predicts {missed}" if (outputs > 0).any() else "predicts no label"
        return [f"the student {text}: no probability is above 0.5"] if missed else []

    # Labels

    def class_names(self) -> list[str]:
        return self.label if isinstance(self.label, list) and self.gold != "none" else super().class_names()

    def distinct_names(self, table: SplitTable) -> list[str]:
        rows = [self._items(value, self.train) for value in self.label_values(table) if not self.is_unlabeled(value)]
        if self._are_flags(rows, None, self.train):
            return list(map(str, range(len(rows[0]))))
        names = {name for items in rows for name in self._names(items, table, self.train)}
        return sorted(names, key=(lambda name: f"{int(name):09d}") if all(name.isdigit() for name in names) else None)

    def is_unlabeled(self, value: Any) -> bool:
        """Return whether the labels of an example are missing.

        An example without any label has an empty list, or an empty text if there is a ``separator``.
        """
        return is_missing(value) or (is_blank(value) and self.separator is None)

    def label_values(self, table: SplitTable) -> list[Any]:
        """Return the values of the label column; of several columns, the list of the cells of each example.

        It is None if one of the cells is empty. Only a test split may lack columns: the values are then empty.
        """
        if isinstance(self.label, str):
            return typed_values(table, self.label)
        if not set(self.label) <= table.columns.keys():
            return []
        rows = zip(*(typed_values(table, name) for name in self.label), strict=True)
        return [None if any(map(is_blank, row)) else list(row) for row in rows]

    def encode(self, values: list[Any], table: SplitTable, split: str) -> np.ndarray:
        """Return float32 (N, C): 1 where an example has the label, else 0."""
        has_columns = isinstance(self.label, list)
        labels = self.label if isinstance(self.label, list) else self.names
        rows = values if has_columns else [self._items(value, split) for value in values]
        if has_columns or self._are_flags(rows, len(labels), split):
            cells = ((name, cell) for row in rows for name, cell in zip(labels, row, strict=True))
            if wrong := next((pair for pair in cells if flag_of(pair[1]) is None), None):
                problem = f"split '{split}' holds {wrong[1]!r} for the label {wrong[0]}, in a column of 0 and 1"
                raise UserError("task.label", self.label, problem, "Give each label a column of 0 and 1.")
            return np.array([list(map(flag_of, row)) for row in rows], dtype=np.float32)
        index = {normalized_label(name): number for number, name in enumerate(labels)}
        encoded = np.zeros((len(values), len(labels)), dtype=np.float32)
        for number, items in enumerate(rows):
            for name in self._names(items, table, split):
                if normalized_label(name) not in index:
                    problem = f"split '{split}' has the label {name}, which is not among these labels"
                    raise UserError("task.labels", format_typed(labels), problem, "Name all labels, or remove it.")
                encoded[number, index[normalized_label(name)]] = 1
        return encoded

    def _items(self, value: Any, split: str) -> list[Any]:
        """Return the labels of one example as they are written: names, numbers or flags."""
        if isinstance(value, str) and isinstance(items := printed_value(value), list):
            return items
        if self.separator is not None and isinstance(value, str | int | float):  # a file of numbers has one in each row
            return [name.strip() for name in str(as_int(value)).split(_SEPARATORS[self.separator]) if name.strip()]
        items = value if isinstance(value, list) else [None]
        if any(item == "" for item in items):
            problem = f"split '{split}' holds an empty label: {str(value)[:40]}"
            raise UserError("task.label", self.label, problem, "Remove it, or name it.")
        if not all(isinstance(item, str) or isinstance(as_int(item), int) for item in items):
            problem = f"split '{split}' holds {str(value)[:40]!r}, which is not a list of labels or of their numbers"
            remedy = override("task.separator", "comma") + " (semicolon, bar, blank), or columns of 0 and 1: "
            remedy += override("task.label", ["<one>", "<other>"])
            raise UserError("task.label", self.label, problem, remedy)
        return items

    def _are_flags(self, rows: Sequence[list[Any]], count: int | None, split: str) -> bool:
        """Return whether lists hold a 0 or 1 for each label instead of names or numbers of labels.

        Args:
            count: number of labels; None if it is not known yet.
        Raises:
            UserError: the lists can be read in both ways, or are flags of another number of labels.
        """
        lengths = {len(items) for items in rows}
        are_binary = all(str(as_int(item)) in ("0", "1", "True", "False") for items in rows for item in items)
        fit = are_binary and len(lengths) == 1 and count in (None, *lengths)
        if self.flags is False or (self.flags is None and (not are_binary or max(lengths, default=0) < 2)):
            return False
        if self.flags is None and not any(len(set(map(str, items))) < len(items) for items in rows):
            if not fit:
                return False
            problem = f"split '{split}' has lists such as {rows[0]}: the labels 0 and 1, or a flag for each of two"
            remedy: str = override("task.flags", True) + " for flags, " + override("task.flags", False) + " for labels."
            raise UserError("task.flags", None, problem, remedy)
        if not fit:
            sizes = " and ".join(map(str, sorted(lengths)[:3]))
            problem = f"split '{split}' has lists of length {sizes}, which are not {count or 'equally many'} flags"
            remedy = "Name all labels in task.labels, in the order of the flags, which are 0 or 1."
            raise UserError("task.flags", self.flags, problem, remedy)
        return True

    def _names(self, items: Sequence[Any], table: SplitTable, split: str) -> list[str]:
        """Return the label names of one example; numbers are indices if the data store class names."""
        stored = table.class_names
        numbers = [item for item in items if isinstance(item, int)]
        if stored is not None and (unknown := [number for number in numbers if not 0 <= number < len(stored)]):
            problem = f"split '{split}' has the label number {unknown[0]}, but the data name labels 0 to "
            raise UserError("task.label", self.label, f"{problem}{len(stored) - 1}", "Remove or repair such rows.")
        if stored is None and len(numbers) == len(items) > len(set(numbers)):
            problem = f"split '{split}' has {items}: neither a flag for each label, nor labels, each of them once"
            raise UserError("task.label", self.label, problem, "Give each label a column of 0 and 1.")
        return [stored[item] if stored is not None and isinstance(item, int) else str(as_int(item)) for item in items]


def flag_of(value: Any) -> bool | None:
    """Return the yes or no that a value of a column of flags says; None for any other value."""
    return FLAGS.get(str(as_int(value)).casefold())
