"""Figure of scores against the size of the student or of the data, from any results.

The figures are those of the well-read students (Turc et al. 2019, Figures 5 to 10) and of the internal representations
(Aguilar et al. 2020, Figures 2, 3 and 6 to 9).
"""

from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from typing import Any

from distill_runner.common.errors import UserError, suggestion
from distill_runner.report.collect import Result, is_scored, label
from distill_runner.report.figures import COLORS, legend_below, panels, plot_means, save, style
from distill_runner.report.frame import Cell, cell_of, distinct, tabulate
from distill_runner.report.identity import Identity, identity_of
from distill_runner.report.row_names import row_names

Tick = tuple[float, str]
"""Position of a result on the axis: a number that orders the ticks, and the label of the tick."""


AXES = {
    "size": "student (layers/width), by parameters",
    "width": "student (layers/width), by width",
    "transfer_size": "examples of the transfer set",
    "transfer": "transfer set",
    "share": "share of the training examples",
    "updates": "updates before fine-tuning",
}
"""Labels of the axes by name.

Well-read students: Figures 5, 7 and 10 (``size``), 6 (``width``), 8 (``transfer_size``) and 9 (``transfer``). Internal
representations: Figures 3 and 9 (``share``), 2 and 6 to 8 (``size``).
"""


def _tick(result: Result, axis: str) -> Tick | None:
    """Return the place of a finished run on an axis.

    A student of a transfer set has no share of labeled examples, as it saw no label. Updates are those of all stages
    that the weights come from, such as MiniLMv2's distillation; there are none if no stage gave the weights, or one
    that is not limited by ``max_steps``.
    """
    layers, width, transfer = result["student"]["num_layers"], result["student"]["width"], result.get("transfer") or {}
    identity = identity_of(result) or Identity()
    match axis:
        case "size":
            return result["num_params"], f"{layers}/{width}"
        case "width":
            return width + layers / 100, f"{layers}/{width}"
        case "transfer_size" if size := transfer.get("size"):
            return size, f"{size:,}"
        case "transfer" if transfer:
            return 0, transfer["name"]
        case "share" if not transfer:
            share = identity.row.get("share", 1.0)
            return share, f"{share:g}"
        case "updates":
            total = sum(identity.row.get(f"{stage}.optim.max_steps") or inf for stage in identity.stages)
            return (total, f"{total:,.0f}") if 0 < total < inf else None
    return None


def curve_cells(
    results: Iterable[Result], axis: str, order: Sequence[str] = ()
) -> tuple[list[str], dict[str, dict[str, Cell]]]:
    """Return the ticks of the axis in order, and the cells of each curve by tick.

    A curve is a row of the table on one task.

    Args:
        axis: name of the axis.
        order: ticks that come first; the other ticks follow in the order of the axis.
    Raises:
        UserError: there is no such axis, or no finished result has a tick on it or a tick that ``order`` names.
    """
    if axis not in AXES:
        raise UserError("--by", axis, "there is no such axis", f"Known: {', '.join(AXES)}.")
    finished = distinct(filter(is_scored, results))
    on_axis = [(result, place) for result in finished if (place := _tick(result, axis)) is not None]
    if not on_axis:
        raise UserError("--by", axis, "no finished run has a value on this axis")
    several_tasks = len({result["task"] for result, _ in on_axis}) > 1
    runs: dict[str, dict[str, list[Result]]] = {}
    names = row_names([result for result, _ in on_axis], [(label(result), tick) for result, tick in on_axis])
    for name, (result, (_, tick)) in zip(names, on_axis, strict=True):
        curve = f"{name} on {result['task']}" if several_tasks else name
        runs.setdefault(curve, {}).setdefault(tick, []).append(result)
    tick_labels = list(dict.fromkeys(tick for _, (_, tick) in sorted(on_axis, key=lambda pair: pair[1][0])))
    for tick in order:
        if tick not in tick_labels:
            raise UserError("--order", tick, "no finished run has this value", suggestion(tick, tick_labels))
    cells = {curve: {tick: cell_of(group) for tick, group in by_tick.items()} for curve, by_tick in runs.items()}
    return list(dict.fromkeys([*order, *tick_labels])), cells


def constant_cells(results: Iterable[Result], axis: str) -> dict[str, Cell]:
    """Return the cells of results without a tick on the axis, by row and task. Each is drawn as a constant."""
    table = tabulate(result for result in filter(is_scored, results) if _tick(result, axis) is None)
    several = len(table.tasks) > 1
    return {f"{name} on {task}" if several else name: cell for name, task, cell in table.cells if cell.points}


def draw(results: Sequence[Result], axis: str, file: Path, order: Sequence[str] = ()) -> None:
    """Draw a curve for each row: the means over seeds with bands of their 95% intervals; for a grid, its best point.

    Results without a tick on the axis are horizontal lines, and teachers are dashed horizontal lines.

    Raises:
        UserError: as for ``curve_cells``.
    """
    ticks, curves = curve_cells(results, axis, order)
    scored = [result for result in results if is_scored(result)]
    with style():
        figure, (axes,) = panels(1, 1, max(6.0, 1.6 + 0.6 * len(ticks)), 3.5)
        ends: tuple[float, ...] = (-0.3, len(ticks) - 0.7)
        lines: list[tuple[str, list[tuple[float, Cell]]]] = [
            (name, [(ticks.index(tick), cells[tick]) for tick in ticks if tick in cells])
            for name, cells in curves.items()
        ]
        lines += [(name, [(end, cell) for end in ends]) for name, cell in constant_cells(results, axis).items()]
        for number, (name, cells) in enumerate(lines):
            text = ", ".join([name, *sorted({cell.kind for _, cell in cells} - {""})])
            look: dict[str, Any] = {"marker": "o"} if number < len(curves) else {"linestyle": "-."}
            look |= {"label": text, "color": COLORS[number % len(COLORS)]}
            plot_means(axes, [place for place, _ in cells], [cell.points[0].spread for _, cell in cells], **look)
        for teacher, by_task in tabulate(scored).teachers.items():
            for task, numbers in by_task.items():
                text = f"{teacher} on {task}" if len(by_task) > 1 else teacher
                axes.axhline(numbers["value"], color="gray", linestyle="--", linewidth=1, label=text)
        axes.set_xticks(range(len(ticks)), ticks)
        if len(ticks) > 8 or max(map(len, ticks)) > 8:
            axes.tick_params("x", rotation=30)
        metrics = dict.fromkeys(f"{result['task']} {result['metric']}" for result in scored)
        axes.set(xlabel=AXES[axis], ylabel=", ".join(metrics))
        legend_below(figure, axes.get_legend_handles_labels()[0])
    save(figure, file)
