"""Scores of another model in columns of the data, and training splits that have no gold label.

The columns hold probabilities, raw outputs, or hard answers such as those of a language model. Each becomes outputs of
the task's head (N, C). Rows without a score are left out of the examples and of the outputs alike.
"""

import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import model_validator

from distill_runner.common.errors import UserError, format_list, quantity
from distill_runner.datasets.readers.dataset import parse_split
from distill_runner.datasets.readers.table import recorded_tables
from distill_runner.datasets.readers.tables import SplitTable, column_names, listed_names, read_table
from distill_runner.datasets.tokenization import Examples
from distill_runner.tasks.account import MAX_LISTED
from distill_runner.tasks.calibration import class_loss, fitted_temperature
from distill_runner.tasks.columns import LABEL, infer_label
from distill_runner.tasks.score_columns import class_of_column, numbers_in_columns
from distill_runner.tasks.splits import HELD_OUT
from distill_runner.tasks.task import Task

if TYPE_CHECKING:
    from distill_runner.datasets.corpora import TransferSet

TRANSFER = "transfer"
"""Name of the split that stands for a transfer set."""
ROUNDING, MAX_ROUNDING = 0.005, 0.05
"""Tolerance for the sum of C probabilities: C times half of the second decimal, and at most 0.05."""
EXACT = 1e-6
"""Sums that differ less from 1 are left as they are: float32 does not hold more digits."""
SCORE_FIELDS = frozenset({"probabilities", "logits", "answers", "no_answer", "keep", "calibrate", "fitted_on", "gold"})
"""Entries of a task's spec on which the rows with a score depend."""
Gold = Literal["all", "evaluation", "none"]
CONFIDENT = re.compile(r"confident:(0?\.\d+|1(?:\.0*)?)")
"""Form of ``keep``, with the lowest confidence."""


@dataclass(frozen=True)
class Scores:
    """Scores of N rows as outputs of a task's head.

    Attributes:
        outputs: (N, C), float32; rows without a score hold NaN.
        has_score: (N,), whether a row has a score.
        is_used: (N,), whether a row is used: it has a score, which ``keep`` keeps.
        remarks: what was taken for what, normalized or left out.
    """

    outputs: np.ndarray
    has_score: np.ndarray
    is_used: np.ndarray
    remarks: list[str] = field(default_factory=list)


class ScoredTask(Task):
    """Base class of tasks whose data may hold the scores of another model, and may lack gold labels.

    Attributes:
        label: column of the labels.
        probabilities: columns with the probability that another model gives to each class, in the order of the model's
            outputs; of two classes, one column is enough. With ``teacher=labels`` they replace the predictions of a
            teacher. Sums that differ from 1 by up to 0.005 for each class (at most 0.05) are normalized.
        logits: as ``probabilities``, but with raw outputs before the softmax; for regression, one column of scores.
        answers: columns with a label that another model names, such as samples of a language model. Their shares
            become probabilities; for regression, their mean is the score.
        keep: training examples to use. ``confident:0.8`` takes those whose most probable class has a probability of at
            least 0.8; with several labels, those where each label is present or absent with such a probability.
        calibrate: divide the scores by the temperature that fits the gold labels of the first validation split best,
            where it has the columns too.
        no_answer: values of ``answers``, besides empty ones, that mean that there is no answer.
        gold: splits that have gold labels. ``all``; ``evaluation``: all but the training split; ``none``: the label
            that the scores favor takes the place of a gold label in all splits, so that metrics are the agreement with
            these scores. null is ``all`` if the training split has a label column, else ``evaluation``.
    """

    label: str = LABEL
    probabilities: list[str] | None = None
    logits: list[str] | None = None
    answers: list[str] | None = None
    no_answer: list[str] | None = None
    keep: str | None = None
    calibrate: bool | None = None
    gold: Gold | None = None

    score_kinds: ClassVar[tuple[str, ...]] = ("probabilities", "logits", "answers")

    @model_validator(mode="after")
    def _has_one_form_of_scores(self) -> Self:
        first, *others = [name for name in self.score_kinds if getattr(self, name)] or [""]
        if others:
            columns, problem = format_list(getattr(self, first)), f"cannot be combined with task.{others[0]}"
            raise UserError(f"task.{first}", columns, problem, "Keep one of them.")
        if self.keep is not None and not (first and CONFIDENT.fullmatch(self.keep)):
            problem = "must be confident:<lowest probability>" if first else "needs columns of scores"
            raise UserError("task.keep", self.keep, problem, "task.keep=confident:0.8 task.probabilities=[p_no,p_yes]")
        if self.calibrate and (self.gold == "none" or not (self.probabilities or self.logits)):
            problem = "needs probabilities or raw outputs, and gold labels" if first else "needs columns of scores"
            raise UserError("task.calibrate", True, problem, "Leave it out, or task.probabilities=[p_no,p_yes].")
        if self.gold == "none" and not first:
            problem = "takes the labels from scores, but no column of scores is named"
            raise UserError("task.gold", "none", problem, "Name them: task.probabilities, task.logits or task.answers.")
        if self.gold == "evaluation" and self.select_on == HELD_OUT:
            problem = "holds out training examples, but these have no gold labels (task.gold=evaluation)"
            raise UserError("task.select_on", HELD_OUT, problem, "task.select_on=validation")
        return self

    @property
    def has_train_labels(self) -> bool:
        return self.gold != "evaluation"

    @property
    def reads_labels_for_transfer(self) -> bool:
        return bool(self.calibrate)

    @property
    def prediction_key(self) -> str:
        """Configuration key that names the columns of scores."""
        return next((f"task.{name}" for name in self.score_kinds if getattr(self, name)), "task.probabilities")

    @property
    def prediction_columns(self) -> list[str]:
        return self.probabilities or self.logits or self.answers or []

    @property
    def optional_columns(self) -> list[str]:
        return self.prediction_columns

    @property
    def lacks_labels(self) -> bool:
        return self.gold in ("evaluation", "none")

    @property
    def ignored_options(self) -> frozenset[str]:
        return super().ignored_options | (frozenset() if self.answers else {"no_answer"})

    def spec(self) -> dict[str, Any]:
        """Return the spec of every task, with the options on scores only if they are set.

        ``fitted_on`` is the split that calibrates: ``validation`` does not tell which of its splits is the first.
        """
        unset = {"no_answer"} if not self.no_answer else set()
        unset |= {"gold"} if self.gold == "all" else set()
        unset |= set() if self.calibrate else {"calibrate"}
        fit = {"fitted_on": next(iter(self.validation.values()))} if self.calibrate else {}
        return {name: value for name, value in super().spec().items() if name not in unset} | fit

    @property
    def data_summary(self) -> dict[str, Any]:
        return super().data_summary | ({"gold": self.gold} if self.gold not in (None, "all") else {})

    def with_gold(self) -> Self:
        """Return the task with ``gold``, which is read from the names of the columns.

        Raises:
            UserError: neither the training split nor the first validation split has a label column.
        """
        if self.gold is not None:
            return self
        if self.columns and not self.prediction_columns:
            return self
        names = column_names(self, self.train)
        if self._has_label(names):
            return self.model_copy(update={"gold": "all"})
        split = next(iter(self.validation.values()))
        if parse_split(split)[0] != parse_split(self.train)[0] and self._has_label(column_names(self, split)):
            return type(self)(**self.model_dump() | {"gold": "evaluation"})
        if not self.prediction_columns:
            infer_label(self.label_columns, names)
        problem = f"neither split '{self.train}' nor '{split}' has it: the data have {listed_names(names)}"
        remedy = "Name the column of gold labels, or task.gold=none to score the agreement with the scores."
        raise UserError("task.label", format_list(self.label_columns), problem, remedy)

    def label_candidates(self, names: Iterable[str]) -> list[str]:
        """Return the names of columns that may be labels: those of scores may not, unless they are named as labels."""
        return [name for name in names if name not in self.prediction_columns or name in self.label_columns]

    def _has_label(self, names: Sequence[str]) -> bool:
        """Return whether the label columns are among ``names``; a synonym counts where it is the only one."""
        try:
            return all(name in names for name in infer_label(self.label_columns, self.label_candidates(names)))
        except UserError as error:
            if "could be" in error.problem:
                raise
            return False

    @property
    def labeled_split(self) -> str:
        """A split that has labels: the training split, if it has them."""
        return self.train if self.has_train_labels else next(iter(self.validation.values()))

    @abstractmethod
    def is_unlabeled(self, value: Any) -> bool:
        """Return whether a value of the label column means that the label is missing."""

    @abstractmethod
    def encode(self, values: list[Any], table: SplitTable, split: str) -> np.ndarray:
        """Return the labels in the form that the losses use, one row for each example.

        Raises:
            UserError: a value is not a label of the task.
        """

    @abstractmethod
    def label_values(self, table: SplitTable) -> list[Any]:
        """Return the label values of a split as stored in the data; empty if there is no label column."""

    @abstractmethod
    def gold_labels(self, table: SplitTable, outputs: np.ndarray | None, split: str) -> np.ndarray | None:
        """Return the labels of a split: those of the label column, or those that scores favor (``gold``).

        Args:
            outputs: scores of the rows, as ``with_scores`` returns them.
        Raises:
            UserError: labels are missing or cannot be encoded; or a split that needs scores has none.
        """

    # --- From columns to outputs of the head

    def to_logits(self, probabilities_NC: np.ndarray, split: str, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the logits (N, C) of another model's probabilities (N, C).

        Args:
            rows: (N,), numbers of the rows in the split, for messages; None if they are 0 to N - 1.
        Raises:
            UserError: the values are not probabilities, or the outputs of this task type are not.
        """
        columns = format_list(self.prediction_columns)
        raise UserError(self.prediction_key, columns, f"task.type={self.type} has no probabilities")

    def normalized(self, probabilities_NC: np.ndarray) -> tuple[np.ndarray, list[str]]:
        """Return probabilities with small errors of rounding removed, and what was changed."""
        return probabilities_NC, []

    def outputs_of_answers(self, means_NC: np.ndarray, split: str) -> np.ndarray:
        """Return outputs for the means of the labels that answers name, see ``label_indicators``."""
        return self.to_logits(means_NC, split)

    def label_indicators(self, labels: np.ndarray) -> np.ndarray:
        """Return encoded labels of N rows as numbers (N, C), whose mean over several answers is their share."""
        return labels.reshape(len(labels), -1).astype(np.float64)

    def favored_labels(self, outputs: np.ndarray) -> np.ndarray:
        """Return the labels that outputs (N, C) favor, in the form of ``Examples.labels``.

        Raises:
            UserError: outputs of this task type favor no label.
        """
        raise UserError("task.gold", self.gold, f"task.type={self.type} has no labels that scores favor")

    def ordered_outputs(self, values: np.ndarray, key: str) -> tuple[np.ndarray, list[str]]:
        """Return the values of columns (N, K) as those of the C outputs, in their order, and what was taken.

        Raises:
            UserError: there is another number of columns, or their names say another order.
        """
        columns = self.prediction_columns
        if len(columns) != self.head.num_labels:
            problem = f"names {quantity(len(columns), 'column')}, but the task has {self.head.num_labels} outputs"
            raise UserError(key, format_list(columns), problem, f"In their order: {', '.join(self.head.names or ())}.")
        classes = [class_of_column(column, self.head.names or ()) for column in columns]
        if None not in classes and len(set(classes)) == len(classes) and classes != sorted(classes):  # type: ignore[type-var]
            order = [columns[classes.index(number)] for number in range(len(columns))]
            problem = f"are named in another order than the classes, {', '.join(self.head.names or ())}"
            remedy = f"{key}={format_list(order)}, or rename the columns."
            raise UserError(key, format_list(columns), problem, remedy)
        return values, []

    def scores(self, table: SplitTable, split: str) -> Scores:
        """Return the scores in a table that has the prediction columns.

        Raises:
            UserError: no row has a score, or a value is none.
        """
        outputs, remarks = self.raw_outputs(table, split)
        if self.calibrate:
            temperature = self.temperature
            outputs = outputs / temperature
            remarks.append(f"calibrated: divided by the temperature {temperature:.4g}")
        has_score = ~np.isnan(outputs).any(axis=1)
        if missing := int((~has_score).sum()):
            if missing == len(outputs):
                problem = f"no row of split '{split}' has a score"
                raise UserError(self.prediction_key, format_list(self.prediction_columns), problem)
            what = "an answer" if self.answers else "a score"
            remarks.append(f"{missing:,} of {quantity(len(outputs), 'row', ',')} without {what} left out")
        is_used = has_score
        if self.keep is not None and split in (self.train, TRANSFER):
            is_used = has_score.copy()
            is_used[has_score] = self.confidence(outputs[has_score]) >= float(self.keep.partition(":")[2])
            remarks.append(self._coverage(outputs, has_score, is_used))
        if not is_used.any():
            problem = f"leaves no row of split '{split}'"
            raise UserError("task.keep", self.keep, problem, "Take a lower probability.")
        return Scores(outputs.astype(np.float32), has_score, is_used, remarks)

    def raw_outputs(self, table: SplitTable, split: str) -> tuple[np.ndarray, list[str]]:
        """Return the scores (N, C) before calibration, NaN in rows without a score, and remarks on them."""
        return self._answered(table, split) if self.answers else self._scored(table, split)

    @cached_property
    def temperature(self) -> float:
        """The temperature that calibrates the scores, fitted on the first validation split.

        Raises:
            UserError: it lacks the columns, scores or gold labels.
        """
        name, split = next(iter(self.validation.items()))
        with recorded_tables():  # not among what is read of the split whose scores are scaled
            table = self.score_table(split)
        outputs, _ = self._scored(table, split)
        has_score = ~np.isnan(outputs).any(axis=1)
        if not has_score.any():
            problem = f"no row of task.validation.{name} has a score to fit a temperature on"
            raise UserError("task.calibrate", True, problem, "Leave it out.")
        labels = self.gold_labels(selected_rows(table, has_score), None, split)
        if labels is None or (np.issubdtype(labels.dtype, np.floating) and labels.ndim == 1):
            problem = f"task.validation.{name} has no classes to fit a temperature on"
            raise UserError("task.calibrate", True, problem, "Leave it out.")
        return fitted_temperature(lambda temperature: class_loss(outputs[has_score] / temperature, labels))

    def confidence(self, outputs: np.ndarray) -> np.ndarray:
        """Return the probability (N,) of what outputs favor.

        Raises:
            UserError: outputs of this task type are no probabilities.
        """
        raise UserError("task.keep", self.keep, f"task.type={self.type} has no probabilities")

    def _coverage(self, outputs: np.ndarray, has_score: np.ndarray, is_used: np.ndarray) -> str:
        """Return how many rows ``keep`` keeps, of all and of each class that the scores favor."""
        total, num_used = int(has_score.sum()), int(is_used.sum())
        text = f"{self.keep} keeps {num_used:,} of {total:,} ({num_used / total:.1%})"
        favors = self.label_indicators(self.favored_labels(outputs)) > 0
        shares = [
            f"{name} {int((is_used & own).sum()):,} of {int((has_score & own).sum()):,}"
            for name, own in zip(self.head.names or (), favors.T, strict=True)
        ]
        return f"{text}: {', '.join(shares)}" if len(shares) <= MAX_LISTED else text

    def _scored(self, table: SplitTable, split: str) -> tuple[np.ndarray, list[str]]:
        key = self.prediction_key
        values = numbers_in_columns(self.prediction_columns, table.columns, key, split)
        has_score = ~np.isnan(values).any(1)
        numbers, remarks = self.ordered_outputs(values[has_score], key)
        if self.probabilities:
            numbers, changes = self.normalized(numbers)
            numbers = self.to_logits(numbers, split, np.flatnonzero(has_score))
            remarks = remarks + changes
        return spread(numbers, np.asarray(has_score)), remarks

    def _answered(self, table: SplitTable, split: str) -> tuple[np.ndarray, list[str]]:
        """Return the outputs for the shares of the labels that the answers of each row name."""
        total = np.zeros((len(table.columns[self.prediction_columns[0]]), self.head.num_labels))
        counts = np.zeros(len(total), dtype=np.int64)
        skipped = {word.casefold() for word in self.no_answer or ()}
        for name in self.prediction_columns:
            task = self.model_copy(update={"label": name, "gold": "all", "class_weights": None})
            own = SplitTable({name: table.columns[name]}, None, table.untyped)
            values = task.label_values(own)
            has_answer = np.array([not task.is_no_answer(value, skipped) for value in values], dtype=bool)
            try:
                labels = task.encode([value for value, one in zip(values, has_answer, strict=True) if one], own, split)
            except UserError as error:
                problem = error.problem.replace("has the label", "has the answer")
                remedy = "List what is no answer in task.no_answer, such as 'task.no_answer=[unclear]'."
                raise UserError("task.answers", name, problem, remedy) from error
            total[has_answer] += self.label_indicators(labels)
            counts = counts + has_answer.astype(int)
        has_score: np.ndarray = np.greater(counts, 0)
        means = total[has_score] / counts[has_score][:, None]
        low, high = counts[has_score].min(initial=99), counts[has_score].max(initial=0)
        remarks = (
            [f"shares of {low} to {high} answers" if low < high else f"shares of {high} answers"] if high > 1 else []
        )
        return spread(self.outputs_of_answers(means, split), has_score), remarks

    def is_no_answer(self, value: Any, words: set[str]) -> bool:
        return self.is_unlabeled(value) or (isinstance(value, str) and value.strip().casefold() in words)

    # --- Rows with a score, of splits and of transfer sets

    def with_scores(self, table: SplitTable, split: str) -> tuple[SplitTable, np.ndarray | None]:
        """Return the rows of a table that are used, and their scores (N, C); None if the table has no scores.

        Rows without a score are left out of the training split, and of all splits if ``gold`` is ``none``.
        """
        if not self.prediction_columns or any(name not in table.columns for name in self.prediction_columns):
            return table, None
        if split != self.train and self.gold != "none":
            return table, None
        scores = self.scores(table, split)
        return selected_rows(table, scores.is_used), scores.outputs[scores.is_used]

    def column_logits(self, split: str) -> np.ndarray:
        scores = self.scores(self.score_table(split), split)
        return scores.outputs[scores.is_used]

    def score_table(self, split: str) -> SplitTable:
        """Return the table of a split with its columns of scores.

        Raises:
            UserError: it lacks one of them.
        """
        return read_table(self, split, dict.fromkeys(self.prediction_columns, self.prediction_key))

    def transfer_table(self, transfer: "TransferSet") -> SplitTable:
        """Return the texts of a transfer set under the names of the task's columns, and its columns of scores."""
        names, key = self.prediction_columns, self.prediction_key
        columns = transfer.inputs(dict.fromkeys(names, key))
        texts = columns[: len(columns) - len(names)]
        by_name = dict(zip([*map(str, range(len(texts))), *names], columns, strict=True))
        untyped = all(isinstance(value, str) for name in names for value in by_name[name])
        return SplitTable(by_name, None, untyped)

    def transfer(self, transfer: "TransferSet") -> Examples:
        if not self.prediction_columns:
            return transfer.examples()
        table = self.transfer_table(transfer)
        rows = selected_rows(table, self.scores(table, TRANSFER).is_used)
        num_texts = len(table.columns) - len(self.prediction_columns)
        return Examples(transfer.texts([rows.columns[str(number)] for number in range(num_texts)]), None)

    def transfer_logits(self, transfer: "TransferSet") -> np.ndarray:
        scores = self.scores(self.transfer_table(transfer), TRANSFER)
        return scores.outputs[scores.is_used]


def spread(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return ``values`` (n, C) in the places of an array (N, C) where ``rows`` (N,) is true, with NaN elsewhere."""
    spread = np.full((len(rows), *values.shape[1:]), np.nan)
    spread[rows] = values
    return spread


def selected_rows(table: SplitTable, rows: np.ndarray) -> SplitTable:
    """Return the table with the rows where ``rows`` (N,) is true."""
    if rows.all():
        return table
    numbers = np.flatnonzero(rows).tolist()
    columns = {name: [values[row] for row in numbers] for name, values in table.columns.items()}
    return replace(table, columns=columns)
