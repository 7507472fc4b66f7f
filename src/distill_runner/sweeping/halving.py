"""Successive halving over epochs (Jamieson & Talwalkar 2016): settings that score low early are not trained to the end.

A setting is rated by the mean over its seeds, as in a table, and its points are kept or left out together. A point
that is left out is paused, not lost: the same sweep without halving resumes it where it stopped.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean

from distill_runner.common.errors import UserError, format_value, quantity
from distill_runner.report.collect import label
from distill_runner.report.row_names import row_names
from distill_runner.report.rows import by_setting
from distill_runner.sweeping.points import GridPoint

log = logging.getLogger(__name__)

Train = Callable[[Sequence[Sequence[str]]], None]
"""Runs one job for each list of overrides."""
Scores = Sequence[float]
"""Scores of a point, one after each of its epochs."""
Seeds = Sequence[Scores]
"""Scores of the points of one setting, which differ only in their seed."""
ROUNDS = 2


def rungs(num_epochs: int, factor: int) -> list[int]:
    """Return the epochs after which settings are compared: 1 / factor² and 1 / factor of all epochs, rounded up.

    Where both are the same epoch, settings are compared once.
    """
    return list(dict.fromkeys(ceil(num_epochs / factor**power) for power in range(ROUNDS, 0, -1)))


def survivors(scores: Mapping[str, Seeds], rung: int, factor: int) -> list[str]:
    """Return the names of the best ``1 / factor`` of the settings, rounded up, by mean of the seeds' best scores.

    Settings that tie with the last of them are kept as well, as where no setting has learned anything yet. Settings
    without a score are left out.

    Args:
        scores: scores of each setting after each epoch, by name.
        rung: number of epochs whose scores count.
    """
    best = {name: _mean_best(seeds, rung) for name, seeds in scores.items() if seeds}
    needed = sorted(best.values(), reverse=True)[: ceil(len(best) / factor)]
    return [name for name, score in best.items() if score >= needed[-1]]


def _mean_best(seeds: Seeds, rung: int | None = None) -> float:
    return fmean(max(values[:rung]) for values in seeds)


@dataclass(frozen=True)
class Outcome:
    """Effect of halving on a grid whose points have all been trained to the end.

    Attributes:
        trained, total: number of epochs trained with halving, and in the whole grid.
        best, best_of_all: best score that halving finds, and best score of the whole grid; means over seeds.
    """

    trained: int
    total: int
    best: float
    best_of_all: float


def replay(scores: Mapping[str, Seeds], num_epochs: int, factor: int) -> Outcome:
    """Simulate halving on the finished points of one cell of a table.

    Args:
        scores: scores of all epochs, by the name of the setting. A point that stopped early has fewer than others.
        num_epochs: epochs that the points are configured for.
    """
    remaining, trained, previous = dict(scores), 0, 0
    for rung in rungs(num_epochs, factor):
        trained += _epochs(remaining, previous, rung)
        remaining, previous = {name: scores[name] for name in survivors(remaining, rung, factor)}, rung
    trained += _epochs(remaining, previous)
    best, best_of_all = (max(map(_mean_best, seeds.values())) for seeds in (remaining, scores))
    return Outcome(trained, _epochs(scores), best, best_of_all)


def _epochs(scores: Mapping[str, Seeds], first: int = 0, end: int | None = None) -> int:
    """Return the number of epochs that were trained, among those from ``first`` to before ``end``."""
    return sum(len(values[first:end]) for seeds in scores.values() for values in seeds)


def by_cell(points: Sequence[GridPoint]) -> dict[tuple[str, str], list[GridPoint]]:
    """Group the points by cell of the table. Points of a cell differ only in the student's own hyper-parameters."""
    points = [point for point in points if point.stage is not None]
    cells: dict[tuple[str, str], list[GridPoint]] = {}
    for point, row in zip(points, row_names([{**point.names, "status": "planned"} for point in points]), strict=True):
        cells.setdefault((row, point.names["task"]), []).append(point)
    return cells


def halve(cells: Iterable[list[GridPoint]], todo: list[GridPoint], train: Train, factor: int) -> list[GridPoint]:
    """Train the points of each cell up to its rungs, and return the points of ``todo`` to train to the end."""
    remaining = [[point for point in cell if point in todo or point.result()["status"] == "done"] for cell in cells]
    for number in range(ROUNDS):
        round_cells = [(cell, _rung(cell, number, factor)) for cell in remaining]
        to_train = [
            (point, rung) for cell, rung in round_cells if rung for point in cell if len(scores_of(point)) < rung
        ]
        train([(*point.overrides, f"runtime.pause_after={rung}") for point, rung in to_train])
        remaining = [_survivors(cell, rung, factor) if rung else cell for cell, rung in round_cells]
    surviving = [point for cell in remaining for point in cell]
    return [point for point in todo if point in surviving]


def _rung(cell: list[GridPoint], number: int, factor: int) -> int | None:
    """Return the epoch of a cell's rung; None if it has no such rung, or one setting alone."""
    if len(_settings(cell)) < 2:
        return None
    return dict(enumerate(rungs(num_epochs(cell[0]), factor))).get(number)


def _survivors(cell: list[GridPoint], rung: int, factor: int) -> list[GridPoint]:
    scores = _scores(cell)
    best = survivors(scores, rung, factor)
    ties = ", because some tie" if len(best) > ceil(len(scores) / factor) else ""
    log.info(
        "%s: %d of %d settings continue after epoch %d%s", label(cell[0].names), len(best), len(scores), rung, ties
    )
    return [point for name in best for point in _settings(cell)[name] if scores_of(point)]


def _settings(cell: Sequence[GridPoint]) -> dict[str, list[GridPoint]]:
    """Return the points of each setting of a cell, by the key of the first one."""
    points = {point.key: point for point in cell}
    groups = by_setting(point.names for point in cell)
    return {group[0]["key"]: [points[names["key"]] for names in group] for group in groups}


def _scores(cell: Sequence[GridPoint]) -> dict[str, Seeds]:
    """Return the scores of the points of each setting, without points that have no score."""
    return {name: [*filter(None, map(scores_of, points))] for name, points in _settings(cell).items()}


def require_epochs(points: Iterable[GridPoint]) -> None:
    """Check that the points that can run are trained for a number of epochs.

    Raises:
        UserError: a point has no number of epochs, is not trained, or learns to predict only at the end.
    """
    for point in points:
        schedule = point.stage.config.method.schedule if point.stage is not None else None
        if schedule is not None and schedule.classification == "at_end":
            problem = f"compares scores before the head learns, which schedule={schedule.rule} leaves to the end"
            raise UserError("sweep.halving", None, problem, "Leave it out, or set schedule.classification=always.")
        if point.stage is not None and not (epochs := point.stage.config.optim.epochs):
            problem = f"compares points by epoch, but optim.epochs is {format_value(epochs)}"
            raise UserError("sweep.halving", None, problem, "Set optim.epochs.")


def num_epochs(point: GridPoint) -> int:
    """Return the number of epochs that a point is trained for; ``require_epochs`` has checked that there is one."""
    assert point.stage is not None
    assert point.stage.config.optim.epochs
    return point.stage.config.optim.epochs


def scores_of(point: GridPoint) -> Scores:
    """Return the scores of a point by its first metric, one after each epoch that it has been trained for."""
    return [next(iter(metrics.values())) for metrics in point.result().get("history", [])]


def halving_report(cell: Sequence[GridPoint], factor: int) -> str:
    """Return a line on the epochs that halving saves in a cell and, if all points are done, the score that it loses."""
    scores = _scores(cell)
    head = f"halving by {factor}, {label(cell[0].names)} on {cell[0].names['task']}"
    if all(point.result()["status"] == "done" for point in cell):
        outcome = replay(scores, num_epochs(cell[0]), factor)
        saved = 1 - outcome.trained / outcome.total
        scores_text = f"best {100 * outcome.best:.2f} with halving, {100 * outcome.best_of_all:.2f} without"
        share = f"{outcome.trained} of {quantity(outcome.total, 'epoch')}"
        return f"{head}: {share} ({100 * saved:.0f} % saved), {scores_text}"
    trained = _epochs(scores)
    total = sum(len(scores_of(point)) if point.result()["status"] == "done" else num_epochs(point) for point in cell)
    return f"{head}: {trained} of {quantity(total, 'epoch')} trained ({100 * (1 - trained / total):.0f} % saved)"
