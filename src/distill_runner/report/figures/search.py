"""Figures of a hyper-parameter search: score against each hyper-parameter, and over two of them."""

from collections.abc import Mapping, Sequence
from math import isclose
from statistics import median
from typing import TYPE_CHECKING, Any

from distill_runner.report.cells import label, settings, varied
from distill_runner.report.collect import Result
from distill_runner.report.figures.canvas import COLOURS, legend, panels, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vP*X"
"""Markers of the methods, in order. With seven colours, a pair of colour and marker repeats only after 56 methods."""
RATE = "optim.lr"
"""The learning rate, the only hyper-parameter that is drawn on a logarithmic axis."""


def hyper_parameters(result: Result) -> dict[str, float]:
    """Return the numeric settings of a run, by their names in tables.

    If the weights of the loss terms sum to 1, the first follows from the others (ALP-KD's beta) and is left out.
    """
    found = {name: value for name, value in settings(result).items() if type(value) in (int, float)}
    weights = [name for name in found if name.endswith(".weight") and name.count(".") == 1]
    if len(weights) > 1 and isclose(sum(found[name] for name in weights), 1):
        del found[weights[0]]
    return {name: float(value) for name, value in found.items()}


def varying(results: Sequence[Result]) -> list[str]:
    """Return the hyper-parameters that take several values among the runs of at least one method."""
    methods: dict[str, list[dict[str, float]]] = {}
    for result in results:
        methods.setdefault(label(result), []).append(hyper_parameters(result))
    return list(
        dict.fromkeys(
            name
            for every in methods.values()
            for name in varied(every)
            if len({each[name] for each in every if name in each}) > 1
        )
    )


def hyper_parameter_figure(results: Sequence[Result]) -> "Figure":
    """Draw every finished run of one task against each hyper-parameter that varies, one panel each.

    For each method a solid line joins the best runs at each value, and a dashed line joins the medians. Both are taken
    over the other hyper-parameters and the seeds, so neither line is a mean over seeds.
    """
    with style():
        names = varying(results)
        methods = list(dict.fromkeys(label(result) for result in results))
        figure, axes = panels(len(names), 3, width=3.6, height=3.0)
        for panel, name in zip(axes, names, strict=True):
            ticks = sorted({value for result in results if (value := hyper_parameters(result).get(name)) is not None})
            panel.set_xscale("log" if name == RATE else "linear")
            for number, method in enumerate(methods):
                scores: dict[float, list[float]] = {}
                for result in results:
                    if label(result) == method and (value := hyper_parameters(result).get(name)) is not None:
                        place = _beside(value, ticks, number - (len(methods) - 1) / 2, log=name == RATE)
                        scores.setdefault(place, []).append(100 * result["score"])
                if scores:
                    _score_lines(panel, scores, _look(number))
            panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            panel.minorticks_off()
            panel.margins(x=0.1)
            panel.set_xlabel(name)
        figure.supylabel(f"{results[0]['metric']} × 100")
        figure.suptitle(f"{results[0]['task']}: every run; at each value the best (line) and the median (dashed)")
        legend(figure, {method: {**_look(number), "linestyle": "-"} for number, method in enumerate(methods)})
    return figure


def _beside(value: float, ticks: Sequence[float], steps: float, log: bool) -> float:
    """Return ``value`` moved by a few hundredths of the axis, so that points of different methods do not overlap."""
    share, (first, last) = 0.02 * steps, (ticks[0], ticks[-1])
    return float(value * (last / first) ** share if log else value + (last - first) * share)


def _score_lines(panel: "Axes", scores: Mapping[float, Sequence[float]], look: Mapping[str, Any]) -> None:
    """Draw the scores of one method by place on the axis, with lines through the best and the median scores."""
    places = sorted(scores)
    for place in places:
        panel.plot([place] * len(scores[place]), scores[place], **look, linestyle="", alpha=0.45)
    panel.plot(places, [max(scores[place]) for place in places], color=look["color"])
    panel.plot(places, [median(scores[place]) for place in places], color=look["color"], linestyle="--", linewidth=1)


def heat_map(results: Sequence[Result], across: str) -> "Figure":
    """Draw the best score over the learning rate and the hyper-parameter ``across``, one panel per method with both.

    All results must be of one task. Each cell shows the number of runs from which its best score is taken.
    """
    with style():
        cells: dict[str, dict[tuple[float, float], list[float]]] = {}
        for result in results:
            values = hyper_parameters(result)
            if across in values and RATE in values:
                cell = cells.setdefault(label(result), {}).setdefault((values[RATE], values[across]), [])
                cell.append(100 * result["score"])
        rows, columns = (sorted({pair[i] for found in cells.values() for pair in found}) for i in (0, 1))
        best = [max(scores) for found in cells.values() for scores in found.values()]
        figure, axes = panels(len(cells), 3, width=1.2 + 0.7 * len(columns), height=1.0 + 0.5 * len(rows))
        for panel, (method, found) in zip(axes, cells.items(), strict=True):
            _heat_panel(panel, found, rows, columns, (min(best), max(best)))
            panel.set_title(method)
            panel.set_xlabel(across)
        figure.supylabel(RATE)
        figure.suptitle(f"{results[0]['task']}: best {results[0]['metric']} × 100 of the runs in each cell")
    return figure


def _heat_panel(
    panel: "Axes",
    cells: Mapping[tuple[float, float], Sequence[float]],
    rows: Sequence[float],
    columns: Sequence[float],
    limits: tuple[float, float],
) -> None:
    grid = [[max(cells.get((row, column), [float("nan")])) for column in columns] for row in rows]
    panel.imshow(grid, cmap="cividis", vmin=limits[0], vmax=limits[1], aspect="auto", origin="lower")
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            scores = cells.get((row, column), [])
            colour = "white" if scores and max(scores) <= sum(limits) / 2 else "black"
            text = f"{max(scores):.2f}\nof {len(scores)}" if scores else "–"
            panel.text(x, y, text, ha="center", va="center", color=colour, fontsize=8)
    panel.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
    panel.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
    panel.grid(visible=False)


def _look(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
