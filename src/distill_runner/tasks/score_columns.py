"""Columns of scores as they are written: their numbers, and the classes in their names."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distill_runner.common.errors import UserError, format_list
from distill_runner.models.config import normalized_label
from distill_runner.tasks.columns import is_empty


def numbers_in_columns(names: list[str], table: Mapping[str, Sequence[Any]], key: str, split: str) -> np.ndarray:
    """Return the numbers (N, K) in the K columns ``names`` of N cells, NaN for cells that hold none.

    Args:
        key: configuration key that names the columns, for messages.
        split: name of the split, for messages.
    Raises:
        UserError: a cell is no number, or an infinite one.
    """
    cells = [[np.nan if is_blank(value) else value for value in table[name]] for name in names]
    try:
        values = np.array(cells, dtype=np.float64).T
    except (TypeError, ValueError) as error:
        row, cell = next((n, c) for own in cells for n, c in enumerate(own) if not _is_float(c))
        problem = f"row {row} of split '{split}' has {cell!r}, not a number"
        raise UserError(key, format_list(names), problem, _number_remedy(cell)) from error
    if len(infinite := np.flatnonzero(np.isinf(values).any(1))):
        problem = f"row {infinite[0]} of split '{split}' has a number that is not finite"
        raise UserError(key, format_list(names), problem)
    return values


def is_blank(value: Any) -> bool:
    """Return whether a cell holds no number."""
    return is_empty(value) or (isinstance(value, str) and not value.strip())


def _is_float(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _number_remedy(cell: Any) -> str:
    """Return what to write instead of a cell that holds no number."""
    if str(cell).strip().endswith("%"):
        return "Write numbers without %, such as 85 or 0.85."
    if re.fullmatch(r"[+-]?\d*,\d+", str(cell).strip()):
        return "Write a decimal point instead of the comma."
    return "Leave the cells of rows without a score empty."


def class_of_column(column: str, names: Sequence[str]) -> int | None:
    """Return the number of the class that ends a column's name, as in ``p_<class>``; None if it names none of them."""
    own = normalized_label(column)
    ends = [
        number for number, name in enumerate(names) if re.search(rf"(^|[\W_]){re.escape(normalized_label(name))}$", own)
    ]
    return max(ends, key=lambda number: len(names[number]), default=None)


def names_of_columns(columns: Sequence[str]) -> list[str]:
    """Return the class names in the names of columns, without what all begin with up to a mark: ``p_no``, ``p_yes``."""
    parts = [re.findall(r"[^\W_]*[\W_]*", column) for column in columns]
    shared = 0
    while all(len(own) > shared + 2 and own[shared] == parts[0][shared] for own in parts):  # the last part is empty
        shared += 1
    return ["".join(own[shared:]) for own in parts]
