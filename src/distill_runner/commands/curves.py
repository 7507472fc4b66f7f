"""Draw scores against the size of the student or of the data, from any results. The figures are those of the
well-read students (Turc et al. 2019, Figures 5 to 10) and of the internal representations (Aguilar et al. 2020,
Figures 2, 3, 6 to 9).

Command: python -m distill_runner.commands.curves outputs/runs --by size --task mnli --out figure.png
"""

import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distill_runner.commands.arguments import Parser, ended, require_folder
from distill_runner.common.errors import UserError, nearest
from distill_runner.report.cells import ResultCell, cell_of, is_scored, label, settings, stage_of
from distill_runner.report.collect import Result, chosen
from distill_runner.report.figures.canvas import COLOURS, below, save, style
from distill_runner.report.row_keys import row_keys
from distill_runner.report.rows import distinct, tabulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Place = tuple[float, str]
"""Place of a result on the axis: a number that orders the places, and the label of the tick."""


def _size(result: Result) -> Place:
    return result["num_params"], f"{result['student']['num_layers']}/{result['student']['width']}"


def _by_width(result: Result) -> Place:
    student = result["student"]
    return student["width"] + student["num_layers"] / 100, f"{student['num_layers']}/{student['width']}"


def _transfer_size(result: Result) -> Place | None:
    size = (result.get("transfer") or {}).get("size")
    return (size, f"{size:,}") if size else None


def _transfer_name(result: Result) -> Place | None:
    transfer = result.get("transfer")
    return (0, transfer["name"]) if transfer else None


def _share(result: Result) -> Place | None:
    """Return the place by share of labelled examples; None also for a student of a transfer set, which saw no label."""
    share = None if result.get("transfer") else settings(result).get("share")
    return (share, f"{share:g}") if share else None


def _updates_before(result: Result) -> Place | None:
    """Return the place by updates of all stages that the student's weights come from, such as MiniLMv2's distillation.

    None for weights that come from no stage, or from one that is not limited by ``max_steps``.
    """
    known, total, source = settings(result), 0.0, result["student"].get("source")
    while stage := stage_of(source):
        total += known.get(f"{stage}.optim.max_steps") or inf
        source = known.get(f"{stage}.model.source")
    return (total, f"{total:,.0f}") if 0 < total < inf else None


AXES: dict[str, tuple[str, Callable[[Result], Place | None]]] = {
    "size": ("student (layers/width), by parameters", _size),
    "width": ("student (layers/width), by width", _by_width),
    "transfer_size": ("examples of the transfer set", _transfer_size),
    "transfer": ("transfer set", _transfer_name),
    "share": ("share of the training examples", _share),
    "updates": ("updates before fine-tuning", _updates_before),
}
"""Axes by name: label, and function that returns the place of a result.

Well-read students: Figures 5, 7 and 10 (``size``), 6 (``width``), 8 (``transfer_size``) and 9 (``transfer``). Internal
representations: Figures 3 and 9 (``share``), 2 and 6 to 8 (``size``).
"""


def lines(
    results: Iterable[Result], by: str, order: Sequence[str] = ()
) -> tuple[list[str], dict[str, dict[str, ResultCell]]]:
    """Return the places on the axis in order, and the cells of each line by place.

    A line is a row of the table on one task.

    Args:
        by: name of the axis.
        order: places that come first; the other places follow in the order of the axis.
    Raises:
        UserError: there is no such axis, or no finished result has a place on it or a place that ``order`` names.
    """
    if by not in AXES:
        raise UserError("--by", by, "there is no such axis", f"Known: {', '.join(AXES)}.")
    placed = [(result, AXES[by][1](result)) for result in distinct(filter(is_scored, results))]
    here = [(result, place) for result, place in placed if place is not None]
    if not here:
        raise UserError("--by", by, "no finished run has a place on this axis")
    several_tasks = len({result["task"] for result, _ in here}) > 1
    runs: dict[str, dict[str, list[Result]]] = {}
    keys = row_keys([result for result, _ in here], [(label(result), place) for result, place in here])
    names = [key.name for key in keys]
    for name, (result, (_, place)) in zip(names, here, strict=True):
        line = f"{name} on {result['task']}" if several_tasks else name
        runs.setdefault(line, {}).setdefault(place, []).append(result)
    places = list(dict.fromkeys(place for _, (_, place) in sorted(here, key=lambda placed: placed[1][0])))
    for place in order:
        if place not in places:
            raise UserError("--order", place, "no finished run has this place", nearest(place, places))
    cells = {line: {place: cell_of(every) for place, every in at.items()} for line, at in runs.items()}
    return list(dict.fromkeys([*order, *places])), cells


def levels(results: Iterable[Result], by: str) -> dict[str, ResultCell]:
    """Return the cells of results that have no place on the axis, by row and task. Each is drawn as a constant."""
    table = tabulate(result for result in filter(is_scored, results) if AXES[by][1](result) is None)
    found = [(row.name, task, cell) for row in table.rows for task, cell in row.cells.items() if cell.chosen]
    return {f"{name} on {task}" if len(table.tasks) > 1 else name: cell for name, task, cell in found}


def draw(results: Sequence[Result], by: str, file: Path, order: Sequence[str] = ()) -> None:
    """Draw a line for each row: the means over seeds with bands of their 95 % intervals; for a grid, its best point.

    Results without a place on the axis are horizontal lines, and teachers are dashed horizontal lines.

    Raises:
        UserError: as for ``lines``.
    """
    places, found = lines(results, by, order)
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(max(6.0, 1.6 + 0.6 * len(places)), 4.2), layout="constrained")
        axes = figure.subplots()
        colours = cycle(COLOURS)
        for name, cells in found.items():
            here = {places.index(place): cell for place, cell in cells.items()}
            _line(axes, name, {at: here[at] for at in sorted(here)}, color=next(colours), marker="o")
        ends = (-0.3, len(places) - 0.7)
        for name, cell in levels(results, by).items():
            _line(axes, name, dict.fromkeys(ends, cell), color=next(colours), linestyle="-.")
        for teacher in tabulate(filter(is_scored, results)).teachers:
            for task, score in teacher.scores.items():
                named = f"{teacher.name} on {task}" if len(teacher.scores) > 1 else teacher.name
                axes.axhline(score, color="grey", linestyle="--", linewidth=1, label=named)
        axes.set_xticks(range(len(places)), places)
        if len(places) > 8 or max(map(len, places)) > 8:
            axes.tick_params("x", rotation=30)
        axes.set_xlabel(AXES[by][0])
        metrics = dict.fromkeys(f"{result['task']} {result['metric']}" for result in results if is_scored(result))
        axes.set_ylabel(", ".join(metrics))
        below(figure, axes.get_legend_handles_labels()[0])
    save(figure, file)


def _line(axes: "Axes", name: str, cells: Mapping[float, ResultCell], **look: Any) -> None:
    spreads = [cell.best[0].spread for cell in cells.values()]
    kinds = sorted({cell.kind for cell in cells.values()} - {""})
    means = np.array([spread.mean for spread in spreads])
    halves = np.array([spread.interval or 0.0 for spread in spreads])
    axes.plot(list(cells), means, label=", ".join([name, *kinds]), **look)
    axes.fill_between(list(cells), means - halves, means + halves, color=look["color"], alpha=0.15, linewidth=0)


def main() -> None:
    """Entry point of ``python -m distill_runner.commands.curves``."""
    ended(lambda: show(sys.argv[1:]))


def show(arguments: Sequence[str]) -> None:
    """Draw the figure that ``arguments`` ask for.

    Raises:
        UserError: as for ``draw``; there are no runs, or no run of the task.
    """
    parser = Parser("distill_runner.commands.curves", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--by", default="size", choices=AXES)
    parser.add_argument("--task", nargs="+", metavar="TASK", help="only these tasks")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file of the picture")
    parser.add_argument("--order", nargs="+", default=[], metavar="PLACE", help="places that come first on the axis")
    given = parser.parse_args(arguments)
    require_folder(given.out)
    draw(chosen(given.folders, {"task": given.task}), given.by, given.out, given.order)


if __name__ == "__main__":
    main()
