"""Parts of splits: ``train[:90%]``, ``train[1000:]``, and ``train[~:90%]`` for the rows in a fixed random order."""

import re
from dataclasses import dataclass

import numpy as np

_PART = re.compile(r"(?P<name>[^\[\]]+)\[(?P<drawn>~?)(?P<start>[\d.]+%?|):(?P<stop>[\d.]+%?|)\]")
SEED = 0


@dataclass(frozen=True)
class Slice:
    """Rows from ``start`` to ``stop``, as written in the configuration; of the shuffled split if ``drawn``."""

    start: str
    stop: str
    drawn: bool

    def rows(self, size: int) -> np.ndarray:
        """Return the sorted numbers of the rows in a split of ``size`` rows; they are the same in every run."""
        order = np.random.default_rng(SEED).permutation(size) if self.drawn else np.arange(size)
        chosen = order[_place(self.start, size, 0) : _place(self.stop, size, size)]
        return np.sort(chosen)

    def overlaps(self, other: "Slice") -> bool:
        """Return whether the two slices have rows in common, as far as known without the size of the split.

        True if only one of them is shuffled; False if percentages and row numbers are mixed.
        """
        if self.drawn != other.drawn:
            return True
        if {"%" in end for end in (self.start, self.stop, other.start, other.stop) if end} == {True, False}:
            return False
        size = 10**9
        one, two = ((_place(part.start, size, 0), _place(part.stop, size, size)) for part in (self, other))
        return max(one[0], two[0]) < min(one[1], two[1])


def parse(split: str) -> tuple[str, Slice | None]:
    """Return the name of the split in the data, and the slice of it; None for the whole split."""
    found = _PART.fullmatch(split)
    if found is None:
        return split, None
    return found["name"], Slice(found["start"], found["stop"], bool(found["drawn"]))


def share_rows(one: str, other: str) -> bool:
    """Return whether two splits, as written in the configuration, have rows in common."""
    (name, part), (name_too, part_too) = parse(one), parse(other)
    if name != name_too:
        return False
    if part is None or part_too is None:
        return True
    return part.overlaps(part_too)


def _place(end: str, size: int, missing: int) -> int:
    if not end:
        return missing
    return round(size * float(end[:-1]) / 100) if end.endswith("%") else min(int(float(end)), size)
