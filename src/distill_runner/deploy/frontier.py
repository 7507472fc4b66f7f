"""Frontier of a sweep: students of several sizes, exported, scored and timed, and the smallest that is good enough.

The choice is made on one validation split. Each chain of students, from the largest to the smallest, is tested in that
order until one fails; the chains share the error rate. So a student that is worse than its teacher by the margin or
more is chosen in at most 5% of all frontiers (fixed-sequence testing, Westfall & Krishen 2001), if the split has chosen
nothing else. The split has: epochs, and the best of several settings. And the test is of the mean over seeds, while the
best seed is served.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from distill_runner.common.errors import quantity
from distill_runner.common.terminal import markdown_table
from distill_runner.deploy.measure import BATCH, EXACT, INT8, PaddedSplit, RunningCost, examples_needed
from distill_runner.report.collect import grouped
from distill_runner.report.compare import Predictions, pair_predictions
from distill_runner.report.figures import COLORS, legend, panels, style
from distill_runner.report.statistics import ALPHA

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEACHER = "teacher"
FEW_UPDATES = 250
"""With fewer, a student that lacks points is held back by its training rather than by its size."""
SIZE, LATENCY = "size", "latency"
_AXES = {LATENCY: "p50 of one example in ms", SIZE: "MB"}
_MARKERS = {EXACT: "o", INT8: "s"}
CHOICE: dict[str, Any] = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "linestyle": ""}
CHOICE["color"] = COLORS[1]
PARETO: dict[str, Any] = {"color": "0.6", "linewidth": 1}
FLOOR: dict[str, Any] = {"color": "0.5", "linewidth": 1, "linestyle": "--"}


@dataclass(frozen=True)
class Contender:
    """A student, or the teacher, in one form.

    Attributes:
        name: ``teacher``, or the name of the student's row in a table.
        form: ``ONNX`` or ``ONNX int8``.
        family: equal for students that differ in depth or size alone; None for what is only compared with: the teacher,
            and students of labels alone.
    """

    name: str
    form: str
    family: Hashable

    @property
    def label(self) -> str:
        return f"{self.name} {self.form}"


@dataclass(frozen=True)
class Candidate(Contender):
    """A contender that is to be scored.

    Attributes:
        examples: the validation split as the first model reads it.
        seeds, files, predictions: of each model: its seed, its ONNX file, and its predictions on the validation split.
    """

    examples: PaddedSplit
    seeds: tuple[int, ...]
    files: tuple[Path, ...]
    predictions: tuple[Predictions, ...]

    def scores(self, metric: str) -> list[float]:
        """Return the score of each model on the validation split."""
        return [predictions.score(metric) for predictions in self.predictions]


@dataclass(frozen=True)
class FrontierRow(Contender):
    """A contender with its score, its test and its cost.

    Attributes:
        num_bytes: size of the first model's file.
        seeds: number of models.
        score: their mean score, as a fraction.
        interval: bounds of its 95% interval over examples.
        difference: to the teacher in float32; None without a family, as below.
        p: of the student being worse by the margin or more.
        cost: latency and throughput.
        is_good: whether the tests in order say that it is not.
    """

    num_bytes: int
    seeds: int
    score: float
    interval: tuple[float, float]
    difference: float | None
    p: float | None
    cost: RunningCost
    is_good: bool = False

    @property
    def latency(self) -> float:
        """Median latency of one example in milliseconds."""
        return self.cost.milliseconds[50]

    def place(self, axis: str) -> float:
        """Return the place of the row on an axis of ``_AXES``, in its unit."""
        return self.latency if axis == LATENCY else self.num_bytes / 1e6


def score(
    candidates: Sequence[Candidate], costs: Mapping[str, RunningCost], metric: str, margin: float
) -> list[FrontierRow]:
    """Score the candidates, and compare each student with the first candidate, which is the teacher in float32.

    Args:
        costs: by label of the candidate.
        margin: in points.
    Returns:
        The rows from large to small, the teacher's first.
    """
    rows = []
    for candidate in candidates:
        scores = pair_predictions(metric, candidate.predictions, candidates[0].predictions)
        assert scores is not None, "a validation split was read twice, differently"
        size, seeds, mean = candidate.files[0].stat().st_size, len(candidate.seeds), fmean(candidate.scores(metric))
        tests = float(scores.difference(scores.observed)), scores.p_not_worse(margin / 100)
        difference, p = (None, None) if candidate.family is None else tests
        own = candidate.name, candidate.form, candidate.family, size, seeds, mean
        interval, cost = scores.score_interval(slice(0, seeds)), costs[candidate.label]
        rows.append(FrontierRow(*own, interval=interval, difference=difference, p=p, cost=cost))
    return sorted(rows, key=lambda row: (row.family is not None, -row.num_bytes))


def with_tests(rows: Sequence[FrontierRow], smallest: str = SIZE) -> list[FrontierRow]:
    """Return the rows with ``is_good``: each chain is tested from its largest student to the first that fails.

    A chain has the students of one family in one form. The order is fixed by size or latency, which no score decides,
    so each student is tested at the level of its chain, and the chains share ``ALPHA``.
    """
    chains = grouped(((row.family, row.form), row) for row in rows if row.family is not None)
    good = set()
    for chain in chains.values():
        for row in sorted(chain, key=lambda row: row.place(smallest), reverse=True):
            if row.p is None or row.p > ALPHA / len(chains):
                break
            good.add(row.label)
    return [replace(row, is_good=row.label in good) for row in rows]


def choice(rows: Sequence[FrontierRow], smallest: str = SIZE) -> FrontierRow:
    """Return the smallest student that is good enough; if none is, the one with the best score."""
    students = [row for row in rows if row.family is not None]
    good = [row for row in students if row.is_good]
    if good:
        return min(good, key=lambda row: (row.place(smallest), -row.score))
    return max(students, key=lambda row: (row.score, -row.place(smallest)))


def pareto(rows: Iterable[FrontierRow], smallest: str) -> list[FrontierRow]:
    """Return the rows that no other row beats in score and cost, from the cheapest to the best."""
    best: list[FrontierRow] = []
    for row in sorted(rows, key=lambda row: (row.place(smallest), -row.score)):
        if not best or row.score > best[-1].score:
            best.append(row)
    return best


def conclusion(rows: Sequence[FrontierRow], row: FrontierRow, margin: float, examples: int, remedy: str) -> str:
    """Return in words why ``row`` is the choice or, if no student is good enough, what is missing.

    Args:
        margin: in points.
        examples: number of validation examples.
        remedy: what to try if ``row`` lacks points (``advice``).
    """
    assert row.difference is not None
    assert row.p is not None
    difference = f"{quantity(100 * row.difference, 'point', '+.2f')} to the teacher"
    limit = quantity(margin, "point", "g")
    if row.is_good:
        return f"choice: {row.label}, {difference}; not worse by {limit} (p = {row.p:.2g}, one-sided)"
    text = f"no student is shown to be within {limit} of the teacher; the best is {row.label}, {difference}"
    if 100 * row.difference <= -margin:
        return f"{text}. It lacks {quantity(-100 * row.difference - margin, 'point', '.2f')}: {remedy}"
    level = ALPHA / len({(other.family, other.form) for other in rows if other.family is not None})
    same_form = [other for other in rows if (other.family, other.form) == (row.family, row.form)]
    larger = [other for other in same_form if other.num_bytes > row.num_bytes and (other.p is None or other.p > level)]
    if larger:
        return f"{text}. It is not tested, since the larger {larger[0].label} is not shown to be within it either."
    if (needed := examples_needed(row.p, examples, level)) is None:
        return f"{text}. Its predictions differ too little to test."
    return f"{text}. About {needed:,} validation examples, of {examples:,} now, would show it (p = {row.p:.2g})."


def advice(updates: int, temperature: float) -> str:
    """Return what to try with a student that lacks points after some updates with soft labels of a temperature."""
    if updates >= FEW_UPDATES:
        return "try more layers, epochs or data."
    softer = f"loss.temperature=1 (now {temperature:g}), " if temperature > 1 else ""
    remedy = f"try {softer}more epochs, or a higher optim.lr, before more layers or data."
    return f"it had only {quantity(updates, 'update')}; {remedy}"


def teacher_notes(rows: Sequence[FrontierRow], row: FrontierRow, smallest: str = SIZE) -> list[str]:
    """Return notes on what scores at least as well as ``row`` and costs no more: the teacher itself, labels alone."""
    cost = "size" if smallest == SIZE else "latency"
    return [
        f"The {other.label} has no larger {cost} than the student and scores {100 * other.score:.2f}."
        for other in rows
        if other.family is None and other.score >= row.score and other.place(smallest) <= row.place(smallest)
    ]


def table(rows: Sequence[FrontierRow], metric: str, selection: FrontierRow, margin: float, smallest: str = SIZE) -> str:
    """Return a Markdown table, from the largest to the smallest student, the teacher first.

    Rows whose latencies overlap name each other by number. A star marks the Pareto set, an arrow a choice that is good
    enough.
    """
    best = {row.label for row in pareto(rows, smallest)}
    header = ["#", "model", "form", f"{metric} ×100", "95%", "to the teacher", "p", f"within {margin:g}", "MB"]
    header += ["p50 ms", "of p50", "p95", "p99", f"p50 at {BATCH}", f"examples/s at {BATCH}", "as fast as"]
    cells = []
    for number, row in enumerate(rows, start=1):
        equal = [str(n) for n, other in enumerate(rows, 1) if other is not row and row.cost.is_as_fast_as(other.cost)]
        marks = ("→ " if row.is_good and row.label == selection.label else "") + ("★ " if row.label in best else "")
        scores = "{:.2f}–{:.2f}".format(*(100 * bound for bound in row.interval))
        line = [f"{number}", f"{marks}{row.name}", row.form, f"{100 * row.score:.2f}", scores]
        line += ["" if row.difference is None else f"{100 * row.difference:+.2f}"]
        line += ["", ""] if row.p is None else [f"{row.p:.2g}", "yes" if row.is_good else "no"]
        line += [f"{row.num_bytes / 1e6:.3g}", f"{row.latency:.2f}", "{:.2f}–{:.2f}".format(*row.cost.interval)]
        line += [*(f"{row.cost.milliseconds[p]:.2f}" for p in (95, 99)), f"{row.cost.batch_milliseconds[50]:.2f}"]
        cells.append([*line, f"{row.cost.examples_per_second:.0f}", ", ".join(equal)])
    return markdown_table(header, cells, text_columns=3)


def figure(rows: Sequence[FrontierRow], selection: FrontierRow, metric: str, task: str, margin: float) -> "Figure":
    """Draw two panels, each with a point for each row and its 95% intervals; the horizontal axes are logarithmic.

    A line joins the Pareto set, and a dashed one lies ``margin`` points below the teacher. The selection gets a ring.

    Args:
        rows: the first one is the teacher in float32.
        selection: the row of the choice; if it is not good enough, it is only the best.
    """
    from matplotlib.ticker import LogLocator

    shared = set.intersection(*({*row.name.split(", ")[1:]} for row in rows if row.family is not None))
    names = [", ".join(part for part in row.name.split(", ") if part not in shared) for row in rows]  # whole in tables
    with style():
        picture, panels_of = panels(2, 2, width=5.2, height=4.0)
        for panel, (axis, words) in zip(panels_of, _AXES.items(), strict=True):
            best = pareto(rows, axis)
            panel.plot([row.place(axis) for row in best], [100 * row.score for row in best], zorder=1, **PARETO)
            for row in rows:
                x, y, (low, high) = row.place(axis), 100 * row.score, row.cost.interval
                heights = [[y - 100 * row.interval[0]], [100 * row.interval[1] - y]]
                widths = [[max(0.0, x - low)], [max(0.0, high - x)]] if axis == LATENCY else None
                color = COLORS[6] if row.name == TEACHER else COLORS[0] if row.family is not None else COLORS[1]
                panel.errorbar(x, y, heights, widths, elinewidth=0.8, capsize=2, color=color, marker=_MARKERS[row.form])
            panel.plot(selection.place(axis), 100 * selection.score, **CHOICE)
            panel.axhline(100 * rows[0].score - margin, **FLOOR)
            panel.set(xscale="log", xlabel=words, xmargin=0.12)
            low_end, high_end = panel.get_xlim()
            panel.xaxis.set_minor_locator(LogLocator(subs=(2, 5) if high_end > 10 * low_end else "all"))
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_formatter("{x:.3g}")
        panels_of[0].set_ylabel(f"{metric} × 100")
        picture.suptitle(f"{task}: score on validation against latency and size")
        forms = [form for form in _MARKERS if any(row.form == form and row.family is not None for row in rows)]
        points: dict[str, Any] = {"color": COLORS[0], "linestyle": ""}
        looks: dict[str, Any] = {f"student {form}": {**points, "marker": _MARKERS[form]} for form in forms}
        looks |= {"teacher": {**points, "color": COLORS[6], "marker": "o"}, "Pareto set": PARETO}
        has_untaught = any(row.family is None and row.name != TEACHER for row in rows)
        looks |= {"labels alone": {**points, "color": COLORS[1], "marker": "o"}} if has_untaught else {}
        ring = "choice" if selection.is_good else "best, but not good enough"
        legend(picture, {**looks, ring: CHOICE, f"teacher − {margin:g}": FLOOR})
        picture.draw_without_rendering()  # from here on, each point has its place
        for panel, axis in zip(panels_of, _AXES, strict=True):
            _annotate(panel, [(name, row.place(axis), 100 * row.score) for name, row in zip(names, rows, strict=True)])
    return picture


def _annotate(panel: Any, points: Sequence[tuple[str, float, float]]) -> None:
    """Write a name towards the middle beside each point (x, y), at the nearest height at which it covers no other."""
    from matplotlib.transforms import Bbox

    boxes: list[Bbox] = []
    for name, x, y in points:
        side, ha = (-5, "right") if x * x > panel.get_xlim()[0] * panel.get_xlim()[1] else (5, "left")
        look = {"textcoords": "offset points", "fontsize": 6, "color": "0.35", "ha": ha, "in_layout": False}
        text = panel.annotate(name, (x, y), (side, 4), **look)
        for step in range(4 * len(points)):
            text.set_position((side, 4 + (step + 1) // 2 * (-8 if step % 2 else 8)))
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in boxes):
                break
        boxes.append(box)
