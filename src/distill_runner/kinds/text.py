"""Base class of tasks on one or two texts: classification, multi-label classification and regression."""

import logging
import math
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import Field, model_validator

from distill_runner.common.errors import UserError, as_list, brief
from distill_runner.datasets.examples import Examples
from distill_runner.datasets.reading.slices import parse
from distill_runner.datasets.reading.split_table import SplitTable
from distill_runner.datasets.reading.tables import column_names, read
from distill_runner.kinds.task import Task

log = logging.getLogger(__name__)

LABEL = "label"
"""Default name of the label column."""
LABELS = frozenset((LABEL, "labels", "class", "category", "target", "score", "rating", "stars", "sentiment", "intent"))
"""Names that identify the label column if there is no column with the default name."""
KEYS = frozenset(["id", "idx", "index", "guid", "uid", "url", "date"])
"""Names of columns that are not taken for texts, such as identifiers and dates."""


class TextTask(Task):
    """Task on one or two texts and one label.

    Attributes:
        label: column of the labels.
        max_length: maximum number of tokens of an example, including special tokens; longer examples are truncated.
        columns: one or two columns of texts. If empty, the text columns of the data are used, provided that they are
            unambiguous.
        split_off: share of the training split that becomes the validation split. The rows are drawn at random, but
            are the same in every run.
        probabilities: columns of the training split with the probability that another model gives to each class, in
            the order of the model's outputs. With ``teacher=labels`` they replace the predictions of a teacher.
        logits: as ``probabilities``, but with raw outputs before the softmax; for regression, one column of scores.
    """

    read_fields = frozenset({"columns", "label", "labels", "kind", "max_length", "version"})

    label: str = LABEL
    max_length: int = Field(ge=4)
    columns: list[str] = Field(default_factory=list, max_length=2)
    split_off: float | None = Field(None, gt=0, lt=1)
    probabilities: list[str] | None = None
    logits: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _splits(cls, fields: Any) -> Any:
        """Translate ``split_off`` into slices of the training split for ``train`` and ``validation``."""
        share = fields.get("split_off") if isinstance(fields, Mapping) else None
        train = str(fields.get("train", "train")) if share else ""
        if not isinstance(share, int | float) or not 0 < share < 1 or "[" in train:
            return fields
        cut = f"{100 * (1 - share):g}%"
        name = next(iter(fields.get("validation") or {"validation": ""}))
        return {**fields, "train": f"{train}[~:{cut}]", "validation": {name: f"{train}[~{cut}:]"}}

    def resolved(self) -> Self:
        return self if self.columns else type(self)(**self.model_dump() | self._found())

    def _found(self) -> dict[str, Any]:
        """Return the text columns and the label columns that are found in the data.

        Raises:
            UserError: the data lack a label column, or have no column of texts, or more than two.
        """
        there = column_names(self, self.train)
        labels = self.label_columns
        others = [name for name in there if name.casefold() in LABELS]
        if labels == [LABEL] and LABEL not in there and len(others) == 1:  # only if ``label`` has its default
            labels = others
        beside = {*labels, *self.given_columns}
        texts = [
            name for name, is_text in there.items() if is_text and name not in beside and name.casefold() not in KEYS
        ]
        have = f"the data have {', '.join(there)}"
        if missing := [name for name in labels if name not in there]:
            raise UserError("task.label", missing[0], f"no such column: {have}", "task.label=<column of the labels>")
        if not 1 <= len(texts) <= 2:
            raise UserError("task.columns", None, f"cannot be inferred: {have}", "'task.columns=[<text>]'")
        return {"columns": texts, "label": labels[0] if isinstance(self.label, str) else labels}

    @model_validator(mode="after")
    def _one_kind_of_predictions(self) -> Self:
        if self.probabilities and self.logits:
            problem = "cannot be combined with task.logits"
            raise UserError("task.probabilities", as_list(self.probabilities), problem, "Keep one of them.")
        return self

    @property
    def given_columns(self) -> list[str]:
        return self.probabilities or self.logits or []

    def given_logits(self, split: str) -> np.ndarray:
        names = self.given_columns
        key = "task.probabilities" if self.probabilities else "task.logits"
        if len(names) != self.head.num_labels:
            problem = f"names {len(names)} columns, but the task has {self.head.num_labels} outputs"
            raise UserError(key, as_list(names), problem, f"In their order: {', '.join(self.head.names or ())}.")
        table = read(self.model_copy(update={"train": split}), split).columns
        try:
            values_NC = np.array([table[name] for name in names], dtype=np.float64).T
        except (TypeError, ValueError) as error:
            raise UserError(key, as_list(names), f"contain a value that is not a number: {brief(error)}") from error
        if len(bad := np.flatnonzero(~np.isfinite(values_NC).all(1))):
            raise UserError(key, as_list(names), f"row {bad[0]} of split '{split}' has a number that is not finite")
        if self.probabilities:
            values_NC = self.as_logits(values_NC, split)
        return values_NC.astype(np.float32)

    def as_logits(self, probabilities_NC: np.ndarray, split: str) -> np.ndarray:
        """Return the logits of given probabilities, both (N, C).

        Raises:
            UserError: the values are not probabilities, or this kind of task has none.
        """
        raise UserError("task.probabilities", as_list(self.given_columns), f"task.kind={self.kind} takes none")

    @property
    def label_columns(self) -> list[str]:
        return [self.label]

    def needed(self, split: str) -> dict[str, str]:
        """Return the required columns with their fields; a test split does not need the label column."""
        # Names are compared without slice and data set: the reader asks with the name of the split in its own files.
        of_train = parse(self.placed(split)[1])[0] == parse(self.placed(self.train)[1])[0]
        given = dict.fromkeys(self.given_columns if of_train else (), "probabilities")
        labels = dict.fromkeys(() if self.is_test(split) else self.label_columns, "label")
        return dict.fromkeys(self.columns, "columns") | given | labels

    def examples(self, split: str) -> Examples:
        table = read(self, split)
        texts = [_texts(table.columns[column], column, split) for column in self.columns]
        blank = sum(not any(text.strip() for text in row) for row in zip(*texts, strict=True))
        if blank:
            log.warning("%d of %d rows of split '%s' have only blanks as text", blank, len(texts[0]), split)
        return Examples(texts, self._labels(table, split))

    def write(self, folder: Path, examples: Examples, tokenizer: Any) -> None:
        from distill_runner.datasets.batches import Tokens

        Tokens.write(folder, examples, tokenizer, self.max_length)

    def open(self, folder: Path, views: int | None = None) -> Any:
        from distill_runner.datasets.batches import Tokens

        return Tokens(folder)

    @property
    def num_positions(self) -> int:
        return self.max_length

    @property
    def settings(self) -> dict[str, Any]:
        return {"max_length": self.max_length}

    def _labels(self, table: SplitTable, split: str) -> np.ndarray | None:
        """Return the labels of a split, one row for each example.

        Returns:
            The encoded labels; None for a test split without labels: no such column, or all values empty or -1 (as on
            the hub).
        Raises:
            UserError: labels are missing, in a test split only some of them; or a label cannot be encoded.
        """
        values = self.label_values(table)
        if self.is_test(split) and all(is_empty(value) or value == -1 for value in values):
            return None
        if missing := sum(self.is_unlabelled(value) for value in values):
            problem = f"{missing} of {len(values)} rows of split '{split}' have no label (-1 or empty)"
            shown = as_list(self.label_columns) if len(self.label_columns) > 1 else self.label_columns[0]
            remedy = "Remove these rows, or choose a labelled split."
            named = " If -1 is a class, name all classes in task.labels." if -1 in values else ""
            raise UserError("task.label", shown, problem, remedy + named)
        return self.encode(values, table, split)

    def label_values(self, table: SplitTable) -> list[Any]:
        """Return the label values of a split as stored in the data; empty if there is no label column."""
        return table.columns.get(self.label, [])

    @abstractmethod
    def is_unlabelled(self, value: Any) -> bool:
        """Return whether a value of the label column means that the label is missing."""

    @abstractmethod
    def encode(self, values: list[Any], table: SplitTable, split: str) -> np.ndarray:
        """Return the labels in the form that the losses use, one row for each example.

        Raises:
            UserError: a value is not a label of the task.
        """


def is_empty(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def whole(value: Any) -> Any:
    """Return a float such as 3.0 as the int 3, and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _texts(values: list[Any], column: str, split: str) -> list[str]:
    for row, value in enumerate(values):
        if value is None or isinstance(value, list | dict):
            what = "no text" if value is None else f"a {type(value).__name__} instead of a text"
            problem = f"row {row} of split '{split}' holds {what}"
            raise UserError("task.columns", column, problem, "Remove or repair such rows.")
    return [str(value) for value in values]
