"""Base class of tasks on one or two texts: classification, multi-label classification and regression."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from distill_runner.common.errors import UserError, format_list
from distill_runner.datasets.readers.dataset import SHUFFLED, parse_split
from distill_runner.datasets.readers.table import TEXT, TableRecord, text_of
from distill_runner.datasets.readers.tables import (
    SplitTable,
    column_names,
    inspect_columns,
    listed_names,
    read_columns,
    read_table,
)
from distill_runner.datasets.tokenization import Examples
from distill_runner.tasks.account import SplitAccount, effective_number, example_hashes, leaks
from distill_runner.tasks.columns import (
    MAX_CANDIDATES,
    has_label_word,
    infer_label,
    infer_texts,
    is_empty,
    is_key,
    text_candidates,
)
from distill_runner.tasks.scores import SCORE_FIELDS, ScoredTask
from distill_runner.tasks.splits import VALIDATION

_WRITTEN_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")
"""A number as programs write it; 007 and +1 are text."""


class TextTask(ScoredTask):
    """Task on one or two texts and one label per example.

    Attributes:
        max_length: maximum number of tokens of an example, including special tokens; longer examples are truncated.
        columns: one or two columns of texts. If empty, they are inferred: the only text column of the data, or two
            that are named as a pair, such as sentence1 and sentence2.
        split_off: share of the training split that becomes the validation split. The rows are drawn at random, with
            the same share of each class, but are the same in every run.
        example_weight: column with the weight of each training example in the losses. Only their ratios count: they are
            scaled to a mean of 1 over the examples that are trained on.
    """

    example_fields = (
        frozenset({"columns", "label", "labels", "type", "max_length", "version", "example_weight"}) | SCORE_FIELDS
    )
    weighs_examples: ClassVar[bool] = True
    """Whether tasks of this type take ``example_weight``."""

    slice_order: ClassVar[str] = SHUFFLED
    """Order of the rows from which ``split_off`` takes the two parts."""

    max_length: int = Field(ge=4)
    columns: list[str] = Field(default_factory=list, max_length=2)
    split_off: float | None = Field(None, gt=0, lt=1)
    example_weight: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _slices_of_split_off(cls, fields: Any) -> Any:
        """Translate ``split_off`` into slices of the training split for ``train`` and ``validation``.

        Raises:
            UserError: the training split is a part already, or there is another validation split.
        """
        share = fields.get("split_off") if isinstance(fields, Mapping) else None
        if not isinstance(share, int | float) or not 0 < share < 1:
            return fields
        train, validation = fields.get("train") or "train", fields.get("validation") or {VALIDATION: VALIDATION}
        name, cut, order = str(train).partition("[")[0], f"{100 * (1 - share):g}%", cls.slice_order
        train_part, validation_part = f"{name}[{order}:{cut}]", f"{name}[{order}{cut}:]"
        if not isinstance(validation, Mapping) or (train == train_part and [*validation.values()] == [validation_part]):
            return fields  # translated before, or refused later
        if train != name:
            problem = f"divides a whole split, but task.train={train} is a part of one"
            raise UserError("task.split_off", share, problem, "Give both parts: train[:900] and train[900:1000].")
        if len(validation) > 1 or any(key != split for key, split in validation.items()):
            listed = ", ".join(f"task.validation.{key}={split}" for key, split in validation.items())
            problem = f"makes a validation split of task.train, but there is {listed}"
            raise UserError("task.split_off", share, problem, "Leave out one of them: task.validation=null")
        return {**fields, "train": train_part, "validation": {VALIDATION: validation_part}}

    @model_validator(mode="after")
    def _reads_no_label_as_text(self) -> Self:
        for name in self.columns:
            if name in self.label_columns or name in self.prediction_columns or name == self.example_weight:
                weight = "weights" if name == self.example_weight else "predictions"
                content = "the label" if name in self.label_columns else weight
                problem = f"the column '{name}' holds {content}, which no model may read"
                raise UserError("task.columns", format_list(self.columns), problem, "Name only columns of texts.")
        return self

    @model_validator(mode="after")
    def _may_have_weights(self) -> Self:
        if self.example_weight is not None and not self.weighs_examples:
            problem = f"tasks of type {self.type} have no weights of examples"
            raise UserError("task.example_weight", self.example_weight, problem, "Leave it out.")
        if self.example_weight in [*self.label_columns, *self.prediction_columns]:
            content = "the labels" if self.example_weight in self.label_columns else "scores"
            problem = f"is the column of {content}"
            raise UserError("task.example_weight", self.example_weight, problem, "Name a column of weights.")
        return self

    def resolved(self) -> Self:
        task = super().resolved().with_gold()
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
        of_labels = types if self.labeled_split == self.train else column_names(self, self.labeled_split)
        labels = (
            self.label_columns
            if self.gold == "none"
            else infer_label(self.label_columns, self.label_candidates(of_labels))
        )
        others = [*self.prediction_columns, *([self.example_weight] if self.example_weight else [])]
        texts = text_candidates(types, [*labels, *others])
        if not texts or len(texts) > MAX_CANDIDATES:
            problem = f"cannot be inferred: the data have {listed_names(list(types))}"
            raise UserError("task.columns", None, problem, "'task.columns=[<text>]'")
        keys = [name for name, kind in types.items() if kind == TEXT and is_key(name)]
        if len(texts) > 1 or has_label_word(texts[0]) or keys:
            columns = read_columns(self, self.inferred_from, [*texts, *labels])
            label_columns = [columns[name] for name in labels if name in columns]
            rows = label_columns[0] if len(label_columns) == 1 else zip(*label_columns, strict=True)
            texts = infer_texts(texts, keys, columns, list(map(str, rows)) or [""] * len(columns[texts[0]]))
        return {"columns": texts, "label": labels[0] if isinstance(self.label, str) else labels}

    def spec(self) -> dict[str, Any]:
        """Return the spec of every task; ``train`` and ``validation`` hold the effect of ``split_off``.

        ``weights`` is the version of what weights of examples weigh: once these were losses on outputs only.
        """
        weights = {"weights": 2} if self.example_weight else {}
        return {name: value for name, value in super().spec().items() if name != "split_off"} | weights

    @property
    def label_columns(self) -> list[str]:
        return [self.label]

    def required_columns(self, split: str) -> dict[str, str]:
        """Return the required columns with their fields; a test split does not need the label column."""
        # Names are compared without slice and dataset: the reader asks with the name of the split in its own files.
        is_training = parse_split(self.locate(split)[1])[0] == parse_split(self.locate(self.train)[1])[0]
        unlabeled = self.is_test(split) or self.gold == "none" or (is_training and not self.has_train_labels)
        weight = {self.example_weight: "example_weight"} if self.example_weight and is_training else {}
        labels = dict.fromkeys(() if unlabeled else self.label_columns, "label")
        return dict.fromkeys(self.columns, "columns") | labels | weight

    def examples(self, split: str) -> Examples:
        full_table = read_table(self, split)
        self.weights(full_table, split)  # here, so that an error names the row of the data
        table, outputs = self.with_scores(full_table, split)
        texts = example_columns(table, self.columns, split)
        if not self.is_test(split) and not any(text.strip() for column in texts for text in column):
            problem = f"all {len(texts[0]):,} texts of split '{split}' are empty"
            raise UserError("task.columns", format_list(self.columns), problem, "Name the column of the texts.")
        return Examples(texts, self.gold_labels(table, outputs, split), self.weights(table, split))

    def weights(self, table: SplitTable, split: str) -> np.ndarray | None:
        """Return the weights (N,) of the training examples in a table; None for another split, or without weights.

        Raises:
            UserError: a weight is no number of 0 or more, or all are 0.
        """
        if self.example_weight is None or split != self.train:
            return None
        values = table.columns[self.example_weight]
        weights = np.array([_as_weight(value) for value in values])
        if len(rows := np.flatnonzero(np.isnan(weights))):
            problem = f"row {rows[0]} of split '{split}' holds {values[rows[0]]!r}, which is no number of 0 or more"
            raise UserError("task.example_weight", self.example_weight, problem, "Repair or remove such rows.")
        if not weights.any():
            problem = f"all examples of split '{split}' have the weight 0"
            raise UserError("task.example_weight", self.example_weight, problem, "Name another column.")
        return weights

    def account(self, split: str, examples: Examples, tables: Sequence[TableRecord]) -> SplitAccount:
        account = super().account(split, examples, tables)
        account.rows = len(examples)
        others = {*self.prediction_columns, *([self.example_weight] if split == self.train else [])}
        account.unread = [name for name in account.unread if name not in others]
        if (weights := examples.weights) is not None:
            account.weights = [float(weights.min()), float(weights.max()), effective_number(weights)]
        if self.gold == "none" or (split == self.train and not self.has_train_labels):
            account.label = ""
        account.blank = sum([not "".join(row).strip() for row in zip(*examples.texts, strict=True)])
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

    def gold_labels(self, table: SplitTable, outputs: np.ndarray | None, split: str) -> np.ndarray | None:
        """Return the labels of a split: those of the label column, or those that scores favor (``gold``).

        Args:
            outputs: scores of the rows, as ``with_scores`` returns them.
        Raises:
            UserError: as ``encoded_labels``; or a split that needs scores has none.
        """
        if self.gold == "none":
            if outputs is None and not self.is_test(split):
                self.score_table(split)
            return None if outputs is None else self.favored_labels(outputs)
        return None if split == self.train and not self.has_train_labels else self.encoded_labels(table, split)

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
        if not values:
            problem = f"split '{split}' has no labels (task.gold={self.gold})"
            raise UserError("task.label", format_list(self.label_columns), problem, "Validate on a labeled split.")
        distinct = {repr(value): value for value in values}  # few; a value may be a list
        unlabeled = {text for text, value in distinct.items() if self.is_unlabeled(value)}
        if unlabeled and (missing := sum([repr(value) in unlabeled for value in values])):
            mark = next((value for value in values if self.is_unlabeled(value) and not is_empty(value)), None)
            example = "empty" if mark is None else f"such as {mark!r}"
            problem = f"{missing} of {len(values)} rows of split '{split}' have no label ({example})"
            key = format_list(self.label_columns) if len(self.label_columns) > 1 else self.label_columns[0]
            hint = "" if mark is None else f" If {mark} is a class, name all classes in task.labels."
            raise UserError("task.label", key, problem, f"Remove these rows, or choose a labeled split.{hint}")
        return self.encode(values, table, split)

    def label_values(self, table: SplitTable) -> list[Any]:
        """Return the label values of a split as stored in the data; empty if there is no label column.

        Values of a format without types are numbers, or true and false, if all of them are.
        """
        return typed_values(table, self.label)


def _as_weight(value: Any) -> float:
    """Return the weight in a cell; NaN if it holds none."""
    try:
        weight = float(value)
    except (TypeError, ValueError):
        return math.nan
    return weight if 0 <= weight < math.inf else math.nan


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
    texts = list[str]()
    for row, value in enumerate(values):
        try:
            texts.append(value if isinstance(value, str) else text_of(value))
        except ValueError as error:
            problem = f"row {row} of split '{split}' holds {error}"
            raise UserError("task.columns", column, problem, "Remove or repair such rows.") from error
        try:
            texts[-1].encode()
        except UnicodeEncodeError as error:
            problem = f"row {row} of split '{split}' holds half of a surrogate pair, which is no character"
            raise UserError("task.columns", column, problem, "Repair this row: its text was cut.") from error
    return texts
