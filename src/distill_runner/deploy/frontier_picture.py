"""Picture of a frontier: score against latency and against size, with intervals, the Pareto set and the choice."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distill_runner.deploy.exported import INT8, STATIC
from distill_runner.deploy.frontier import LATENCY, SIZE, FrontierRow, pareto
from distill_runner.deploy.measure import EXACT
from distill_runner.report.figures import COLORS, legend, panels, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = {EXACT: "o", INT8: "s", STATIC: "^"}
AXES = {LATENCY: "p50 of one example in ms", SIZE: "MB"}
CHOICE: dict[str, Any] = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "color": COLORS[1]}
PARETO: dict[str, Any] = {"color": "0.6", "linewidth": 1}
FLOOR: dict[str, Any] = {"color": "0.5", "linewidth": 1, "linestyle": "--"}


def frontier_figure(
    rows: Sequence[FrontierRow], selection: FrontierRow, metric: str, task: str, margin: float
) -> "Figure":
    """Draw two panels, each with a point for each row and its 95% intervals; the horizontal axes are logarithmic.

    Args:
        rows: the first one is the teacher in float32.
        selection: the row of the choice, which gets a ring.
        margin: in points; a dashed line lies so far below the teacher.
    """
    with style():
        figure, axes = panels(2, 2, width=5.2, height=4.0)
        for panel, axis in zip(axes, (LATENCY, SIZE), strict=True):
            _panel(panel, rows, axis)
            (best,) = (row for row in rows if row.label == selection.label)
            panel.plot(_place(best, axis), 100 * best.score, linestyle="", **CHOICE)
            panel.axhline(100 * rows[0].score - margin, **FLOOR)
            panel.set_xscale("log")
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_formatter("{x:.3g}")
            panel.tick_params(axis="x", which="minor", labelsize=6)
            panel.margins(x=0.12)
            panel.set_xlabel(AXES[axis])
        axes[0].set_ylabel(f"{metric} × 100")
        figure.suptitle(f"{task}: score on validation against latency and size")
        names = {f"student {form}": {"color": COLORS[0], "marker": MARKERS[form], "linestyle": ""} for form in MARKERS}
        names |= {"teacher": {"color": COLORS[6], "marker": "o", "linestyle": ""}, "Pareto set": PARETO}
        present = {f"student {row.form}" for row in rows} | {"teacher", "Pareto set"}
        looks = {name: look for name, look in names.items() if name in present}
        looks |= {"choice": {**CHOICE, "linestyle": ""}, f"teacher − {margin:g}": FLOOR}
        legend(figure, looks)
    return figure


def _panel(panel: "Axes", rows: Sequence[FrontierRow], axis: str) -> None:
    best = pareto(rows, axis)
    panel.plot([_place(row, axis) for row in best], [100 * row.score for row in best], zorder=1, **PARETO)
    for row in rows:
        place, height = _place(row, axis), 100 * row.score
        color = COLORS[6] if row.family is None else COLORS[0]
        heights = [[height - 100 * row.interval[0]], [100 * row.interval[1] - height]]
        widths = None
        if axis == LATENCY:
            widths = [[max(0.0, place - row.cost.interval[0])], [max(0.0, row.cost.interval[1] - place)]]
        panel.errorbar(
            place, height, yerr=heights, xerr=widths, color=color, marker=MARKERS[row.form], elinewidth=0.8, capsize=2
        )
        panel.annotate(row.name, (place, height), (4, 4), textcoords="offset points", fontsize=6, color="0.35")


def _place(row: FrontierRow, axis: str) -> float:
    return row.latency if axis == LATENCY else row.num_bytes / 1e6
