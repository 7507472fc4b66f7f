"""The numbers that the papers print, and which of them belongs beside a result.

One CSV per paper of ``titles.csv`` in the folder of the same name, one line per printed cell, and per number that only
a figure or the text prints; docs/published.md lists tables, names and the papers' slips. Scores are percentages, as
printed. A line without a task is of the model itself: millions of parameters, speed-up. An average that a paper prints
is a line with ``task`` = average.
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
"""A paper's name of a teacher -> what ends the hub id, folder or configuration's name of the same model."""


class PublishedCell(Schema):
    """One printed number.

    Attributes:
        table: its number; or, for what no table prints, the place: ``Figure 5``, ``Section 6.2``.
        method: ``a|b`` where a row has two names; None for a number of a model of this size, however it is trained.
        variant: the settings in which rows of one method differ; ``a|b`` where both mean the same, - for not set.
        student: the paper's name of it; None in a teacher's own rows.
        num_layers, width: of the model scored: the teacher's own in its rows. None for a number of data alone.
        teacher: the model distilled; of a student without distillation, that of the students beside it; None: none.
        metric: None where the paper does not say.
        split: ``dev``, ``test``, of MNLI also ``dev_mismatched`` and ``test_mismatched``; None as for ``metric``.
        value: exactly as printed, zeros at its end included.
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
        metric: the paper's; a run selected by another metric is not comparable. None where the paper does not say.
        source: paper and table.
        split: the paper's, as in ``PublishedCell``.
        comparable: whether teacher, depth, width, metric and split are the paper's own.
    """

    value: float
    metric: str | None
    source: str
    comparable: bool
    split: str | None = None


def _lines(name: str) -> list[dict[str, str]]:
    text = files("distill_runner.report").joinpath("published", f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@cache
def titles() -> dict[str, str]:
    """Paper -> its name in a source. Of two cells that suit a result equally well, the earlier paper's is taken."""
    return {line["paper"]: line["title"] for line in _lines("titles")}


@cache
def cells(paper: str) -> tuple[PublishedCell, ...]:
    """Every printed cell of a paper, such as ``alp_kd``, in the order of its tables."""
    return tuple(PublishedCell.model_validate(line) for line in _lines(paper))


@cache
def _scores() -> tuple[PublishedCell, ...]:
    """All papers' cells of tables that are of a method on a task, and not of a model itself."""
    every = (cell for paper in titles() for cell in cells(paper))
    return tuple(cell for cell in every if cell.method and cell.task and cell.is_of_a_table)


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
    """The printed number of the same method in the same variant on the same task, or None.

    Size, teacher, metric and split need not match: the nearest number (of two depths the deeper) is then a reference.

    Args:
        method: as in ``conf/method``, or ``teacher``.
        num_layers, width: of the student; of the teacher itself for ``teacher``. None: not known, or not of interest.
        teacher: hub id, folder or configuration's name.
        metric: that the run's score is in; None takes the paper's.
        variant: all that the run is set to, such as ``mapping``: settings that the paper does not name are ignored.
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
    """The task; of an average over languages also theirs (``xnli`` of ``xnli_en`` and others)."""
    of_languages = _languages_of(cell.paper, cell.table) if cell.task == "average" else None
    return (cell.task, of_languages) if of_languages else (cell.task,)


@cache
def _languages_of(paper: str, table: str) -> str | None:
    """The task that a table has in several languages, if it has no other."""
    tasks = {cell.task for cell in cells(paper) if cell.table == table and cell.task} - {"average"}
    stems = {task.partition("_")[0] for task in tasks}
    return stems.pop() if len(stems) == 1 and len(tasks) > 1 else None


def _distance(
    cell: PublishedCell, *, num_layers: int | None, width: int | None, teacher: str, metric: str | None, split: str
) -> tuple[float, ...]:
    """In what a cell differs from a result, the gravest first; all 0 where it is the same experiment."""
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
    """A cell without a mapping (attention, heads) is of a method without one, whatever the run is set to."""
    return all(
        any(stated.get(key, "-") == _text(name) for name in names.split("|")) for key, names in cell.variant.items()
    )


def _text(value: Any) -> str:
    """A setting in one spelling: the order within a list, or within ``a+b``, means nothing."""
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(sorted(str(value).split("+") if isinstance(value, str | int | float) else map(str, value)))
