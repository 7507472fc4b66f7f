"""Results as pictures: scores by task and method, after each epoch, against hyper-parameters, sizes and data.

A result is the content of a run's ``result.json``; only results of finished students are drawn. Scores are fractions
and are shown times 100. Equal results give equal bytes with the same version of matplotlib, which is imported only
when something is drawn.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from math import ceil, inf, isclose, isfinite
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from distill_runner.common.errors import UserError, require_choice
from distill_runner.report.collect import Result, is_scored, label, scored_on, settings, tested_on
from distill_runner.report.compare import BETTER, SAME, UNDECIDED, WORSE, Comparison
from distill_runner.report.frame import Cell, cell_of, column_of, distinct, frame, tabulate
from distill_runner.report.identity import Identity, identity_of
from distill_runner.report.row_names import row_names
from distill_runner.report.statistics import Spread

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's colors, which color-blind readers can distinguish (without their yellow, which is too pale)."""
SMALL: dict[str, Any] = {"fontsize": 7, "color": "0.35", "ha": "center"}
MEASURED = COLORS[0]
ONE, MEAN, BEST = "one run", "mean over seeds, 95% interval", "best of a search"
PUBLISHED, REFERENCE, TEACHER = "published", "published; not comparable", "teacher"
FULL, HOLLOW = {"linestyle": ""}, {"linestyle": "", "markerfacecolor": "white"}
MARKS: dict[str, dict[str, Any]] = {
    ONE: {"marker": "o", "color": MEASURED, **HOLLOW},
    MEAN: {"marker": "o", "color": MEASURED, **FULL},
    BEST: {"marker": "^", "color": MEASURED, **FULL},
    PUBLISHED: {"marker": "D", "color": "#d55e00", **FULL},
    REFERENCE: {"marker": "D", "color": "#d55e00", **HOLLOW},
    TEACHER: {"color": "0.5", "linestyle": "--", "linewidth": 1},
}
"""Marks of scores by what they are."""
CONCLUSIONS: dict[str, dict[str, Any]] = {
    BETTER: {"marker": "^", "color": "#009e73", **FULL},
    WORSE: {"marker": "v", "color": "#d55e00", **FULL},
    SAME: {"marker": "s", "color": MEASURED, **FULL},
    UNDECIDED: {"marker": "o", "color": "0.3", **HOLLOW},
}
"""Marks of comparisons by their conclusion."""
BAND = "0.93"
"""Gray of a margin."""
MARKERS = "osD^vP*X"
"""Markers of the methods, in order. With seven colors, a pair of color and marker repeats only after 56 methods."""
RATE = "optim.lr"
"""The learning rate, the only hyper-parameter that is drawn on a logarithmic axis."""


def write_pictures(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw every figure that ``results`` have data for; none if no student has finished.

    - ``scores.png``: scores by task and method, with the published numbers;
    - ``curves.png``, if a run has several epochs: scores on the validation split after each epoch;
    - ``hyper-parameters-<task>.png``, if any hyper-parameter varies: score against each hyper-parameter that varies.

    Args:
        folder: must exist; files of these names in it are replaced.
    Returns:
        The files, ``scores.png`` first.
    """
    if not (done := drawable(results)):
        return []
    figures = {"scores": score_figure(done)}
    if curves := epoch_figure(done):
        figures["curves"] = curves
    for task in dict.fromkeys(result["task"] for result in done):
        runs = searches([result for result in done if result["task"] == task])
        if len(runs.columns) > 4:
            figures[f"hyper-parameters-{task}"] = hyper_parameter_figure(runs)
    for name, figure in figures.items():
        save(figure, folder / f"{name}.png")
    return [folder / f"{name}.png" for name in figures]


def drawable(results: Sequence[Result]) -> list[Result]:
    """Return the results of students that have finished with a finite score."""
    return [result for result in results if is_scored(result) and isfinite(result["score"])]


# --- Scores by task and method


def score_figure(results: Sequence[Result]) -> "Figure":
    """Draw scores by method, one panel per task, with the published numbers; a legend explains the marks.

    Runs that were selected on held-out examples have a separate panel. Rows and cells are the same as in the tables. If
    a cell has several settings, the best one is shown.

    Raises:
        UserError: there are no results.
    """
    if not results:
        raise UserError("results", None, "no student has finished")
    table, tasks = tabulate(results), {column_of(result): result["metric"] for result in results}
    with style():
        figure, axes = panels(len(tasks), 4, width=2.9, height=1.0 + 0.3 * len(table.rows))
        for panel, (task, metric) in zip(axes, tasks.items(), strict=True):
            for by_task in table.teachers.values():
                if task in by_task:
                    panel.axvline(by_task[task]["value"], label=TEACHER, **MARKS[TEACHER])
            for place, cell in enumerate(cells[task] for cells in table.rows.values()):
                if not (numbers := cell.numbers):
                    continue
                if "published" in numbers:
                    kind = PUBLISHED if numbers["comparable"] else REFERENCE
                    panel.plot(numbers["published"], place, label=kind, **MARKS[kind])
                score, of_seeds = numbers["value"], MEAN if numbers["seeds"] > 1 else ONE
                kind = BEST if cell.kind else of_seeds
                panel.plot(score, place, label=kind, **MARKS[kind])
                if cell.kind:
                    text = f"of {len(cell.points)}"
                    panel.annotate(text, (score, place), (0, 5), textcoords="offset points", **SMALL)
                if numbers["seeds"] > 1:
                    panel.errorbar(score, place, xerr=numbers["interval"], color=MEASURED, elinewidth=1, capsize=3)
            _list_rows(panel, task, f"{metric} × 100", [*table.rows])
            panel.margins(x=0.12)
        figure.suptitle("Scores")
        names = {line.get_label() for panel in axes for line in panel.lines}
        legend(figure, {name: mark for name, mark in MARKS.items() if name in names})
    return figure


def _list_rows(panel: "Axes", title: str, label: str, names: Sequence[str]) -> None:
    """Label a panel whose rows, from top to bottom, have these names."""
    panel.set(title=title, xlabel=label, yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.6))


# --- Scores by epoch


def epoch_figure(results: Sequence[Result]) -> "Figure | None":
    """Draw the validation scores after each epoch of the best point of each row; None without several epochs.

    Runs whose history lacks the metric of their score are left out.
    """
    curves: dict[str, dict[str, list[list[float]]]] = {}
    for name, task, cell in tabulate(results).cells:
        scores = [_epoch_scores(run) for run in cell.runs if not tested_on(run)]
        if min(map(len, scores), default=0) > 1:
            curves.setdefault(task, {})[name] = scores
    return draw_epochs(curves) if curves else None


def draw_epochs(
    curves: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
    ends: Mapping[str, Sequence[tuple[int, int]]] | None = None,
) -> "Figure":
    """Draw scores per epoch, a panel for each title and a line for each name: means over seeds, with 95% intervals.

    An epoch that only some seeds have is left out.

    Args:
        curves: scores of each seed, as fractions, by title and name.
        ends: pairs of a layer and the number of epochs after which a schedule left it, by name; marked L1, L2, ...
    """
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(name for by_name in curves.values() for name in by_name))
    with style():
        figure, axes = panels(len(curves), 3, width=4.8 if ends else 3.6, height=3.0, sharey=False)
        for panel, (title, by_name) in zip(axes, curves.items(), strict=True):
            marks: Counter[tuple[int, float]] = Counter()
            for name, seeds in by_name.items():
                spreads = [Spread.from_values([100 * x for x in scores]) for scores in zip(*seeds, strict=False)]
                plot_means(panel, range(1, len(spreads) + 1), spreads, **_look(names.index(name)))
                for layer, epoch in (ends or {}).get(name, ()):
                    point = (epoch, spreads[epoch - 1].mean)
                    height = 5 + 10 * marks[point]  # stacks the labels where lines meet
                    panel.annotate(f"L{layer}", point, (0, height), textcoords="offset points", **SMALL)
                    marks[point] += 1
            panel.set(title=title, xlabel="epoch")
            panel.margins(y=0.12)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        figure.supylabel("score × 100")
        figure.suptitle("Score after each epoch, mean over seeds")
        legend(figure, {name: {**_look(number), "linestyle": "-"} for number, name in enumerate(names)})
    return figure


def plot_means(axes: "Axes", places: Sequence[float], spreads: Sequence[Spread], **look: Any) -> None:
    """Draw a line of means, with a band of their 95% intervals."""
    low, means, high = ([one.mean + sign * (one.interval or 0) for one in spreads] for sign in (-1, 0, 1))
    axes.plot(places, means, **look)
    axes.fill_between(places, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _epoch_scores(result: Result) -> list[float]:
    """Return the scores of a run after each epoch, up to the first that is missing or not finite."""
    history, splits = result.get("history") or [], scored_on(result)
    names = [f"{split}/{result['metric']}" for split in splits]
    if "split" not in result and len(splits) < 2:
        names = [result["metric"]]  # of the split that selects
    scores = [[entry.get(name) if isinstance(entry, Mapping) else None for name in names] for entry in history]
    complete = takewhile(lambda of_epoch: all(isinstance(x, int | float) and isfinite(x) for x in of_epoch), scores)
    return [fmean(float(score or 0) for score in of_epoch) for of_epoch in complete]


# --- Comparisons


def comparison_figure(comparisons: Sequence[Comparison]) -> "Figure":
    """Draw a forest plot: the differences with the intervals of the conclusions, and the margin as a band.

    A mark is full where the comparison is decided. Comparisons without a test have a difference and no interval.

    Args:
        comparisons: all with the same margin; those without a difference are left out.
    """
    with style():
        pairs = [one for one in comparisons if one.difference is not None]
        tasks = dict.fromkeys(one.task for one in pairs)
        if not pairs:
            raise UserError("--format", "picture", "there is no difference to draw", "Compare two rows, or two files.")
        names = list(dict.fromkeys((one.first, one.second) for one in pairs))
        figure, axes = panels(len(tasks), 4, width=4.2, height=1.0 + 0.3 * len(names))
        looks: dict[str, dict[str, Any]] = {}
        for panel, task in zip(axes, tasks, strict=True):
            panel.axvline(0, color="0.5", linewidth=1)
            for margin in {one.margin for one in pairs if one.margin is not None}:
                panel.axvspan(-margin, margin, color=BAND, zorder=0)
                looks[f"margin of {margin:g}"] = {"color": BAND, "linewidth": 8}
            for one in (one for one in pairs if one.task == task):
                place, look = names.index((one.first, one.second)), CONCLUSIONS[one.conclusion]
                if one.interval:
                    low, high = (100 * bound for bound in one.interval)
                    panel.plot([low, high], [place, place], color=look["color"], linewidth=1.5)
                panel.plot(one.difference or 0.0, place, **look)
                looks[one.conclusion] = look
            _list_rows(panel, task, "difference in points", [f"{first} − {second}" for first, second in names])
        legend(figure, looks)
    return figure


# --- Hyper-parameters


def searches(results: Iterable[Result]) -> "pd.DataFrame":
    """Return the frame of the runs with the numeric settings that take several values among the runs of a method.

    Scores are percentages. If the weights of the loss terms sum to 1, the first follows from the others (ALP-KD's beta)
    and is left out; so are settings of a stage that equal the student's in every run.
    """
    runs = frame(results)
    runs["score"] *= 100
    names = [name for run in results for name, value in settings(run).items() if type(value) in (int, float)]
    weights = [name for name in dict.fromkeys(names) if name.endswith(".weight") and name.count(".") == 1]
    if len(weights) > 1 and all(isclose(total, 1) for total in runs[weights].sum(axis=1)):
        names = [name for name in names if name != weights[0]]
    copies = {name for name in names if runs[name].equals(runs.get(name.partition(".")[2]))}
    counts = runs.groupby("label")[[*dict.fromkeys(names)]].nunique().max()
    varied = [name for name in counts[counts > 1].index if name not in copies]
    return runs[["label", "task", "metric", "score", *varied]]


def hyper_parameter_figure(runs: "pd.DataFrame") -> "Figure":
    """Draw every finished run of one task, from ``searches``, against each hyper-parameter that varies.

    For each method a solid line joins the best runs at each value, and a dashed line joins the medians. Both are taken
    over the other hyper-parameters and the seeds, so neither line is a mean over seeds.
    """
    names, methods = runs.columns[4:], {method: _look(number) for number, method in enumerate(runs["label"].unique())}
    with style():
        figure, axes = panels(len(names), 3, width=3.6, height=3.0)
        for panel, name in zip(axes, names, strict=True):
            panel.set_xscale("log" if name == RATE else "linear")
            for method, of_method in runs.dropna(subset=[name]).groupby("label", sort=False):
                look, scores = methods[method], of_method.groupby(name)["score"]
                panel.plot(of_method[name], of_method["score"], **look, linestyle="", alpha=0.45)
                panel.plot(scores.max(), color=look["color"])
                panel.plot(scores.median(), color=look["color"], linestyle="--", linewidth=1)
            ticks = sorted(runs[name].dropna().unique())
            panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            panel.minorticks_off()
            panel.margins(x=0.1)
            panel.set_xlabel(name)
        figure.supylabel(f"{runs['metric'][0]} × 100")
        figure.suptitle(f"{runs['task'][0]}: every run; at each value the best (line) and the median (dashed)")
        legend(figure, {method: {**look, "linestyle": "-"} for method, look in methods.items()})
    return figure


def _look(number: int) -> dict[str, Any]:
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}


# --- Style, panels and legends of all figures


def panels(count: int, most: int, width: float, height: float, sharey: bool = True) -> tuple["Figure", list["Axes"]]:
    """Return a figure of ``count`` panels of ``width`` × ``height`` inches, at most ``most`` panels in a row."""
    from matplotlib.figure import Figure

    rows = ceil(count / most)
    columns = ceil(count / rows)
    figure = Figure(figsize=(max(5.0, width * columns), height * rows + 0.7), layout="constrained")
    axes = figure.subplots(rows, columns, sharey=sharey, squeeze=False).flatten()
    for spare in axes[count:]:
        spare.remove()
    return figure, list(axes[:count])


def legend(figure: "Figure", looks: Mapping[str, Mapping[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    legend_below(figure, [Line2D([], [], label=name, **look) for name, look in looks.items()])


def legend_below(figure: "Figure", handles: Sequence[Any]) -> None:
    """Add a legend of ``handles`` below the axes, in as many columns as fit, and wrap labels wider than the figure."""
    line, letter, width = 0.6, 0.07, figure.get_figwidth()  # inches
    for handle in handles:
        handle.set_label("\n".join(wrap(str(handle.get_label()), int((width - line) / letter))))
    longest = max((len(part) for handle in handles for part in handle.get_label().splitlines()), default=0)
    columns = max(1, min(len(handles), int(width / (line + letter * longest))))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def save(figure: "Figure", file: Path) -> None:
    """Save the figure in the format of the file's extension; equal figures give equal bytes as PNG.

    Raises:
        UserError: the format is not supported.
    """
    formats = sorted(figure.canvas.get_supported_filetypes())
    if (extension := file.suffix.lower()[1:]) not in formats:
        raise UserError("--out", file.name, "is not a picture format", f"Known: {', '.join(formats)}.")
    with style():  # matplotlib lays out texts only now, with the style that is then active
        figure.savefig(file, metadata={"Software": None} if extension == "png" else None)


def style() -> AbstractContextManager[None]:
    """Return a context with matplotlib's own defaults, whatever the user's defaults are, and a light grid."""
    from matplotlib.style import context

    return context(["default", "distill_runner.report.figures"])


# --- Scores against the size of the student or of the data, as in the figures of two papers

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
"""Labels of the axes by name."""
# Well-read students: Figures 5, 7 and 10 (``size``), 6 (``width``), 8 (``transfer_size``) and 9 (``transfer``).
# Internal representations: Figures 3 and 9 (``share``), 2 and 6 to 8 (``size``).


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
    require_choice("--by", axis, AXES, "there is no such axis")
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
        require_choice("--order", tick, tick_labels, "no finished run has this value")
    cells = {curve: {tick: cell_of(group) for tick, group in by_tick.items()} for curve, by_tick in runs.items()}
    return list(dict.fromkeys([*order, *tick_labels])), cells


def constant_cells(results: Iterable[Result], axis: str) -> dict[str, Cell]:
    """Return the cells of results without a tick on the axis, by row and task. Each is drawn as a constant."""
    table = tabulate(result for result in filter(is_scored, results) if _tick(result, axis) is None)
    several = len(table.tasks) > 1
    return {f"{name} on {task}" if several else name: cell for name, task, cell in table.cells if cell.points}


def curve_figure(results: Sequence[Result], axis: str, order: Sequence[str] = ()) -> "Figure":
    """Draw a curve for each row: the means over seeds with bands of their 95% intervals; for a grid, its best point.

    Results without a tick on the axis are horizontal lines, and teachers are dashed horizontal lines.

    Raises:
        UserError: as for ``curve_cells``.
    """
    ticks, curves = curve_cells(results, axis, order)
    scored = [result for result in results if is_scored(result)]
    with style():
        figure, (axes,) = panels(1, 1, max(6.0, 1.6 + 0.6 * len(ticks)), 3.5)
        ends = [-0.3, len(ticks) - 0.7]
        place = {tick: float(number) for number, tick in enumerate(ticks)}
        lines = {name: {place[tick]: cells[tick] for tick in ticks if tick in cells} for name, cells in curves.items()}
        constants = {name: dict.fromkeys(ends, cell) for name, cell in constant_cells(results, axis).items()}
        for number, (name, cells) in enumerate([*lines.items(), *constants.items()]):
            text = ", ".join([name, *sorted({cell.kind for cell in cells.values()} - {""})])
            look: dict[str, Any] = {"marker": "o"} if number < len(curves) else {"linestyle": "-."}
            look |= {"label": text, "color": COLORS[number % len(COLORS)]}
            plot_means(axes, [*cells], [cell.points[0].spread for cell in cells.values()], **look)
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
    return figure
