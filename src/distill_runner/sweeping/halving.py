"""Successive halving over epochs (Jamieson & Talwalkar 2016): settings that score low early are not trained to the end.

A setting is rated by the mean over its seeds, as in a table, and its points are kept or left out together. A point
that is left out is paused, not lost: the same sweep without halving resumes it where it stopped.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from statistics import fmean

from distill_runner.common.errors import UserError, format_value, override, quantity
from distill_runner.report.collect import grouped, label
from distill_runner.report.frame import by_setting
from distill_runner.report.row_names import row_names
from distill_runner.sweeping.points import GridPoint

log = logging.getLogger(__name__)

Cell = list[list[GridPoint]]
"""Points of one cell of the table: for each setting, those that differ only in their seed."""
_ROUNDS = 2


def rungs(num_epochs: int, factor: int) -> list[int]:
    """Return the epochs after which settings are compared: 1 / factor² and 1 / factor of all epochs, rounded up.

    Where both are the same epoch, settings are compared once.
    """
    return list(dict.fromkeys(ceil(num_epochs / factor**power) for power in range(_ROUNDS, 0, -1)))


def survivors(scores: Sequence[Sequence[Sequence[float]]], rung: int, factor: int) -> list[int]:
    """Return the numbers of the best ``1 / factor`` of the settings, rounded up, by mean of the seeds' best scores.

    Settings that tie with the last of them are kept as well, as where no setting has learned anything yet. Settings
    without a score are left out.

    Args:
        scores: for each setting, its points, each with one score after each of its epochs.
        rung: number of epochs whose scores count.
    """
    best = {number: fmean(max(values[:rung]) for values in seeds) for number, seeds in enumerate(scores) if seeds}
    needed = sorted(best.values(), reverse=True)[: ceil(len(best) / factor)]
    return [number for number, score in best.items() if score >= needed[-1]]


def by_cell(points: Iterable[GridPoint]) -> list[Cell]:
    """Group the points by cell of the table. Points of a cell differ only in the student's own hyper-parameters."""
    by_key = {point.key: point for point in points if point.stage is not None}
    names = [{**point.names, "status": "planned"} for point in by_key.values()]
    rows = zip(row_names(names), names, strict=True)
    cells = grouped(((row, of_point["task"]), of_point) for row, of_point in rows)
    return [[[by_key[str(run["key"])] for run in setting] for setting in by_setting(cell)] for cell in cells.values()]


def halve(
    cells: Iterable[Cell], todo: list[GridPoint], train: Callable[[Sequence[Sequence[str]]], None], factor: int
) -> list[GridPoint]:
    """Train the points of each cell up to its rungs, and return the points of ``todo`` to train to the end.

    Args:
        train: runs one job for each list of overrides.
    """
    remaining = []
    for cell in cells:
        settings = [
            [point for point in setting if point in todo or point.result()["status"] == "done"] for setting in cell
        ]
        remaining.append([setting for setting in settings if setting])
    for number in range(_ROUNDS):
        compared = [(cell, _rung(cell, number, factor)) for cell in remaining]
        points = [(point, rung) for cell, rung in compared for setting in cell for point in setting]
        to_train = [(point.overrides, rung) for point, rung in points if rung and len(_scores(point)) < rung]
        train([(*overrides, f"runtime.pause_after={rung}") for overrides, rung in to_train])
        remaining = [_survivors(cell, rung, factor) if rung else cell for cell, rung in compared]
    surviving = [point for cell in remaining for setting in cell for point in setting]
    return [point for point in todo if point in surviving]


def _rung(cell: Cell, number: int, factor: int) -> int | None:
    """Return the epoch after which a round compares the settings of a cell; None if it compares none."""
    of_cell = rungs(_num_epochs(cell[0][0]), factor) if len(cell) > 1 else []
    return of_cell[number] if number < len(of_cell) else None


def _survivors(cell: Cell, rung: int, factor: int) -> Cell:
    scored = [*filter(None, ([point for point in setting if _scores(point)] for setting in cell))]
    best = survivors([[*map(_scores, setting)] for setting in scored], rung, factor)
    ties = ", because some tie" if len(best) > ceil(len(scored) / factor) else ""
    name = label(cell[0][0].names)
    log.info("%s: %d of %d settings continue after epoch %d%s", name, len(best), len(cell), rung, ties)
    return [scored[number] for number in best]


def require_epochs(points: Iterable[GridPoint]) -> None:
    """Check that the points that can run are trained for a number of epochs.

    Raises:
        UserError: a point has no number of epochs, is not trained, or learns to predict only at the end.
    """
    for point in points:
        schedule = point.stage.config.method.schedule if point.stage is not None else None
        if schedule is not None and schedule.classification == "at_end":
            problem = f"compares scores before the head learns, which schedule={schedule.rule} leaves to the end"
            remedy = "Leave it out, or set " + override("schedule.classification", "always")
            raise UserError("sweep.halving", None, problem, remedy)
        if point.stage is not None and not (epochs := point.stage.config.optim.epochs):
            problem = f"compares points by epoch, but optim.epochs is {format_value(epochs)}"
            raise UserError("sweep.halving", None, problem, "Set optim.epochs.")


def _num_epochs(point: GridPoint) -> int:
    """Return the number of epochs that a point is trained for; ``require_epochs`` has checked that there is one."""
    return point.student.config.optim.epochs or 0


def _scores(point: GridPoint) -> Sequence[float]:
    """Return the scores of a point by its first metric, one after each epoch that it has been trained for."""
    return [next(iter(metrics.values())) for metrics in point.result().get("history", [])]


def halving_report(cell: Cell, factor: int) -> str:
    """Return a line on the epochs that halving saves in a cell."""
    points = [point for setting in cell for point in setting]
    trained = [len(_scores(point)) for point in points]
    is_done = [point.result()["status"] == "done" for point in points]  # perhaps in fewer epochs
    total = sum(n if done else _num_epochs(one) for n, done, one in zip(trained, is_done, points, strict=True))
    share = f"{sum(trained)} of {quantity(total, 'epoch')} trained ({100 * (1 - sum(trained) / total):.0f} % saved)"
    return f"halving by {factor}, {label(points[0].names)} on {points[0].names['task']}: {share}"
