"""Effects of distilling internal representations: agreement with the teacher, scores by epoch, attention maps.

The functions repeat Tables 3 and 4, and Figures 4, 5, 10 and 11, of the paper on internal representations.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distill_runner.kinds.verdicts import Verdicts
from distill_runner.report.figures.canvas import COLOURS, legend, panels, style
from distill_runner.report.statistics import Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def agreement(teacher: np.ndarray, student: np.ndarray) -> dict[str, int]:
    """Count the examples that teacher and student get right or wrong, for each combination (Table 3).

    Args:
        teacher, student: (N,) booleans, whether the model is right.
    """
    return {
        f"teacher_{one}_student_{other}": int((first & second).sum())
        for one, first in (("right", teacher), ("wrong", ~teacher))
        for other, second in (("right", student), ("wrong", ~student))
    }


def agreement_table(counts: Mapping[str, Mapping[str, int]]) -> str:
    """Return Table 3 as Markdown: one row per student, columns by whether the teacher is right."""
    first = next(iter(counts.values()))
    right, wrong = (first[f"teacher_{kind}_student_right"] + first[f"teacher_{kind}_student_wrong"] for kind in KINDS)
    rows = [f"| student | teacher right ({right:,}): right | wrong | teacher wrong ({wrong:,}): right | wrong |"]
    rows.append("| --- | ---: | ---: | ---: | ---: |")
    for name, count in counts.items():
        cells = [f"{count[f'teacher_{one}_student_{other}']:,}" for one in KINDS for other in KINDS]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


KINDS = ("right", "wrong")


def disputed(teacher: Verdicts, students: Sequence[Verdicts]) -> np.ndarray:
    """Return the indices of examples that the teacher gets right, and some but not all students get wrong.

    If there is only one student, its wrong answers count.

    **reading**: the paper shows four such examples and does not say how they were chosen. Here the examples are sorted
    by how far the models, including the teacher, differ in the probability of the truth; the largest gap comes first.
    """
    right = np.stack([model.right for model in (teacher, *students)])
    found = np.flatnonzero(right[0] & ~right[1:].all(0) & (right[1:].any(0) | (len(students) == 1)))
    gap = np.ptp([model.of_truth[found] for model in (teacher, *students)], axis=0)
    return np.asarray(found[np.argsort(-gap, kind="stable")])


def samples_table(
    texts: Sequence[str], truths: Sequence[str], predicted: Mapping[str, Sequence[str]], numbers: Sequence[int]
) -> str:
    """Return Table 4 as Markdown: one row per example, with its truth and the prediction of each model.

    Args:
        texts, truths: texts and truths of the examples; line breaks become blanks, and bars are escaped.
        predicted: predictions for the examples, by name of the model.
        numbers: indices of the examples in their split.
    """
    rows = [f"| no. | example | truth | {' | '.join(predicted)} |", f"| ---: | --- | --- |{' --- |' * len(predicted)}"]
    for at, number in enumerate(numbers):
        cells = [texts[at], truths[at], *(said[at] for said in predicted.values())]
        escaped = [" ".join(cell.split()).replace("|", "\\|") for cell in cells]
        rows.append(f"| {number} | {' | '.join(escaped)} |")
    return "\n".join(rows)


@dataclass(frozen=True)
class ScoreHistory:
    """A student's score after each epoch, and the epochs in which a schedule finished its layers.

    Attributes:
        metric: name of the metric; ``scores`` are fractions.
        ends: pairs of a layer (from 1) and the number of epochs that had passed when the schedule left the layer.
    """

    metric: str
    scores: list[float]
    ends: list[tuple[int, int]]

    @classmethod
    def read(cls, folder: Path) -> "ScoreHistory":
        """Read the history of a finished run; the score is the first metric of the validation.

        Epochs are in ``metrics.jsonl``. If another run trained the student, that file has none, and ``result.json`` has
        the scores alone.
        """
        scores: list[float] = []
        ends: dict[int, int] = {}
        layer, name = 0, None
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            point: dict[str, Any] = json.loads(line)
            now = int(point.get("schedule/layer", layer))
            if now != layer and layer:
                ends[layer] = len(scores)
            layer = now
            name = name or next((key for key in point if key.startswith("validation/")), None)
            if name in point:
                scores.append(point[name])
        if not scores:
            epochs = json.loads((folder / "result.json").read_text())["history"]
            name = next(iter(epochs[0]), None) if epochs else None
            scores = [epoch[name] for epoch in epochs]
        return cls((name or "score").rpartition("/")[2], scores, list(ends.items()))


def draw_histories(runs: Mapping[str, Sequence[ScoreHistory]]) -> "Figure":
    """Draw the score per epoch; L1, L2, ... mark where a layer was left (Figures 4 and 10).

    Several seeds are drawn as their mean and its 95 % interval, over the epochs that all of them have, without marks.
    """
    from matplotlib.ticker import MaxNLocator

    with style():
        figure, (axes,) = panels(1, 1, 7.5, 3.8)
        marked: Counter[tuple[int, float]] = Counter()
        colours = dict(zip(runs, cycle(COLOURS), strict=False))
        for name, seeds in runs.items():
            each_epoch = zip(*(run.scores for run in seeds), strict=False)
            spreads = [Spread.of([100 * score for score in scores]) for scores in each_epoch]
            epochs, means = range(1, len(spreads) + 1), [spread.mean for spread in spreads]
            single = "o" if len(spreads) == 1 else None  # one epoch alone would draw no line
            axes.plot(epochs, means, color=colours[name], marker=single)
            low, high = ([spread.mean + sign * (spread.interval or 0) for spread in spreads] for sign in (-1, 1))
            axes.fill_between(epochs, low, high, color=colours[name], alpha=0.15, linewidth=0)
            for layer, epoch in seeds[0].ends if len(seeds) == 1 else ():
                place = (epoch, means[epoch - 1])
                axes.plot(*place, "o", markersize=4, color=colours[name])
                above = 5 + 10 * marked[place]  # stacks the labels where lines meet
                axes.annotate(
                    f"L{layer}",
                    place,
                    xytext=(0, above),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                    color=colours[name],
                )
                marked[place] += 1
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.margins(y=0.12)
        metrics = {run.metric: None for seeds in runs.values() for run in seeds}
        axes.set(xlabel="epoch", ylabel=f"{' or '.join(metrics)} x 100")
        legend(figure, {name: {"color": colour} for name, colour in colours.items()})
    return figure


def divergence(teacher: np.ndarray, student: np.ndarray) -> np.ndarray:
    """Return KL(teacher || student) of attention maps (heads, L, L), averaged over rows: one number per head."""
    from scipy.special import rel_entr

    return np.asarray(rel_entr(teacher, student).sum(-1).mean(-1))


def draw_attention(
    tokens: Sequence[str],
    teacher: Mapping[int, np.ndarray],
    students: Mapping[str, Mapping[int, np.ndarray]],
    matched: Mapping[int, int],
    head: int,
) -> "Figure":
    """Draw the attention maps of one head, one row per pair of matched layers.

    The title of a student's map gives its KL divergence from the teacher's map. The maps of a row share one colour
    scale.

    Args:
        teacher, students: attention (heads, L, L) of one example, by layer.
        matched: teacher layer by student layer.
        head: index from 0 (Figure 11 shows head 0).
    """
    from matplotlib.figure import Figure

    size = 1 + len(tokens) / 8
    figure = Figure(figsize=(size * (1 + len(students)), size * len(matched) + 0.3), layout="constrained")
    figure.suptitle(f"attention of head {head}", fontsize=9)
    grid = figure.subplots(len(matched), 1 + len(students), squeeze=False)
    for row, (j, k) in zip(grid, matched.items(), strict=True):
        maps = {f"teacher\nlayer {k}": teacher[k]}
        for name, student in students.items():
            maps[f"{name}\nlayer {j}, KL {divergence(teacher[k], student[j])[head]:.3f}"] = student[j]
        darkest = max(float(attention[head].max()) for attention in maps.values())
        for axes, (title, attention) in zip(row, maps.items(), strict=True):
            axes.imshow(attention[head], vmin=0, vmax=darkest, cmap="Blues")
            axes.set_title(title, fontsize=8)
            axes.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=5)
            axes.set_yticks(range(len(tokens)), tokens, fontsize=5)
    return figure
