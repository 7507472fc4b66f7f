"""Numbers that the papers print, and the choice of the printed number for a result.

The folder ``published`` has one CSV file for each paper of ``titles.csv``. A file has one line per printed cell, and
one per number that only a figure or the text prints. ``splits.csv`` has the sizes of the datasets that papers use.
docs/published.md lists tables, names and errors in the papers. Scores are percentages, as printed. A line without a
task describes the model itself: millions of parameters, speed-up. An average that a paper prints is a line with
``task`` = average.
"""

import csv
import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from pydantic import field_validator

from distill_runner.common.schema import Schema


def _rows(name: str) -> list[dict[str, str]]:
    text = files("distill_runner.report").joinpath("published", f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


CHECKPOINTS = {line["name"]: line["pattern"] for line in _rows("checkpoints")}
"""Teacher's name in a paper -> regular expression for the hub id, folder or configuration name of the same model."""
# A match begins at the start of the name, or right after a slash.
FAMILIES = {line["part"]: line["model_type"] for line in _rows("families")}
"""Part of a model's name in a paper -> model type; the first part that a name contains counts."""
FRESH_TYPE = "bert"
"""Type of the students with new weights, whatever their teacher is."""
AVERAGE, MISMATCHED = "average", "mismatched"
NOT_COMPARABLE = "its teacher differs, the run trained on a part of the data, or the paper names no metric or split"
COMPLETE, PART, OTHER = "complete", "part", "other"
"""Data of a run: those that papers score and train on, a part of the training examples, or other examples."""


class PublishedCell(Schema):
    """One printed number.

    Attributes:
        table: number of the table; for a number that no table prints, its place: ``Figure 5``, ``Section 6.2``.
        method: ``a|b`` if the row has two names. None for a number that depends on no method: it describes a model of
            this size, however it is trained, or data alone.
        variant: settings in which the rows of one method differ. ``a|b`` if both values mean the same, ``-`` for a
            setting that is absent.
        student: the paper's name of the student; None in a teacher's own rows and for numbers of data alone.
        num_layers, width: size of the scored model, which is the teacher in a teacher's rows. None for a number of
            data alone.
        teacher: the paper's name of the distilled model. For a student without distillation, the teacher of the
            students that it is compared with. None if there is no teacher.
        metric: None if the paper does not name it.
        split: ``dev``, ``test``, and for MNLI also ``dev_mismatched`` and ``test_mismatched``. None if the paper does
            not name it, or if the number is not of a split.
        value: exactly as printed, including trailing zeros.
    """

    paper: str
    table: str
    method: str | None
    variant: Mapping[str, str]
    student: str | None
    num_layers: int | None
    width: int | None
    teacher: str | None
    task: str | None
    metric: str | None
    split: str | None
    value: Decimal

    @field_validator("method", "student", "num_layers", "width", "teacher", "task", "metric", "split", mode="before")
    @classmethod
    def _empty_is_none(cls, value: str) -> str | None:
        return value or None

    @property
    def is_of_a_table(self) -> bool:
        return not self.table.startswith(("Figure", "Section"))

    @field_validator("variant", mode="before")
    @classmethod
    def _settings(cls, value: str) -> dict[str, str]:
        return dict(setting.split("=") for setting in value.split())


class Published(Schema):
    """A printed number for a result.

    Attributes:
        value: in percent, as printed.
        metric: metric of the paper's number; None if the paper does not name it.
        source: paper and table.
        split: split of the paper's number, as in ``PublishedCell``.
        comparable: whether the run has the paper's teacher, and the paper names metric and split.
    """

    value: float
    metric: str | None
    source: str
    comparable: bool
    split: str | None = None


@dataclass(frozen=True)
class Quantity:
    """What a score is: the mean of a metric over splits of a task.

    Attributes:
        splits: names of the splits in results, such as the languages of a task.
        metric: None accepts any metric.
        is_test: whether the splits are test splits.
        is_part: whether the splits are some of several that the task is scored on, each with its own column.
    """

    task: str
    splits: tuple[str, ...] = ()
    metric: str | None = None
    is_test: bool = False
    is_part: bool = False

    def is_of(self, cell: PublishedCell) -> bool:
        """Whether a cell is this quantity, as far as the paper names metric and split."""
        split = "test" if self.is_test else "dev"
        if self.splits == (MISMATCHED,):
            split, tasks = f"{split}_{MISMATCHED}", {self.task}
        else:
            tasks = {f"{self.task}_{name}" for name in self.splits}
        if len(self.splits) > 1:
            is_same = cell.task == AVERAGE and _languages(cell.paper, cell.table) == tasks
        else:
            is_same = cell.task in (tasks if self.is_part else {*tasks, self.task})
        return is_same and cell.metric in (None, self.metric or cell.metric) and cell.split in (None, split)


@dataclass(frozen=True)
class ScoredModel:
    """The model that has a score, as far as it is known: sizes and type, and type and name of its teacher.

    For a teacher's own score, ``teacher`` is its name, and ``teacher_type`` its type.
    """

    num_layers: int | None = None
    width: int | None = None
    model_type: str | None = None
    teacher: str = ""
    teacher_type: str | None = None

    def is_of(self, cell: PublishedCell) -> bool:
        """Whether a cell is about a model of this size and type; a model of unknown size must have the cell's name."""
        if self.num_layers is None:
            return _is(cell.teacher, self.teacher)
        if self.num_layers != cell.num_layers or (self.width and cell.width not in (None, self.width)):
            return False
        teacher_type, own_type = _family(cell.teacher), _family(cell.student or cell.teacher)
        types = {own_type} if own_type else {teacher_type, FRESH_TYPE}  # else, the student is named by its size
        return self.model_type in (None, *types) and self.teacher_type in (None, teacher_type)


@cache
def scored_sizes() -> dict[tuple[str, str], tuple[int, str]]:
    """Return the number of examples, and the digest of their labels if it is recorded, by task and split."""
    return {(line["task"], line["split"]): (int(line["rows"]), line["labels"]) for line in _rows("splits")}


def is_scored_split(quantity: Quantity, name: str, num_examples: int, labels: Any) -> bool:
    """Whether a split that ``quantity`` is a mean over has the examples that papers score, as far as is recorded.

    Args:
        labels: labels (N,) of the examples; None if they have none. Names and order of the classes do not matter.
    """
    kind, by_split = "test" if quantity.is_test else "dev", scored_sizes()
    kind, task = (f"{kind}_{MISMATCHED}", quantity.task) if name == MISMATCHED else (kind, f"{quantity.task}_{name}")
    rows, digest = by_split.get((task, kind)) or by_split.get((quantity.task, kind)) or (num_examples, "")
    return num_examples == rows and (not digest or labels is None or labels_digest(labels) == digest)


def labels_digest(labels: Any) -> str:
    """Return a hash of which examples share a label."""
    import pandas as pd

    codes, _ = pd.factorize(np.round(np.asarray(labels, dtype=np.float64), 4))
    return hashlib.sha256(codes.astype("<i4").tobytes()).hexdigest()[:12]


@cache
def titles() -> dict[str, str]:
    """Return paper -> title in ``source``, in the order in which ``find`` prefers equally good numbers."""
    return {line["paper"]: line["title"] for line in _rows("titles")}


@cache
def cells(paper: str) -> tuple[PublishedCell, ...]:
    """Return every printed cell of a paper, such as ``alp_kd``, in the order of its tables."""
    return tuple(PublishedCell.model_validate(line) for line in _rows(paper))


@cache
def _scores(method: str) -> tuple[PublishedCell, ...]:
    """Return all papers' table cells that score a method on a task; the cells of other methods are not validated."""
    lines = (line for paper in titles() for line in _rows(paper) if line["method"])
    of_method = (PublishedCell.model_validate(line) for line in lines if method in line["method"].split("|"))
    return tuple(cell for cell in of_method if cell.task and cell.is_of_a_table)


def papers_of(method: str) -> list[str]:
    """Return the papers that print a score of a method."""
    return list(dict.fromkeys(cell.paper for cell in _scores(method)))


def find(
    method: str,
    quantity: Quantity,
    model: ScoredModel,
    variant: Mapping[str, Any] | None = None,
    papers: Collection[str] | None = None,
) -> Published | None:
    """Return the printed number of a method for the same quantity and a model of the same size and type, or None.

    The teacher need not be the paper's. Of several numbers, one with the paper's teacher is preferred.

    Args:
        method: name as in ``conf/method``, or ``teacher``.
        variant: all settings of the run, such as ``mapping``; settings that the paper does not name are ignored.
        papers: papers to look in; None looks in all.
    """
    stated = {key: _text(value) for key, value in (variant or {}).items() if value is not None}
    cells = [cell for cell in _scores(method) if papers is None or cell.paper in papers]
    candidates = [cell for cell in cells if quantity.is_of(cell) and model.is_of(cell) and _agrees(cell, stated)]
    if not candidates:
        return None
    cell = min(candidates, key=lambda cell: (*_unknown(cell, model, quantity), -len(cell.variant)))
    comparable = cell.metric is not None and not any(_unknown(cell, model, quantity))
    number = {"value": float(cell.value), "metric": cell.metric, "split": cell.split}
    return Published(**number, source=f"{titles()[cell.paper]} Table {cell.table}", comparable=comparable)


def _unknown(cell: PublishedCell, model: ScoredModel, quantity: Quantity) -> tuple[bool, ...]:
    """Return what may differ between a cell and a result, the most serious first; all False for equal experiments."""
    metric_is_unknown = quantity.metric is not None and cell.metric is None
    return not _is(cell.teacher, model.teacher), metric_is_unknown, cell.split is None


@cache
def _languages(paper: str, table: str) -> frozenset[str]:
    """Return the tasks of a table that prints one task in several languages; empty if the table has other tasks too."""
    tasks = frozenset(cell.task for cell in cells(paper) if cell.table == table and cell.task) - {AVERAGE}
    return tasks if len({task.partition("_")[0] for task in tasks}) == 1 and len(tasks) > 1 else frozenset()


def _family(name: str | None) -> str | None:
    """Return the model type of a paper's model."""
    return next((family for part, family in FAMILIES.items() if part in str(name)), None)


def _is(checkpoint: str | None, teacher: str) -> bool:
    pattern = CHECKPOINTS.get(checkpoint or "")
    return pattern is not None and re.search(rf"(^|/){pattern}", teacher) is not None


def _agrees(cell: PublishedCell, stated: Mapping[str, str]) -> bool:
    """Whether the run has the settings of the cell's variant; a cell without mapping (attention, heads) accepts any."""
    settings = cell.variant.items()
    return all(any(stated.get(key, "-") == _text(name) for name in names.split("|")) for key, names in settings)


def _text(value: Any) -> str:
    """Return a setting in one spelling, because the order within a list, or within ``a+b``, has no meaning."""
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(sorted(str(value).split("+") if isinstance(value, str | int | float) else map(str, value)))
