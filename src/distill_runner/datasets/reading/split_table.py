"""Columns of a split, and the errors about them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from distill_runner.common.errors import UserError, as_list, brief
from distill_runner.datasets.reading.dataset import Dataset
from distill_runner.datasets.reading.folders import split_files

AnyDataset = TypeVar("AnyDataset", bound=Dataset)


@dataclass(frozen=True)
class SplitTable:
    """Requested columns of one split, with the values of the data.

    Attributes:
        columns: name -> values; the label column is missing for a test split without labels.
        class_names: names that the data itself gives to the values of the label column, if any.
    """

    columns: dict[str, list[Any]]
    class_names: list[str] | None


@contextmanager
def placed(data: AnyDataset, split: str) -> Iterator[tuple[AnyDataset, str]]:
    """Yield the data set that contains ``split``, and the name of the split there.

    If that is another data set than ``data``, errors about its name or configuration name the key of the split.
    """
    where, name = data.placed(split)
    try:
        yield where, name
    except UserError as error:
        if where is data or error.key not in (f"{data.key}.dataset", f"{data.key}.config"):
            raise
        raise UserError(data.role(split), split, error.problem, error.remedy) from error


def check_columns(data: Dataset, split: str, available: list[str]) -> None:
    for column, field in data.needed(split).items():
        if column not in available:
            problem = f"split '{split}' of {data.dataset} has no column '{column}'"
            value = as_list(data.columns) if field == "columns" else column
            raise UserError(f"{data.key}.{field}", value, problem, f"It has: {', '.join(available)}.")


def empty(data: Dataset, split: str, place: Path | str) -> UserError:
    return UserError(data.role(split), split, f"the split is empty in {place}", "Download or write it again.")


def damaged(data: Dataset, split: str, place: Path | str, error: Exception) -> UserError:
    shown = ""
    if isinstance(place, Path):
        files = split_files(place, split, data)
        shown = ", ".join(file.name for file in files[:3]) + (", ..., in " if len(files) > 3 else " in ")
    remedy = "The file is damaged, incomplete or of another format than its name says: download or write it again."
    return UserError(data.role(split), split, f"cannot read {shown}{place}: {brief(error)}", remedy)
