"""Base class of tasks on one or two texts: classification, multi-label classification and regression."""

import math
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from distill_runner.common.errors import UserError, format_list, quantity, root_cause
from distill_runner.datasets.readers.dataset import SHUFFLED, parse_split
from distill_runner.datasets.readers.table import TEXT, TableRecord
from distill_runner.datasets.readers.tables import (
    SplitTable,
    inspect_columns,
    listed_names,
    read_columns,
    read_table,
)
from distill_runner.datasets.tokenization import Examples
from distill_runner.tasks.account import SplitAccount, example_hashes, leaks
from distill_runner.tasks.columns import (
    LABEL,
    MAX_CANDIDATES,
    has_label_word,
    infer_label,
    infer_texts,
    is_key,
    text_candidates,
)
from distill_runner.tasks.task import Task

_WRITTEN_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")
"""A number as programs write it; 007 and +1 are text."""


class TextTask(Task):
    """Task on one or two texts and one label per example.

    Attributes:
        label: column of the labels.
        max_length: maximum number of tokens of an example, including special tokens; longer examples are truncated.
        columns: one or two columns of texts. If empty, they are inferred: the only text column of the data, or two
            that are named as a pair, such as sentence1 and sentence2.
        split_off: share of the training split that becomes the validation split. The rows are drawn at random, with
            the same share of each class, but are the same in every run.
        probabilities: columns of the training split with the probability that another model gives to each class, in
            the order of the model's outputs. With ``teacher=labels`` they replace the predictions of a teacher.
        logits: as ``probabilities``, but with raw outputs before the softmax; for regression, one column of scores.
    """

    example_fields = frozenset({"columns", "label", "labels", "type", "max_length", "version"})

    slice_order: ClassVar[str] = SHUFFLED
    """Order of the rows from which ``split_off`` takes the two parts."""

    label: str = LABEL
    max_length: int = Field(ge=4)
    columns: list[str] = Field(default_factory=list, max_length=2)
    split_off: float | None = Field(None, gt=0, lt=1)
    probabilities: list[str] | None = None
    logits: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _slices_of_split_off(cls, fields: Any) -> Any:
        """Translate ``split_off`` into slices of the training split for ``train`` and ``validation``."""
        share = fields.get("split_off") if isinstance(fields, Mapping) else None
        train = str(fields.get("train", "train")) if share else ""
        if not isinstance(share, int | float) or not 0 < share < 1 or "[" in train:
            return fields
        cut, order = f"{100 * (1 - share):g}%", cls.slice_order
        name = next(iter(fields.get("validation") or {"validation": ""}))
        return {**fields, "train": f"{train}[{order}:{cut}]", "validation": {name: f"{train}[{order}{cut}:]"}}

    @model_validator(mode="after")
    def _has_one_form_of_predictions(self) -> Self:
        if self.probabilities and self.logits:
            problem = "cannot be combined with task.logits"
            raise UserError("task.probabilities", format_list(self.probabilities), problem, "Keep one of them.")
        return self

    @model_validator(mode="after")
    def _reads_no_label_as_text(self) -> Self:
        for name in self.columns:
            if name in self.label_columns or name in self.prediction_columns:
                content = "the label" if name in self.label_columns else "predictions"
                problem = f"the column '{name}' holds {content}, which no model may read"
                raise UserError("task.columns", format_list(self.columns), problem, "Name only columns of texts.")
        return self

    def resolved(self) -> Self:
        task = super().resolved()
        return task if task.columns else type(task)(**task.model_dump() | task._inferred_columns())

    @property
    def inferred_from(self) -> str:
        """Split from which columns are inferred."""
        return self.train

    def _inferred_columns(self) -> dict[str, Any]:
        """Return the text columns and the label columns of the data, as fields.

        Raises:
            UserError: the data lack a label column or a column of texts, or there is more than one choice.
        """
        types = inspect_columns(self, self.inferred_from)
        labels = infer_label(self.label_columns, types)
        texts = text_candidates(types, [*labels, *self.prediction_columns])
        if not texts or len(texts) > MAX_CANDIDATES:
            problem = f"cannot be inferred: the data have {listed_names(list(types))}"
            raise UserError("task.columns", None, problem, "'task.columns=[<text>]'")
        keys = [name for name, kind in types.items() if kind == TEXT and is_key(name)]
        if len(texts) > 1 or has_label_word(texts[0]) or keys:
            columns = read_columns(self, self.inferred_from, [*texts, *labels])
            label_columns = [columns[name] for name in labels]
            rows = label_columns[0] if len(labels) == 1 else zip(*label_columns, strict=True)
            texts = infer_texts(texts, keys, columns, list(map(str, rows)))
        return {"columns": texts, "label": labels[0] if isinstance(self.label, str) else labels}

    def spec(self) -> dict[str, Any]:
        """Return the spec of every task, without columns of predictions, which only some teachers read.

        ``train`` and ``validation`` hold the effect of ``split_off``.
        """
        unread = ("probabilities", "logits", "split_off")
        return {name: value for name, value in super().spec().items() if name not in unread}

    @property
    def prediction_columns(self) -> list[str]:
        return self.probabilities or self.logits or []

    def column_logits(self, split: str) -> np.ndarray:
        names = self.prediction_columns
        key = "task.probabilities" if self.probabilities else "task.logits"
        if len(names) != self.head.num_labels:
            problem = f"names {quantity(len(names), 'column')}, but the task has {self.head.num_labels} outputs"
            raise UserError(key, format_list(names), problem, f"In their order: {', '.join(self.head.names or ())}.")
        table = read_table(self.model_copy(update={"train": split}), split).columns
        try:
            values_NC = np.array([table[name] for name in names], dtype=np.float64).T
        except (TypeError, ValueError) as error:
            problem = f"contain a value that is not a number: {root_cause(error)}"
            raise UserError(key, format_list(names), problem) from error
        if len(bad := np.flatnonzero(~np.isfinite(values_NC).all(1))):
            raise UserError(key, format_list(names), f"row {bad[0]} of split '{split}' has a number that is not finite")
        if self.probabilities:
            values_NC = self.to_logits(values_NC, split)
        return values_NC.astype(np.float32)

    def to_logits(self, probabilities_NC: np.ndarray, split: str) -> np.ndarray:
        """Return the logits (N, C) of another model's probabilities (N, C).

        Raises:
            UserError: the values are not probabilities, or the outputs of this task type are not.
        """
        columns = format_list(self.prediction_columns)
        raise UserError("task.probabilities", columns, f"task.type={self.type} has no probabilities")

    @property
    def label_columns(self) -> list[str]:
        return [self.label]

    def required_columns(self, split: str) -> dict[str, str]:
        """Return the required columns with their fields; a test split does not need the label column."""
        # Names are compared without slice and dataset: the reader asks with the name of the split in its own files.
        is_training = parse_split(self.locate(split)[1])[0] == parse_split(self.locate(self.train)[1])[0]
        predictions = dict.fromkeys(self.prediction_columns if is_training else (), "probabilities")
        labels = dict.fromkeys(() if self.is_test(split) else self.label_columns, "label")
        return dict.fromkeys(self.columns, "columns") | predictions | labels

    def examples(self, split: str) -> Examples:
        table = read_table(self, split)
        texts = example_columns(table, self.columns, split)
        if not self.is_test(split) and not any(text.strip() for column in texts for text in column):
            problem = f"all {len(texts[0]):,} texts of split '{split}' are empty"
            raise UserError("task.columns", format_list(self.columns), problem, "Name the column of the texts.")
        return Examples(texts, self.encoded_labels(table, split))

    def account(self, split: str, examples: Examples, tables: Sequence[TableRecord]) -> SplitAccount:
        account = super().account(split, examples, tables)
        account.rows = len(examples)
        account.blank = sum(not any(text.strip() for text in row) for row in zip(*examples.texts, strict=True))
        if split == self.train:
            account.warnings += self.leak_warnings(examples)
        return account

    def leak_warnings(self, examples: Examples) -> list[str]:
        """Return a warning for each column of training texts from which the label can be read off."""
        return leaks(examples, self.columns, (self.head.names or ()) if self.has_classes else ())

    def hashes(self, examples: Examples, folder: Path | None) -> np.ndarray | None:
        return example_hashes(examples.texts)

    def write(self, folder: Path, examples: Examples, tokenizer: Any) -> int:
        from distill_runner.datasets.splits import TokenSplit

        return TokenSplit.write(folder, examples, tokenizer, self.max_length)

    def open(self, folder: Path, views: int | None = None) -> Any:
        from distill_runner.datasets.splits import TokenSplit

        return TokenSplit(folder)

    @property
    def num_positions(self) -> int:
        return self.max_length

    def encoded_labels(self, table: SplitTable, split: str) -> np.ndarray | None:
        """Return the labels of a split as ``encode`` does, one row for each example.

        Returns:
            None for a test split without labels: no such column, or all values empty or -1 (as on the hub).
        Raises:
            UserError: labels are missing, in a test split only some of them; or a label cannot be encoded.
        """
        values = self.label_values(table)
        if self.is_test(split) and all(is_empty(value) or value == -1 for value in values):
            return None
        if missing := sum(self.is_unlabeled(value) for value in values):
            problem = f"{missing} of {len(values)} rows of split '{split}' have no label (empty, -1 or -)"
            key = format_list(self.label_columns) if len(self.label_columns) > 1 else self.label_columns[0]
            mark = next((mark for mark in (-1, "-") if mark in values), None)
            hint = f" If {mark} is a class, name all classes in task.labels." if mark is not None else ""
            raise UserError("task.label", key, problem, f"Remove these rows, or choose a labeled split.{hint}")
        return self.encode(values, table, split)

    def label_values(self, table: SplitTable) -> list[Any]:
        """Return the label values of a split as stored in the data; empty if there is no label column.

        Values of a format without types are numbers, or true and false, if all of them are.
        """
        return typed_values(table, self.label)

    @abstractmethod
    def is_unlabeled(self, value: Any) -> bool:
        """Return whether a value of the label column means that the label is missing."""

    @abstractmethod
    def encode(self, values: list[Any], table: SplitTable, split: str) -> np.ndarray:
        """Return the labels in the form that the losses use, one row for each example.

        Raises:
            UserError: a value is not a label of the task.
        """


def is_empty(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def typed_values(table: SplitTable, column: str) -> list[Any]:
    """Return a column of labels; the text of a format without types as numbers or as true and false, if all are."""
    values = table.columns.get(column, [])
    if not table.untyped:
        return values
    texts = {value for value in values if value.strip()}
    typed: dict[str, Any] = {}
    if all(map(_WRITTEN_NUMBER.fullmatch, texts)):
        typed = {text: float(text) if "." in text else int(text) for text in texts}
    elif {text.casefold() for text in texts} <= {"true", "false"}:
        typed = {text: text.casefold() == "true" for text in texts}
    return [typed.get(value, value) for value in values]


def as_int(value: Any) -> Any:
    """Return a float such as 3.0 as the int 3, and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def example_columns(table: SplitTable, columns: Sequence[str], split: str) -> list[list[str]]:
    """Return the columns of texts of a split; raises the errors of ``_texts``."""
    return [_texts(table.columns[column], column, split) for column in columns]


def _texts(values: list[Any], column: str, split: str) -> list[str]:
    """Return the values of a column as texts.

    Raises:
        UserError: a value is missing or is no text, such as a list of tokens.
    """
    for row, value in enumerate(values):
        if not isinstance(value, str | int | float):
            content = "no text" if value is None else f"a {type(value).__name__} instead of a text"
            problem = f"row {row} of split '{split}' holds {content}"
            raise UserError("task.columns", column, problem, "Remove or repair such rows.")
    texts = [str(value) for value in values]
    for row, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"row {row} of split '{split}' holds half of a surrogate pair, which is no character"
            raise UserError("task.columns", column, problem, "Repair this row: its text was cut.") from error
    return texts
