"""Numbers that the papers print, and the choice of the printed number for a result.

The folder ``published`` has one CSV file for each paper of ``titles.csv``. A file has one line per printed cell, and
one per number that only a figure or the text prints. docs/published.md lists tables, names and errors in the papers.
Scores are percentages, as printed. A line without a task describes the model itself: millions of parameters, speed-up.
An average that a paper prints is a line with ``task`` = average.
"""

import csv
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import cache, partial
from importlib.resources import files
from typing import Any

from pydantic import field_validator

from distill_runner.common.schema import Schema

_SIZE = r"[-_]{}([-_](un)?cased)?([-_]finetuned.*)?$"
CHECKPOINTS = {
    "ResNet-110": r"resnet-?110$",
    "BERT-base": r"bert[-_](base([-_](un)?cased.*)?|uncased_L-12_H-768_A-12)$",
    "BERT-large": r"bert" + _SIZE.format("large"),
    "BERT-large-WWM": r"bert[-_]large[-_](un)?cased[-_]whole[-_]word[-_]masking",
    "RoBERTa-base": r"roberta" + _SIZE.format("base"),
    "RoBERTa-large": r"roberta" + _SIZE.format("large"),
    "XLM-R-base": r"xlm[-_]?r(oberta)?" + _SIZE.format("base"),
    "XLM-R-large": r"xlm[-_]?r(oberta)?" + _SIZE.format("large"),
    "mBERT": r"(mbert$|bert[-_]base[-_]multilingual)",
}
"""Teacher's name in a paper -> regular expression for the hub id, folder or configuration name of the same model.

A match begins at the start of the name, or right after a slash.
"""


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
        metric: metric of the paper's number; a run's score by another metric is not comparable. None if the paper does
            not name it.
        source: paper and table.
        split: split of the paper's number, as in ``PublishedCell``.
        comparable: whether the run has the paper's teacher, depth, width, metric and split.
    """

    value: float
    metric: str | None
    source: str
    comparable: bool
    split: str | None = None


def _rows(name: str) -> list[dict[str, str]]:
    text = files("distill_runner.report").joinpath("published", f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@cache
def titles() -> dict[str, str]:
    """Return paper -> title in ``source``. The order breaks ties: ``find`` takes the cell of the earlier paper."""
    return {line["paper"]: line["title"] for line in _rows("titles")}


@cache
def cells(paper: str) -> tuple[PublishedCell, ...]:
    """Return every printed cell of a paper, such as ``alp_kd``, in the order of its tables."""
    return tuple(PublishedCell.model_validate(line) for line in _rows(paper))


@cache
def _scores() -> tuple[PublishedCell, ...]:
    """Return all papers' table cells that score a method on a task, without cells that describe a model itself."""
    all_cells = (cell for paper in titles() for cell in cells(paper))
    return tuple(cell for cell in all_cells if cell.method and cell.task and cell.is_of_a_table)


def find(
    method: str,
    task: str,
    *,
    num_layers: int | None,
    teacher: str,
    width: int | None = None,
    metric: str | None = None,
    split: str = "dev",
    variant: Mapping[str, Any] | None = None,
) -> Published | None:
    """Return the printed number for the same method and variant on the same task, or None.

    Size, teacher, metric and split need not match. If no number matches in all of them, the nearest one is returned as
    a reference; of two equally near depths, the deeper one.

    Args:
        method: name as in ``conf/method``, or ``teacher``.
        num_layers, width: size of the student, or of the teacher for ``teacher``. None if unknown or irrelevant.
        teacher: hub id, folder or configuration name of the teacher.
        metric: metric of the run's score; None accepts any metric.
        split: split of the run's score, as in ``PublishedCell``.
        variant: all settings of the run, such as ``mapping``; settings that the paper does not name are ignored.
    """
    stated = {key: _text(value) for key, value in (variant or {}).items() if value is not None}
    of_method = (cell for cell in _scores() if task in _names(cell) and method in str(cell.method).split("|"))
    candidates = [cell for cell in of_method if _agrees(cell, stated)]
    if not candidates:
        return None
    distance = partial(_distance, num_layers=num_layers, width=width, teacher=teacher, metric=metric, split=split)
    cell = min(candidates, key=lambda cell: (*distance(cell), -(cell.num_layers or 0), -len(cell.variant)))
    source = f"{titles()[cell.paper]} Table {cell.table}"
    comparable = cell.metric is not None and not any(distance(cell))
    number = {"value": float(cell.value), "metric": cell.metric, "split": cell.split}
    return Published(**number, source=source, comparable=comparable)


def _names(cell: PublishedCell) -> tuple[str | None, ...]:
    """Return the cell's task; for an average over languages, also their common task (``xnli`` for ``xnli_en`` etc.)."""
    of_languages = _languages_of(cell.paper, cell.table) if cell.task == "average" else None
    return (cell.task, of_languages) if of_languages else (cell.task,)


@cache
def _languages_of(paper: str, table: str) -> str | None:
    """Return the task that a table prints in several languages; None if the table has other tasks too."""
    tasks = {cell.task for cell in cells(paper) if cell.table == table and cell.task} - {"average"}
    stems = {task.partition("_")[0] for task in tasks}
    return stems.pop() if len(stems) == 1 and len(tasks) > 1 else None


def _distance(
    cell: PublishedCell, *, num_layers: int | None, width: int | None, teacher: str, metric: str | None, split: str
) -> tuple[float, ...]:
    """Return the differences between a cell and a result, the most serious first; all 0 for the same experiment."""
    return (
        metric is not None and cell.metric not in (None, metric),
        cell.split != split,
        not _is(cell.teacher, teacher),
        width not in (None, cell.width),
        0 if num_layers is None else abs((cell.num_layers or 0) - num_layers),
    )


def _is(checkpoint: str | None, teacher: str) -> bool:
    pattern = CHECKPOINTS.get(checkpoint or "")
    return pattern is not None and re.search(rf"(^|/){pattern}", teacher) is not None


def _agrees(cell: PublishedCell, stated: Mapping[str, str]) -> bool:
    """Whether the run has the settings of the cell's variant; a cell without mapping (attention, heads) accepts any."""
    return all(
        any(stated.get(key, "-") == _text(name) for name in names.split("|")) for key, names in cell.variant.items()
    )


def _text(value: Any) -> str:
    """Return a setting in one spelling, because the order within a list, or within ``a+b``, has no meaning."""
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(sorted(str(value).split("+") if isinstance(value, str | int | float) else map(str, value)))
