"""Figure of scores by task and method, with the published numbers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distill_runner.report.cells import ResultCell
from distill_runner.report.collect import Result
from distill_runner.report.figures.canvas import COLOURS, legend, panels, style
from distill_runner.report.rows import column_of, tabulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALL: dict[str, Any] = {"fontsize": 7, "color": "0.35", "ha": "center"}
MEASURED, PRINTED = COLOURS[:2]
ONE, MEAN, BEST, PUBLISHED, REFERENCE, TEACHER = (
    "one run",
    "mean over seeds, 95 % interval",
    "best of a search",
    "published",
    "published; other teacher, size or metric",
    "teacher",
)
MARKS: dict[str, dict[str, Any]] = {
    ONE: {"marker": "o", "markerfacecolor": "white", "color": MEASURED, "linestyle": ""},
    MEAN: {"marker": "o", "color": MEASURED, "linestyle": ""},
    BEST: {"marker": "^", "color": MEASURED, "linestyle": ""},
    PUBLISHED: {"marker": "D", "color": PRINTED, "linestyle": ""},
    REFERENCE: {"marker": "D", "markerfacecolor": "white", "color": PRINTED, "linestyle": ""},
    TEACHER: {"color": "0.5", "linestyle": "--", "linewidth": 1},
}


def score_figure(results: Sequence[Result]) -> "Figure":
    """Draw scores by method, one panel per task, with the published numbers; a legend explains the marks.

    Runs that were selected on held-out examples have a separate panel. Rows and cells are the same as in the tables. If
    a cell has several settings, the best one is shown.
    """
    with style():
        tasks = {column_of(result): result["metric"] for result in results}
        rows = tabulate(results).rows
        figure, axes = panels(len(tasks), 4, width=2.9, height=1.0 + 0.3 * len(rows))
        for panel, (task, metric) in zip(axes, tasks.items(), strict=True):
            here = [result for result in results if column_of(result) == task]
            for score in {result.get("teacher_score"): None for result in here}:
                if score is not None:
                    panel.axvline(100 * score, label=TEACHER, **MARKS[TEACHER])
            for place, row in enumerate(rows):
                _score_marks(panel, place, row.cells[task])
            panel.set_title(task)
            panel.set_xlabel(f"{metric} × 100")
            panel.set_yticks(range(len(rows)), [row.name for row in rows])
            panel.set_ylim(len(rows) - 0.5, -0.6)
            panel.margins(x=0.12)
        figure.suptitle("Scores")
        drawn = {line.get_label() for panel in axes for line in panel.lines}
        legend(figure, {name: mark for name, mark in MARKS.items() if name in drawn})
    return figure


def _score_marks(panel: "Axes", place: int, cell: ResultCell) -> None:
    """Draw the marks of one cell: its score and its published number."""
    if cell.chosen is None:
        return
    if number := cell.published:
        kind = PUBLISHED if number["comparable"] else REFERENCE
        panel.plot(number["value"], place, label=kind, **MARKS[kind])
    spread = cell.chosen.spread
    kind = BEST if cell.kind else MEAN if spread.count > 1 else ONE
    panel.plot(spread.mean, place, label=kind, **MARKS[kind])
    if cell.kind:
        panel.annotate(f"of {len(cell.points)}", (spread.mean, place), (0, 5), textcoords="offset points", **SMALL)
    if spread.count > 1:
        panel.errorbar(spread.mean, place, xerr=spread.interval, color=MEASURED, elinewidth=1, capsize=3)
