"""The numbers that the papers print, and which of them belongs beside a result.

One CSV per paper in the folder of the same name, one line per printed cell. ``mapping``, ``attention`` and
``heads`` are empty where the method has none; a printed average is a line with ``task`` = average. Values are
percentages.
"""

import csv
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from pydantic import field_validator

from distill_runner.schema import Schema

TITLES = {"alp_kd": "ALP-KD"}
BERT_BASE = re.compile(r"(^|/)bert[-_](base([-_](un)?cased.*)?|uncased_L-12_H-768_A-12)$")


class Cell(Schema):
    """One printed number. ``num_layers`` is the depth of the model scored: the teacher's own in its rows."""

    paper: str
    table: int
    method: str
    mapping: str | None
    attention: str | None
    heads: int | None
    student: str | None
    num_layers: int
    teacher: str
    task: str
    metric: str
    value: float

    @field_validator("mapping", "attention", "heads", "student", mode="before")
    @classmethod
    def _empty_is_none(cls, value: str) -> str | None:
        return value or None


class Published(Schema):
    """A printed number for a result.

    Attributes:
        value: in percent, as printed.
        metric: the paper's; a run selected by another metric is not comparable.
        source: paper and table.
        comparable: whether teacher family, depth and metric are the paper's own.
    """

    value: float
    metric: str
    source: str
    comparable: bool


@cache
def cells(paper: str) -> tuple[Cell, ...]:
    """Every printed cell of a paper, such as ``alp_kd``, in the order of its tables."""
    text = files("distill_runner.report").joinpath("published", f"{paper}.csv").read_text(encoding="utf-8")
    return tuple(Cell.model_validate(line) for line in csv.DictReader(text.splitlines()))


def find(
    method: str,
    task: str,
    *,
    num_layers: int,
    teacher: str,
    metric: str | None = None,
    mapping: str | None = None,
    attention: str | None = None,
    heads: int | None = None,
) -> Published | None:
    """The printed number of the same method, mapping and attention on the same task, or None.

    Depth and teacher need not match: the number of the nearest depth (of two the deeper) is then a reference.

    Args:
        method: ``teacher``, ``nkd``, ``rkd``, ``pkd``, ``ckd`` or ``alp``.
        num_layers: of the student; of the teacher itself for ``teacher``.
        teacher: hub id, folder or configuration's name.
        metric: that the run's score is in; None takes the paper's.
        mapping: ``skip``, ``no``, ``po``, ``all``, or ``layer:6`` for a single teacher layer.
        attention, heads: ``dot``, or ``kqv`` with its number of heads.
    """
    wanted = {"mapping": _canonical(mapping, num_layers), "attention": attention, "heads": heads}
    candidates = [
        cell
        for paper in TITLES
        for cell in cells(paper)
        if (cell.method, cell.task) == (method, task) and _agrees(cell, wanted)
    ]
    if not candidates:
        return None
    cell = min(candidates, key=lambda cell: (abs(cell.num_layers - num_layers), -cell.num_layers))
    comparable = cell.num_layers == num_layers and metric in (None, cell.metric) and bool(BERT_BASE.search(teacher))
    source = f"{TITLES[cell.paper]} Table {cell.table}"
    return Published(value=cell.value, metric=cell.metric, source=source, comparable=comparable)


def _agrees(cell: Cell, wanted: Mapping[str, str | int | None]) -> bool:
    """A cell without a mapping (attention, heads) is of a method without one, whatever the run is set to."""
    return all(getattr(cell, key) in (None, value) for key, value in wanted.items())


def _canonical(mapping: str | None, num_layers: int) -> str | None:
    """Two layers leave one supervised, and one bucket: several names mean the same."""
    same = {"no": "all", "po": "all", "skip": "layer:1"} if num_layers == 2 else {}
    return same.get(mapping or "", mapping)
