"""Successive halving over epochs (Jamieson & Talwalkar 2016): points that trail early are not trained to the end.

A point that is left out is paused, not lost: the same sweep without halving takes it up where it stopped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

Scores = Sequence[float]
"""Of a point after each of its epochs."""
ROUNDS = 2


def rungs(num_epochs: int, factor: int) -> list[int]:
    """Epochs after which points are compared, one per round: 1 / factor² and 1 / factor of all, rounded up."""
    return [ceil(num_epochs / factor**power) for power in range(ROUNDS, 0, -1)]


def survivors(scores: Mapping[str, Scores], rung: int, factor: int) -> list[str]:
    """The best ``1 / factor`` of the points, rounded up, by their best score in ``rung`` epochs.

    At a tie the earlier point is kept.
    """
    best = {name: max(values[:rung]) for name, values in scores.items() if values}
    kept = sorted(best, key=lambda name: -best[name])[: ceil(len(best) / factor)]
    return [name for name in scores if name in kept]


@dataclass(frozen=True)
class Outcome:
    """What halving does on a grid of which every point is known to the end.

    Attributes:
        trained, total: epochs with halving, and of the whole grid.
        best, best_of_all: best score that halving finds, and that there is.
    """

    trained: int
    total: int
    best: float
    best_of_all: float


def replay(scores: Mapping[str, Scores], factor: int) -> Outcome:
    """Halving on the finished points of one cell of a table, by name -> scores of all epochs."""
    num_epochs = max(map(len, scores.values()))
    left, trained = dict(scores), 0
    before = 0
    for rung in rungs(num_epochs, factor):
        trained += len(left) * (rung - before)
        left, before = {name: scores[name] for name in survivors(left, rung, factor)}, rung
    trained += len(left) * (num_epochs - before)
    return Outcome(
        trained,
        sum(map(len, scores.values())),
        max(max(values) for values in left.values()),
        max(max(values) for values in scores.values()),
    )
