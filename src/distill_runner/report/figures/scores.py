"""Scores by task and method, beside the published ones."""

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from distill_runner.report.cells import label
from distill_runner.report.collect import Result
from distill_runner.report.figures.canvas import COLOURS, legend, panels, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALL: dict[str, Any] = {"fontsize": 7, "color": "0.35", "ha": "center"}
MEASURED, PRINTED = COLOURS[:2]
ONE, MEAN, BEST, PUBLISHED, REFERENCE, TEACHER = (
    "one run",
    "mean ± sd over seeds",
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
    """Score by method, one panel per task, with the published numbers; each mark says what it is.

    As in the tables, several runs of one cell are a search, of which the best is shown, unless their seeds differ.
    """
    with style():
        tasks = {result["task"]: result["metric"] for result in results}
        names = list(dict.fromkeys(label(result) for result in results))
        figure, axes = panels(len(tasks), 4, width=2.9, height=1.0 + 0.3 * len(names))
        for panel, (task, metric) in zip(axes, tasks.items(), strict=True):
            here = [result for result in results if result["task"] == task]
            for score in {result.get("teacher_score"): None for result in here}:
                if score is not None:
                    panel.axvline(100 * score, label=TEACHER, **MARKS[TEACHER])
            for row, name in enumerate(names):
                _score_marks(panel, row, [result for result in here if label(result) == name])
            panel.set_title(task)
            panel.set_xlabel(f"{metric} × 100")
            panel.set_yticks(range(len(names)), names)
            panel.set_ylim(len(names) - 0.5, -0.6)
            panel.margins(x=0.12)
        figure.suptitle("Scores on the validation set")
        drawn = {line.get_label() for panel in axes for line in panel.lines}
        legend(figure, {name: mark for name, mark in MARKS.items() if name in drawn})
    return figure


def _score_marks(panel: "Axes", row: int, results: Sequence[Result]) -> None:
    """The mark of one cell, and its published number."""
    scores = [100 * result["score"] for result in results]
    printed = {number["value"]: number for result in results if (number := result.get("published"))}
    for value, number in printed.items():
        kind = PUBLISHED if number["comparable"] else REFERENCE
        panel.plot(value, row, label=kind, **MARKS[kind])
    if len({result["seed"] for result in results}) < len(results):
        panel.plot(max(scores), row, label=BEST, **MARKS[BEST])
        panel.annotate(f"of {len(scores)}", (max(scores), row), (0, 5), textcoords="offset points", **SMALL)
    elif len(scores) > 1:
        panel.plot(fmean(scores), row, label=MEAN, **MARKS[MEAN])
        panel.errorbar(fmean(scores), row, xerr=stdev(scores), color=MEASURED, elinewidth=1, capsize=3)
    elif scores:
        panel.plot(scores[0], row, label=ONE, **MARKS[ONE])
