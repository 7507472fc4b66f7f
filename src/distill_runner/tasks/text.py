"""Tasks on one or two texts with a label for each example: classes, sets of labels and scores."""

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from distill_runner.common.errors import UserError, format_typed, listed_names, override
from distill_runner.datasets.near_copies import near_copies, sketches
from distill_runner.datasets.readers.content import SplitTable, column_names, read_table
from distill_runner.datasets.readers.dataset import SHUFFLED, parse_split
from distill_runner.datasets.readers.table import TableRecord, is_missing, recorded_tables, text_of
from distill_runner.datasets.tokenization import Examples
from distill_runner.models.config import Head
from distill_runner.tasks.class_names import check_names, names_as_text, read_names
from distill_runner.tasks.columns import (
    FEW_VALUES,
    LABEL,
    MIN_ROWS,
    distinct,
    find_label,
    infer_columns,
    infer_label,
    is_blank,
    leak,
    numbers,
    typed_values,
)
from distill_runner.tasks.decoding import Decoding, Number, OneClass
from distill_runner.tasks.scores import (
    TRANSFER,
    fit_temperature,
    read_scores,
    score_table,
    selected_rows,
    text_names,
    transfer_table,
)
from distill_runner.tasks.split_account import SplitAccount, effective_number
from distill_runner.tasks.task import ExamplePredictions, Task
from distill_runner.tasks.task_splits import HELD_OUT, VALIDATION

if TYPE_CHECKING:
    from distill_runner.datasets.corpora import TransferSet
    from distill_runner.datasets.splits import Split

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
FORMS = ("probabilities", "logits", "answers")
"""Options that name columns of scores."""
SCORE_FIELDS = frozenset({*FORMS, "top_k", "no_answer", "keep", "calibrate", "fitted_on", "gold"})
"""Entries of a task's spec on which the rows with a score depend."""
MAX_SEARCHED = 20_000
"""Examples that are searched for their labels; of more, evenly spaced ones."""
CONFIDENT = re.compile(r"confident:(0?\.\d+|1(?:\.0*)?)")
"""Form of ``keep``, with the lowest confidence."""


class TextTask(Task):
    """Task on one or two texts and one label per example, or several.

    A subclass says what a label is: ``decoding``, ``outputs``, ``problem_type``, ``is_unlabeled`` and ``encode``; one
    with class names says how ``distinct_names`` are read from the data.

    Attributes:
        decoding: what the outputs mean.
        weighs_examples: whether tasks of this type take ``example_weight``.
        slice_order: order of the rows from which ``split_off`` takes the two parts.
        max_length: maximum number of tokens of an example, including special tokens; longer examples are truncated.
        columns: one or two columns of texts. If empty, they are inferred: the only text column of the data, or two
            that are named as a pair, such as sentence1 and sentence2.
        label: column of the labels.
        labels: class names in the order of the model's outputs; null reads them from the data.
        split_off: share of the training split that becomes the validation split. The rows are drawn at random, with
            the same share of each class, but are the same in every run.
        example_weight: column with the weight of each training example in the losses. Only their ratios count: they are
            scaled to a mean of 1 over the examples that are trained on.
        probabilities: columns with the probability that another model gives to each class, in the order of the model's
            outputs; of two classes, one column is enough. With ``teacher=labels`` they replace the predictions of a
            teacher. Sums that differ from 1 by up to 0.005 for each class (at most 0.05) are normalized.
        top_k: what becomes of the rest of 1 where rows lack the probabilities of some classes. ``spread``: the missing
            ones get equal parts of it. ``drop``: they get 0, and the others are divided by their sum. null refuses
            objects that lack a class, and leaves rows out in which a column is empty.
        logits: as ``probabilities``, but with raw outputs before the softmax; for regression, one column of scores.
        answers: columns with a label that another model names, such as samples of a language model. Their shares
            become probabilities; for regression, their mean is the score.
        keep: training examples to use. ``confident:0.8`` takes those whose most probable class has a probability of at
            least 0.8; with several labels, those where each label is present or absent with such a probability.
        calibrate: divide the scores by the temperature that fits the gold labels of the first validation split best,
            where it has the columns too.
        no_answer: values of ``answers``, besides empty ones, that mean that there is no answer.
        drop_leaks: leave training texts out that are near copies of a validation or test text, see ``near_copies``.
        gold: splits that have gold labels. ``all``; ``evaluation``: all but the training split; ``none``: the label
            that the scores favor takes the place of a gold label in all splits, so that metrics are the agreement with
            these scores. null is ``all`` if the training split has a label column, else ``evaluation``.
    """

    decoding: ClassVar[Decoding] = Number()
    example_fields = SCORE_FIELDS | frozenset(
        {"columns", "label", "labels", "type", "max_length", "version", "example_weight", "leaks"}
    )
    inferred_fields: ClassVar[tuple[str, ...]] = ("gold",)
    weighs_examples: ClassVar[bool] = True
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    problem_type: ClassVar[ProblemType] = "regression"
    slice_order: ClassVar[str] = SHUFFLED

    max_length: int = Field(ge=4)
    columns: list[str] = Field(default_factory=list, max_length=2)
    label: str = LABEL
    labels: list[str] | None = None
    split_off: float | None = Field(None, gt=0, lt=1)
    example_weight: str | None = None
    probabilities: list[str] | None = None
    top_k: Literal["spread", "drop"] | None = None
    logits: list[str] | None = None
    answers: list[str] | None = None
    no_answer: list[str] | None = None
    keep: str | None = None
    calibrate: bool | None = None
    drop_leaks: bool | None = None
    gold: Literal["all", "evaluation", "none"] | None = None

    _names_are_text = field_validator("labels", mode="before")(names_as_text)

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
        if train != name or len(validation) > 1 or any(key != split for key, split in validation.items()):
            splits = [f"task.train={train}", *(f"task.validation.{key}={split}" for key, split in validation.items())]
            problem = f"divides a whole split into training and validation, but there is {', '.join(splits)}"
            raise UserError("task.split_off", share, problem, "Leave it out, or the other options of splits.")
        return {**fields, "train": train_part, "validation": {VALIDATION: validation_part}}

    @model_validator(mode="after")
    def _columns_and_class_names_fit(self) -> Self:
        weight, roles = self.example_weight, dict.fromkeys(self.prediction_columns, "predictions")
        roles |= dict.fromkeys(self.label_columns, "the label")
        if weight is not None and (not self.weighs_examples or weight in roles):
            problem = f"holds {roles[weight]}" if weight in roles else f"a task of type {self.type} has no such weights"
            raise UserError("task.example_weight", weight, problem, "Name another column, or leave it out.")
        roles |= {weight: "weights"} if weight is not None else {}
        if name := next((name for name in self.columns if name in roles), None):
            problem = f"the column '{name}' holds {roles[name]}, which no model may read"
            raise UserError("task.columns", format_typed(self.columns), problem, "Name only columns of texts.")
        if self.labels is not None and not self.has_classes:
            problem = f"a {self.type} task has no class names"
            raise UserError("task.labels", format_typed(self.labels), problem, override("task.labels", None))
        if self.labels is not None:
            check_names(self.labels, self.type, getattr(self, "class_weights", None))
        return self

    @model_validator(mode="after")
    def _options_of_scores_agree(self) -> Self:
        forms, columns = [name for name in FORMS if getattr(self, name)], format_typed(self.prediction_columns)
        example = override("task.probabilities", ["<p_no>", "<p_yes>"])
        if len(forms) > 1:
            problem = f"cannot be combined with task.{forms[1]}"
            raise UserError(f"task.{forms[0]}", columns, problem, "Keep one of them.")
        uses = {"keep": self.keep, "calibrate": self.calibrate, "gold": "none" if self.gold == "none" else None}
        for name, value in uses.items():
            if value and not forms:
                raise UserError(f"task.{name}", value, "needs columns of scores", example)
        no_probabilities = f"task.type={self.type} has no probabilities"
        if self.probabilities and not self.decoding.has_probabilities:
            raise UserError("task.probabilities", columns, no_probabilities, "Raw outputs: task.logits.")
        if self.keep and not self.decoding.has_probabilities:
            raise UserError("task.keep", self.keep, no_probabilities, "Leave it out.")
        if self.keep and not CONFIDENT.fullmatch(self.keep):
            remedy = override("task.keep", "confident:0.8")
            raise UserError("task.keep", self.keep, "must be confident:<lowest probability>", remedy)
        if self.top_k and not (self.probabilities and isinstance(self.decoding, OneClass)):
            problem = "needs columns of probabilities of classes, of which an example has one"
            raise UserError("task.top_k", self.top_k, problem, example)
        if self.calibrate and (self.gold == "none" or self.answers):
            raise UserError("task.calibrate", True, "needs probabilities or raw outputs, and gold labels", example)
        if self.select_on == HELD_OUT and not self.has_train_labels:
            problem = "holds out training examples, but these have no gold labels (task.gold=evaluation)"
            raise UserError("task.select_on", HELD_OUT, problem, override("task.select_on", "validation"))
        return self

    # Columns of the data

    def resolved(self) -> Self:
        task = super().resolved()._with_gold()
        if not task.columns:
            task = type(task)(**task.model_dump() | infer_columns(task))
        if task.has_classes and task.labels is None:
            task = type(task)(**task.model_dump() | {"labels": task.class_names()})
        return task

    def _with_gold(self) -> Self:
        """Return the task with ``gold``, which is read from the names of the columns.

        Raises:
            UserError: neither the training split nor the first validation split has a label column.
        """
        if self.gold is not None or (self.columns and not self.prediction_columns):
            return self

        names, split = column_names(self, self.inferred_from), next(iter(self.validation.values()))
        if find_label(self.label_columns, self.label_candidates(names)) is not None:
            return self.model_copy(update={"gold": "all"})
        others = [] if parse_split(split)[0] == parse_split(self.train)[0] else column_names(self, split)
        if find_label(self.label_columns, self.label_candidates(others)) is not None:
            return type(self)(**self.model_dump() | {"gold": "evaluation"})
        if not self.prediction_columns:
            infer_label(self.label_columns, names)
        problem = f"neither split '{self.train}' nor '{split}' has it: the data have {listed_names(names)}"
        remedy = "Name the column of gold labels, or take the labels from the scores: " + override("task.gold", "none")
        raise UserError("task.label", format_typed(self.label_columns), problem, remedy)

    def label_candidates(self, names: Sequence[str]) -> list[str]:
        """Return the names of columns that may be labels: those of scores may not, unless they are named as labels."""
        return [name for name in names if name not in self.prediction_columns or name in self.label_columns]

    @property
    def labeled_split(self) -> str:
        """A split that has labels: the training split, if it has them."""
        return self.train if self.has_train_labels else next(iter(self.validation.values()))

    @property
    def label_columns(self) -> list[str]:
        return [self.label]

    @property
    def weight_column(self) -> str | None:
        return self.example_weight

    @property
    def prediction_columns(self) -> list[str]:
        return self.probabilities or self.logits or self.answers or []

    @property
    def prediction_key(self) -> str:
        """Configuration key that names the columns of scores."""
        return next((f"task.{name}" for name in FORMS if getattr(self, name)), "task.probabilities")

    @property
    def optional_columns(self) -> list[str]:
        return self.prediction_columns

    def required_columns(self, split: str) -> dict[str, str]:
        """Return the required columns with their fields; a test split does not need the label column."""
        # Names are compared without slice and dataset: the reader asks with the name of the split in its own files.
        is_training = parse_split(self.locate(split)[1])[0] == parse_split(self.locate(self.train)[1])[0]
        unlabeled = self.is_test(split) or self.gold == "none" or (is_training and not self.has_train_labels)
        weight = {self.example_weight: "example_weight"} if self.example_weight and is_training else {}
        labels = dict.fromkeys(() if unlabeled else self.label_columns, "label")
        return dict.fromkeys(self.columns, "columns") | labels | weight

    @property
    def has_train_labels(self) -> bool:
        return self.gold != "evaluation"

    @property
    def lacks_labels(self) -> bool:
        return self.gold in ("evaluation", "none")

    @property
    def reads_labels_for_transfer(self) -> bool:
        return bool(self.calibrate or self.drop_leaks)

    @property
    def ignored_options(self) -> frozenset[str]:
        return super().ignored_options | (frozenset() if self.answers else {"no_answer"})

    def spec(self) -> dict[str, Any]:
        """Return the spec of every task; ``train`` and ``validation`` hold the effect of ``split_off``.

        ``fitted_on`` is the split that calibrates: ``validation`` does not tell which of its splits is the first.
        """
        unset = {"split_off"} | {name for name in ("no_answer", "calibrate", "top_k") if not getattr(self, name)}
        unset |= {"drop_leaks"} | ({"gold"} if self.gold == "all" else set())
        fit: dict[str, Any] = {"fitted_on": next(iter(self.validation.values()))} if self.calibrate else {}
        if self.drop_leaks:  # test texts then determine the training data
            fit = fit | {"leaks": sorted(map(self.test_content, self.test.values()))}
        return {name: value for name, value in super().spec().items() if name not in unset} | fit

    def leaks(self, texts: Sequence[Sequence[str]]) -> np.ndarray:
        """Return which training texts, C lists of N, are left out as near copies of a validation or test text."""
        is_leak = np.zeros(len(texts[0]), dtype=bool)
        if self.drop_leaks:
            own = sketches(texts)
            for split in sorted({*self.validation.values(), *self.test.values()}):
                with recorded_tables():  # it is read for itself too
                    others = sketches(example_columns(read_table(self, split), self.columns, split))
                is_leak[near_copies(own, others)[0]] = True
            if is_leak.all():
                problem = f"all {len(is_leak):,} training texts are near copies of validation or test texts"
                raise UserError("task.drop_leaks", True, problem, "Leave it out, or name other splits.")
        return is_leak

    # Labels

    def is_unlabeled(self, value: Any) -> bool:
        """Return whether a value of the label column means that the label is missing."""
        return is_blank(value)

    def encode(self, values: list[Any], table: SplitTable, split: str) -> np.ndarray:
        """Return the labels in the form that the losses use, one row for each example.

        Raises:
            UserError: a value is not a label of the task.
        """
        raise NotImplementedError

    def class_names(self) -> list[str]:
        """Return the class names of the data, for a type that has classes."""
        return read_names(self)

    def distinct_names(self, table: SplitTable) -> list[str]:
        """Return the distinct labels of the training split, sorted, for a type that has classes."""
        raise NotImplementedError

    @property
    def names(self) -> list[str]:
        """The class names of the resolved task; empty without classes."""
        return self.labels or []

    def label_values(self, table: SplitTable) -> list[Any]:
        """Return the label values of a split as stored in the data; empty if there is no label column."""
        return typed_values(table, self.label)

    def gold_labels(self, table: SplitTable, outputs: np.ndarray | None, split: str) -> np.ndarray | None:
        """Return the labels of a split: those of the label column, or those that scores favor (``gold``).

        Args:
            outputs: scores of the rows (N, C); None if there are none.
        Raises:
            UserError: as ``encoded_labels``; or a split that needs scores has none.
        """
        if self.gold == "none":
            if outputs is None and not self.is_test(split):
                score_table(self, split)
            return None if outputs is None else self.decoding.labels(outputs)
        return None if split == self.train and not self.has_train_labels else self.encoded_labels(table, split)

    def encoded_labels(self, table: SplitTable, split: str) -> np.ndarray | None:
        """Return the labels of a split as ``encode`` does, one row for each example.

        Returns:
            None for a test split without labels: no such column, or all values empty or -1 (as on the hub).
        Raises:
            UserError: labels are missing, in a test split only some of them; or a label cannot be encoded.
        """
        values, key = self.label_values(table), self.label
        if self.is_test(split) and all(is_blank(value) or value == -1 for value in values):
            return None
        if not values:
            problem = f"split '{split}' has no labels (task.gold={self.gold})"
            raise UserError("task.label", key, problem, "Validate on a labeled split.")
        if missing := [value for value in distinct(values) if self.is_unlabeled(value)]:
            mark = next((value for value in missing if not is_blank(value)), "an empty cell")
            count = sum(value in missing for value in values)
            problem = f"{count} of {len(values)} rows of split '{split}' have no label, but {mark}"
            remedy = "Remove these rows, choose a labeled split, or if that is a class, name all in task.labels."
            raise UserError("task.label", key, problem, remedy)
        return self.encode(values, table, split)

    # From rows to batches

    def used_rows(self, table: SplitTable, split: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Return which rows of a split are examples (N,), and the labels of these examples.

        Rows without a score are left out of the training split, and of all splits if ``gold`` is ``none``.
        """
        is_used, outputs = np.ones(max(map(len, table.columns.values())), dtype=bool), None
        has_scores = bool(self.prediction_columns) and all(name in table.columns for name in self.prediction_columns)
        if has_scores and (split == self.train or self.gold == "none"):
            scores = read_scores(self, table, split)
            is_used, outputs = scores.is_used, scores.outputs[scores.is_used]
        elif self.drop_leaks and split == self.train:
            is_used &= ~self.leaks(example_columns(table, self.columns, split))
        return is_used, self.gold_labels(selected_rows(table, is_used), outputs, split)

    def examples(self, split: str) -> Examples:
        table = read_table(self, split)
        weights = self._weights(table, split)
        is_used, labels = self.used_rows(table, split)
        texts = example_columns(selected_rows(table, is_used), self.columns, split)
        if not self.is_test(split) and not any("".join(column).strip() for column in texts):
            problem = f"all {len(texts[0]):,} texts of split '{split}' are empty"
            raise UserError("task.columns", format_typed(self.columns), problem, "Name the column of the texts.")
        return Examples(texts, labels, None if weights is None else weights[is_used])

    def _weights(self, table: SplitTable, split: str) -> np.ndarray | None:
        """Return the weights (N,) of the training examples in a table; None for another split, or without weights.

        Raises:
            UserError: a weight is no number of 0 or more, or all are 0.
        """
        if self.example_weight is None or split != self.train:
            return None

        values = table.columns[self.example_weight]
        weights = numbers(values)
        if len(rows := np.flatnonzero(~(weights >= 0))):
            problem = f"row {rows[0]} of split '{split}' holds {values[rows[0]]!r}, which is no number of 0 or more"
            raise UserError("task.example_weight", self.example_weight, problem, "Repair or remove such rows.")
        if not weights.any():
            problem = f"all examples of split '{split}' have the weight 0"
            raise UserError("task.example_weight", self.example_weight, problem, "Name another column.")
        return weights

    def transfer(self, transfer: "TransferSet") -> Examples:
        if not self.prediction_columns:
            examples = transfer.examples()
            remaining = np.flatnonzero(~self.leaks(examples.texts)).tolist()
            return Examples([[texts[row] for row in remaining] for texts in examples.texts], None)
        table = transfer_table(self, transfer)
        rows = selected_rows(table, read_scores(self, table, TRANSFER).is_used)
        return Examples(transfer.texts([rows.columns[name] for name in text_names(self, table)]), None)

    @cached_property
    def temperature(self) -> float:
        """The temperature of ``calibrate``."""
        return fit_temperature(self)

    def write(self, folder: Path, examples: Examples, tokenizer: Any) -> int:
        from distill_runner.datasets.splits import TokenSplit

        return TokenSplit.write(folder, examples, tokenizer, self.max_length)

    def open(self, folder: Path, views: int | None = None) -> Any:
        from distill_runner.datasets.splits import TokenSplit

        return TokenSplit(folder)

    def account(self, split: str, examples: Examples, tables: Sequence[TableRecord]) -> SplitAccount:
        account = super().account(split, examples, tables)
        account.rows = len(examples)
        account.unread = [name for name in account.unread if name != self.example_weight or split != self.train]
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
        if examples.labels is None or len(examples) < MIN_ROWS:
            return []
        rows = np.unique(np.linspace(0, len(examples) - 1, MAX_SEARCHED).astype(int)).tolist()
        labels = [*map(str, np.asarray(examples.labels)[rows].tolist())]
        if len(set(labels)) < 2 or (not self.names and len(set(labels)) > len(labels) / FEW_VALUES):
            return []
        hints = [leak([texts[row] for row in rows], labels) for texts in examples.texts]
        return [f"{name} gives the label away: {hint}" for name, hint in zip(self.columns, hints, strict=True) if hint]

    def hashes(self, examples: Examples, folder: Path | None) -> np.ndarray | None:
        return sketches(examples.texts)

    # The model and what its outputs mean

    @property
    def head(self) -> Head:
        return Head(self.auto_class, tuple(self.names) or ("score",), self.problem_type, self.name)

    def label_counts(self, outputs: np.ndarray, split: "Split") -> dict[str, np.ndarray]:
        if not self.has_classes:
            return {}
        sets = self.decoding.labels(outputs), np.asarray(split.labels)
        predicted, actual = (self.decoding.indicators(labels, len(self.names)).T > 0 for labels in sets)
        return dict(zip(self.names, np.stack([predicted & actual, predicted, actual], axis=-1), strict=True))

    def prediction_texts(self, outputs: np.ndarray, names: bool = True) -> list[str]:
        return self.decoding.texts(outputs, self.names if names else [*map(str, range(len(self.names)))])

    def prediction_file(
        self, outputs: np.ndarray, split: "Split", examples: Examples, suffix: str, columns: Mapping[str, list[Any]]
    ) -> str | bytes:
        """Return CSV, one row per example: its number, the prediction, the probability of each class, and ``columns``.

        A column whose name the predictions have, such as ``index``, gets the prefix ``input_``.
        """
        probabilities = self.decoding.probabilities(outputs) if self.has_classes else np.zeros((len(outputs), 0))
        texts = self.prediction_texts(outputs) if self.has_classes else [*map(str, outputs[:, 0])]
        header = ["index", "prediction", *(f"p_{name}" for name in self.names)]
        cells: list[Iterable[Any]] = [range(len(texts)), texts]
        cells += [[f"{value:.6g}" for value in values] for values in probabilities.T]
        if all(len(values) == len(texts) for values in columns.values()):  # else a prediction is not of one row
            header += [f"input_{name}" if re.sub("^(input_)+", "", name) in header else name for name in columns]
            cells += [map(_csv_cell, values) for values in columns.values()]
        content = io.StringIO()
        csv.writer(content, lineterminator="\n").writerows([header, *zip(*cells, strict=True)])
        return content.getvalue()

    def example_predictions(self, outputs: np.ndarray, split: "Split") -> ExamplePredictions:
        """Return the predictions; several labels are correct together, and have the product of their probabilities."""
        if not self.has_classes:
            return super().example_predictions(outputs, split)
        labels, predicted = np.asarray(split.labels), self.decoding.labels(outputs)
        texts, confidence = self.prediction_texts(outputs), self.decoding.likelihood(outputs, predicted)
        label_texts = self.prediction_texts(self.decoding.indicators(labels, len(self.names)))
        return ExamplePredictions(
            correct=(predicted == labels).reshape(len(labels), -1).all(axis=1),
            label_probability=self.decoding.likelihood(outputs, labels),
            prediction_text=lambda number: f"{texts[number] or 'no label'} ({confidence[number]:.4f})",
            label_text=lambda number: label_texts[number] or "no label",
        )


def _csv_cell(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else str(value)
    return "" if is_missing(value) else text


def example_columns(table: SplitTable, columns: Sequence[str], split: str) -> list[list[str]]:
    """Return the columns of texts of a split.

    Raises:
        UserError: a value is missing or is no text, such as a list of tokens.
    """
    texts = []
    for column in columns:
        texts.append(list[str]())
        for row, value in enumerate(table.columns[column]):
            try:
                texts[-1].append(value if isinstance(value, str) else text_of(value))
                texts[-1][-1].encode()
            except ValueError as error:
                is_cut = isinstance(error, UnicodeEncodeError)
                content = "half of a surrogate pair, which is no character" if is_cut else error
                problem = f"row {row} of split '{split}' holds {content}"
                raise UserError("task.columns", column, problem, "Remove or repair such rows.") from error
    return texts
