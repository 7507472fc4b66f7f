"""Multi-label classification tasks: any number of labels, including none, for each example."""

from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from pydantic import field_validator, model_validator

from distill_runner.common.errors import UserError, as_list
from distill_runner.datasets.metrics import MULTILABEL_METRICS
from distill_runner.datasets.reading.split_table import SplitTable
from distill_runner.datasets.reading.tables import read
from distill_runner.kinds.classification import SMALLEST
from distill_runner.kinds.text import TextTask, is_empty, whole
from distill_runner.kinds.verdicts import Verdicts
from distill_runner.models.head import Head, normal

if TYPE_CHECKING:
    from distill_runner.datasets.split import Split
    from distill_runner.methods.outputs import Outputs

NONE = "no label"
YES, NO = ("1", "true", "yes"), ("0", "false", "no")
"""Values for yes and no in a column of a single label, in any letter case."""
SEPARATORS = {"comma": ",", "semicolon": ";", "bar": "|", "blank": None}


class MultiLabelTask(TextTask):
    """Multi-label classification task: any number of labels, including none, for each example.

    Attributes:
        label: column whose values are lists of labels, or texts of labels divided by ``separator``; or several columns
            of 0 and 1, one for each label.
        separator: what divides the labels in a text; ``blank`` is any whitespace. null if the values are lists, or if
            there are several columns.
        labels: label names in the order of the model's outputs; null reads them from the data.
    """

    known_metrics = MULTILABEL_METRICS
    has_classes = True
    read_fields = TextTask.read_fields | {"separator"}

    kind: Literal["multilabel"]
    label: str | list[str] = "labels"  # type: ignore[assignment]
    separator: Literal["comma", "semicolon", "bar", "blank"] | None = None
    labels: list[str] | None = None

    @field_validator("labels", mode="before")
    @classmethod
    def _names_are_text(cls, labels: Any) -> Any:
        """Convert numeric names to text, since the override ``task.labels=[0,1]`` is parsed as numbers."""
        return [str(label) for label in labels] if isinstance(labels, list | tuple) else labels

    @model_validator(mode="after")
    def _labels_are_sound(self) -> Self:
        shown = as_list(self.labels or [])
        if self.labels is not None and len(self.labels) < 2:
            raise UserError("task.labels", shown, "there must be two labels or more", "task.kind=classification")
        if len({normal(label) for label in self.labels or []}) < len(self.labels or []):
            raise UserError("task.labels", shown, "two names differ only in case, spaces, '_' and '-'")
        if isinstance(self.label, list) and self.labels and len(self.labels) != len(self.label):
            problem = f"names {len(self.labels)} labels, but task.label names {len(self.label)} columns"
            raise UserError("task.labels", shown, problem, "Leave task.labels out: the columns name them.")
        return self

    @property
    def label_columns(self) -> list[str]:
        return [self.label] if isinstance(self.label, str) else self.label

    def resolved(self) -> Self:
        found = super().resolved()
        if found.labels is not None:
            return found
        names = found.label if isinstance(found.label, list) else found._names_in(read(found, found.train))
        return type(self)(**found.model_dump() | {"labels": names})

    @property
    def head(self) -> Head:
        assert self.labels is not None, "resolved"
        names = tuple(self.labels)
        problem = "multi_label_classification"
        return Head("AutoModelForSequenceClassification", names, len(names), problem, self.name)  # type: ignore[arg-type]

    @property
    def outputs(self) -> "Outputs":
        from distill_runner.methods.outputs import LabelSets

        return LabelSets()

    def as_lines(self, outputs: np.ndarray, names: bool = True) -> list[str]:
        """Return the labels with a probability above one half for each example, joined by ``;``."""
        shown = [name if names else str(number) for number, name in enumerate(self.labels or [])]
        return [";".join(shown[number] for number in np.flatnonzero(row > 0)) for row in outputs]

    def class_probabilities(self, outputs: np.ndarray) -> dict[str, np.ndarray]:
        from scipy.special import expit

        return dict(zip(self.labels or [], expit(outputs.astype(np.float64)).T, strict=True))

    def verdicts(self, outputs: np.ndarray, split: "Split") -> Verdicts:
        """Return the predictions for each example.

        A prediction is right if all labels of the example are right. The probability of the truth is the product of
        the probabilities of the true labels and of the absence of the others.
        """
        labels_NC = np.asarray(split.labels)
        probabilities_NC = np.stack([*self.class_probabilities(outputs).values()], axis=1)
        sure_N = np.maximum(probabilities_NC, 1 - probabilities_NC).prod(axis=1)
        said, truth = self.as_lines(outputs), self.as_lines(labels_NC)
        return Verdicts(
            right=((outputs > 0) == (labels_NC > 0)).all(axis=1),
            of_truth=np.where(labels_NC > 0, probabilities_NC, 1 - probabilities_NC).prod(axis=1),
            said=lambda number: f"{said[number] or NONE} ({sure_N[number]:.4f})",
            truth=lambda number: truth[number] or NONE,
        )

    def as_logits(self, probabilities_NC: np.ndarray, split: str) -> np.ndarray:
        """Return the logit of each probability, after clipping the probabilities to 1e-12 .. 1 - 1e-12."""
        from scipy.special import logit

        if len(rows := np.flatnonzero(((probabilities_NC < 0) | (probabilities_NC > 1)).any(1))):
            problem = f"row {rows[0]} of split '{split}' has {probabilities_NC[rows[0]].tolist()}, not all from 0 to 1"
            raise UserError("task.probabilities", as_list(self.given_columns), problem, "Raw outputs: use task.logits.")
        logits: np.ndarray = logit(np.clip(probabilities_NC, SMALLEST, 1 - SMALLEST))
        return logits

    def is_unlabelled(self, value: Any) -> bool:
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
        labels, encoded = self.labels or [], np.zeros((len(values), len(self.labels or [])), dtype=np.float32)
        number = {normal(name): place for place, name in enumerate(labels)}
        for row, value in enumerate(values):
            for name in self._names(value, table, split):
                if normal(name) not in number:
                    problem = f"split '{split}' has the label {name}, which is not among these labels"
                    raise UserError("task.labels", as_list(labels), problem, "Name all labels, or remove it.")
                encoded[row, number[normal(name)]] = 1
        return encoded

    def _flag(self, value: Any, column: str, split: str) -> bool:
        said = str(whole(value)).casefold()
        if said not in YES + NO:
            problem = f"split '{split}' holds {value!r} in a column of 0 and 1"
            raise UserError("task.label", column, problem, "Give each label a column of 0 and 1.")
        return said in YES

    def _names(self, value: Any, table: SplitTable, split: str) -> list[str]:
        """Return the label names of one example; numbers are indices if the data store class names."""
        if self.separator is not None and isinstance(value, str | int | float):  # a file of numbers has one in each row
            return [name.strip() for name in str(whole(value)).split(SEPARATORS[self.separator]) if name.strip()]
        if not isinstance(value, list):
            problem = f"split '{split}' holds {str(value)[:40]!r}, which is not a list of labels"
            remedy = "task.separator=comma (semicolon, bar, blank), or columns of 0 and 1: 'task.label=[<one>,<other>]'"
            raise UserError("task.label", self.label, problem, remedy)
        own = table.class_names
        if own and (unknown := [one for one in value if isinstance(one, int) and not 0 <= one < len(own)]):
            problem = f"split '{split}' has the label number {unknown[0]}, but the data name labels 0 to {len(own) - 1}"
            raise UserError("task.label", self.label, problem, "Remove or repair such rows.")
        return [own[one] if own is not None and isinstance(one, int) else str(whole(one)) for one in value]

    def _names_in(self, table: SplitTable) -> list[str]:
        """Return the label names of the data: the names stored with the data, else the distinct labels, sorted."""
        if table.class_names is not None:
            return table.class_names
        values = [value for value in self.label_values(table) if not self.is_unlabelled(value)]
        names = {name for value in values for name in self._names(value, table, self.train)}
        return sorted(names, key=(lambda name: f"{int(name):09d}") if all(name.isdigit() for name in names) else None)
