"""Location, columns and splits of a dataset: the common base of tasks and of the parts of a corpus.

A split may be a slice, such as ``train[:90%]``, ``train[1000:]``, or ``train[~:90%]`` for rows in a fixed random order.
``train[~~:90%]`` takes the same share of each class, in a fixed random order.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from pydantic import Field

from distill_runner.common.errors import UserError, format_typed, require_choice
from distill_runner.common.schema import Schema
from distill_runner.datasets.embedded import NAMES

EMBEDDED = "embedded:"
ALL_FILES = "*"
"""Name of a split that consists of every data file of the folder, whatever its name."""
_END = r"\d+(?:\.\d+)?%|\d+|"
_SLICE = re.compile(rf"(?P<name>[^\[\]]+)\[(?P<order>~{{0,2}})(?P<start>{_END}):(?P<stop>{_END})\]")
_LIKE_A_SLICE = re.compile(r"[^\[\]]+\[[^\[\]]*:[^\[\]]*\]")
IN_ORDER, SHUFFLED, BY_CLASS = "", "~", "~~"
"""Orders of the rows that a slice is taken from, as they are written."""
_SHUFFLE_SEED = 0


class Dataset(Schema, ABC):
    """Rows with named columns, in a folder, on the hub or embedded.

    Attributes:
        dataset: a hub id (``nyu-mll/glue``), a folder or a data file, or data of this package: ``embedded:pairs``,
            ``embedded:sentences``, ``embedded:questions``, ``embedded:words``, ``embedded:text`` or
            ``embedded:digits``.
        config: configuration of the dataset, which is a subfolder of a local folder; ``null`` if there is only one.
        revision: revision of the dataset on the hub; ``null`` is ``main``.
        columns: names of one or two columns of texts, or of one column of images.
        encoding: encoding of files of text, such as ``cp1252`` for CSV files that Excel wrote. ``null`` is UTF-8, or
            what a byte order mark names.
    Raises:
        UserError: there is no embedded data of this name, no such encoding, a column is named twice, or the part of a
            split is not written as one.
    """

    lines_are_texts: ClassVar[bool] = True
    """Whether each line of a ``.txt`` file is a text; otherwise each paragraph is one."""
    has_words: ClassVar[bool] = False
    """Whether a ``.txt`` or ``.tsv`` file may have a word and its tags in each line, as ``.conll`` files have."""

    has_split_files: ClassVar[bool] = True
    """Whether a split is files of its name in a local folder."""

    dataset: str
    config: str | None = None
    revision: str | None = None
    columns: list[str] = Field(min_length=1, max_length=2)
    encoding: str | None = None

    def model_post_init(self, _context: Any) -> None:
        if is_embedded(self):
            embedded = [EMBEDDED + name for name in NAMES]
            require_choice(f"{self.key}.dataset", self.dataset, embedded, "no such embedded data")
        if len(set(self.columns)) < len(self.columns):
            problem = f"names the column '{self.columns[0]}' twice"
            raise UserError(f"{self.key}.columns", format_typed(self.columns), problem, "Name each column once.")
        if self.encoding is not None and not is_text_encoding(self.encoding):
            remedy = "Such as utf-8, cp1252, latin-1, utf-16, gb18030 or shift_jis."
            raise UserError(f"{self.key}.encoding", self.encoding, "there is no such encoding of text", remedy)
        for split in sorted(self.splits):
            part = parse_split(split.removesuffix("?"))[1]
            ends = [end for end in (part.start, part.stop) if end.endswith("%")] if part else []
            if (part is None and _LIKE_A_SLICE.match(split)) or any(float(end[:-1]) > 100 for end in ends):
                problem = "does not name a part: its ends are whole numbers, or percentages up to 100"
                remedy = "Parts are train[:1000] (rows), train[:90%] (a share) and train[~:90%] (a random share)."
                raise UserError(self.split_key(split), split, problem, remedy)

    @property
    @abstractmethod
    def key(self) -> str:
        """Configuration key of this dataset, for messages."""

    @property
    @abstractmethod
    def splits(self) -> set[str]:
        """All splits that the configuration uses."""

    @abstractmethod
    def split_key(self, split: str) -> str:
        """Return the configuration key that names ``split``."""

    @abstractmethod
    def required_columns(self, split: str) -> dict[str, str]:
        """Return the columns that ``split`` must have, each with the configuration field that names it."""

    @property
    def label_columns(self) -> list[str]:
        """Columns that are read if the data has them; for the first one, the names of its values are read, too."""
        return []

    @property
    def optional_columns(self) -> list[str]:
        """Further columns that are read if the data has them."""
        return []

    @property
    def lacks_labels(self) -> bool:
        """Whether a split may lack the label column, so that a slice by class is one in random order there."""
        return False

    def is_no_label(self, value: Any, has_names: bool) -> bool:
        """Return whether the data's format defines ``value`` as the label of rows that have none.

        Args:
            has_names: whether the data itself names the labels.
        """
        return False

    def locate(self, split: str) -> tuple[Self, str]:
        """Return the dataset that contains ``split``, and the name of the split there.

        A split may be in another configuration or another dataset.
        """
        return self, split

    def is_optional(self, split: str) -> bool:
        """Return whether the key of ``split`` can be removed from the configuration."""
        return False


AnyDataset = TypeVar("AnyDataset", bound=Dataset)


@contextmanager
def locate_split(data: AnyDataset, split: str) -> Iterator[tuple[AnyDataset, str]]:
    """Yield the dataset that contains ``split``, and the name of the split there.

    If that is another dataset than ``data``, errors about its name or configuration name the key of the split.
    """
    source, name = data.locate(split)
    try:
        yield source, name
    except UserError as error:
        if source is data or error.key not in (f"{data.key}.dataset", f"{data.key}.config"):
            raise
        raise UserError(data.split_key(split), split, error.problem, error.remedy) from error


def is_embedded(data: Dataset) -> bool:
    return data.dataset.startswith(EMBEDDED)


def is_text_encoding(name: str) -> bool:
    """Return whether Python knows an encoding of text by this name."""
    try:
        return "a".encode(name) != b""
    except (LookupError, UnicodeError, ValueError):
        return False


@dataclass(frozen=True)
class SplitSlice:
    """Rows from ``start`` to ``stop``, as written in the configuration, of the split in one of three orders.

    ``IN_ORDER`` is the order of the data and ``SHUFFLED`` a fixed random one. ``BY_CLASS`` is a fixed random one in
    which each class is spread evenly, so that every part has about the same share of each class, and the first part
    has at least one row of it.
    """

    start: str
    stop: str
    order: str = IN_ORDER

    def rows(self, size: int, labels: Sequence[Any] | None = None) -> np.ndarray:
        """Return the sorted numbers of the rows in a split of ``size`` rows; they are the same in every run.

        Args:
            labels: label of each row, for the order ``BY_CLASS``.
        """
        order = np.arange(size) if self.order == IN_ORDER else np.random.default_rng(_SHUFFLE_SEED).permutation(size)
        if self.order == BY_CLASS:
            assert labels is not None
            order = _spread_classes(order, labels)
        return np.sort(order[slice(*self._bounds(size))])

    @property
    def last_row(self) -> int | None:
        """Number of the row at which the slice stops; None if it depends on the number of rows in the split."""
        if self.order != IN_ORDER or not self.stop or "%" in self.start + self.stop:
            return None
        return int(self.stop)

    def overlaps(self, other: "SplitSlice") -> bool:
        """Return whether the two slices have rows in common, as far as known without the size of the split.

        True if they have different orders; False if percentages and row numbers are mixed.
        """
        if self.order != other.order:
            return True
        if {"%" in end for end in (self.start, self.stop, other.start, other.stop) if end} == {True, False}:
            return False
        (start, stop), (other_start, other_stop) = (part._bounds(10**9) for part in (self, other))
        return max(start, other_start) < min(stop, other_stop)

    def _bounds(self, size: int) -> tuple[int, int]:
        def row(end: str, default: int) -> int:
            if not end:
                return default
            return round(size * float(end[:-1]) / 100) if end.endswith("%") else min(int(end), size)

        return row(self.start, 0), row(self.stop, size)


def _spread_classes(order: np.ndarray, labels: Sequence[Any]) -> np.ndarray:
    """Return ``order`` sorted so that the k-th of n rows of a class comes after the share k/n of all rows."""
    import pandas as pd

    of_rows = pd.Series([labels[row] for row in order.tolist()], dtype=object)
    classes = of_rows.groupby(of_rows, dropna=False)  # rows without a label are a class too
    spread: np.ndarray = order[np.argsort(classes.cumcount() / classes.transform("size"), kind="stable")]
    return spread


def parse_split(split: str) -> tuple[str, SplitSlice | None]:
    """Return the name of the split in the data, and the slice of it; None for a complete split."""
    match = _SLICE.fullmatch(split)
    if match is None:
        return split, None
    return match["name"], SplitSlice(match["start"], match["stop"], match["order"])


def splits_overlap(first: str, second: str) -> bool:
    """Return whether two splits, as written in the configuration, have rows in common."""
    (first_name, first_slice), (second_name, second_slice) = parse_split(first), parse_split(second)
    if first_name != second_name:
        return False
    return first_slice is None or second_slice is None or first_slice.overlaps(second_slice)
