"""Comparisons of students with their teacher: agreement, scores by epoch, attention maps, inner states.

The functions repeat the tables and figures of two papers. Internal representations: Tables 3 and 4, and Figures 4, 5,
10 and 11. ALP-KD: Figure 3 (weights of the teacher's layers), Figure 4a-b (states in a plane) and Figure 4c-d
(distances).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.special import rel_entr
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import paired_cosine_distances

from distill_runner.common.terminal import markdown_table
from distill_runner.report.figures import COLORS, legend, style
from distill_runner.tasks.task import ExamplePredictions

Layers = Mapping[int, np.ndarray]
"""States or attention of a model, by layer."""
SEED = 0
"""Seed of ``sample``."""
_TEACHER = "teacher"
BLUE, RED, GREEN, *OTHERS = COLORS
"""Colors as in ALP-KD's figures: the teacher green, the first student blue, the second red."""


def agreement(teacher: np.ndarray, student: np.ndarray) -> list[int]:
    """Count the examples that both get right, only the teacher, only the student, and neither (Table 3).

    Args:
        teacher, student: (N,) booleans, whether the model is correct.
    """
    return [int((one & other).sum()) for one in (teacher, ~teacher) for other in (student, ~student)]


def agreement_table(counts: Mapping[str, Sequence[int]]) -> str:
    """Return Table 3 as Markdown: one row per student, columns by whether the teacher is right."""
    first = next(iter(counts.values()))
    right, wrong = first[0] + first[1], first[2] + first[3]
    header = ["student", f"teacher right ({right:,}): right", "wrong", f"teacher wrong ({wrong:,}): right", "wrong"]
    return markdown_table(header, [[name, *(f"{number:,}" for number in row)] for name, row in counts.items()])


def disputed(teacher: ExamplePredictions, students: Sequence[ExamplePredictions]) -> np.ndarray:
    """Return the indices of examples that the teacher gets right and a student gets wrong.

    The paper shows four such examples and does not say how they were chosen. Here the examples on which the students
    disagree come first, then those that all get wrong. Within both, examples are sorted by how far the models, the
    teacher among them, differ in the probability of the true label; the largest gap comes first.
    """
    correct = np.stack([model.correct for model in (teacher, *students)])
    examples = np.flatnonzero(correct[0] & ~correct[1:].all(0))
    gap = np.ptp([model.label_probability[examples] for model in (teacher, *students)], axis=0)
    return np.asarray(examples[np.lexsort((-gap, ~correct[1:, examples].any(0)))])


def samples_table(
    texts: Sequence[str], labels: Sequence[str], predictions: Mapping[str, Sequence[str]], numbers: Sequence[int]
) -> str:
    """Return Table 4 as Markdown: one row per example, with its label and the prediction of each model.

    Args:
        texts, labels: texts and labels of the examples; line breaks become blanks, and bars are escaped.
        predictions: predictions for the examples, by name of the model.
        numbers: indices of the examples in their split.
    """
    columns = zip(numbers, texts, labels, *predictions.values(), strict=True)
    rows = [[str(one), *(" ".join(cell.split()).replace("|", "\\|") for cell in cells)] for one, *cells in columns]
    header = ["no.", "example", "label", *predictions]
    return markdown_table(header, rows, text_columns=len(header))


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
        points = pd.read_json(folder / "metrics.jsonl", lines=True)
        if (name := next((key for key in points if str(key).startswith("validation/")), None)) is None:
            epochs = json.loads((folder / "result.json").read_text(encoding="utf-8"))["history"]
            metric = next(iter(epochs[0]), "score") if epochs else "score"
            return cls(metric.rpartition("/")[2], [epoch[metric] for epoch in epochs], [])
        layers = points.get("schedule/layer", pd.Series(dtype=float)).dropna()
        starts = layers[layers != layers.shift()]  # first line of each layer
        epochs_so_far = points[name].notna().cumsum().shift(fill_value=0)
        ends = [(int(layer), int(epochs_so_far[line])) for layer, line in zip(starts, starts.index[1:], strict=False)]
        return cls(str(name).rpartition("/")[2], points[name].dropna().tolist(), [end for end in ends if end[0]])


def divergence(teacher: np.ndarray, student: np.ndarray) -> np.ndarray:
    """Return KL(teacher || student) of attention maps (heads, L, L), averaged over rows: one number per head."""
    return np.asarray(rel_entr(teacher, student).sum(-1).mean(-1))


def draw_attention(
    tokens: Sequence[str], teacher: Layers, students: Mapping[str, Layers], layer_pairs: Mapping[int, int], head: int
) -> Figure:
    """Draw the attention maps of one head, one row per pair of layers.

    The title of a student's map gives its KL divergence from the teacher's map. The maps of a row share one color
    scale.

    Args:
        teacher, students: attention (heads, L, L) of one example, by layer.
        layer_pairs: teacher layer by student layer.
        head: index from 0 (Figure 11 shows head 0).
    """
    size = 1 + len(tokens) / 8
    with style():
        figure = Figure(figsize=(size * (1 + len(students)), size * len(layer_pairs) + 0.3), layout="constrained")
        figure.suptitle(f"attention of head {head}", fontsize=9)
        grid = figure.subplots(len(layer_pairs), 1 + len(students), squeeze=False)
        for row, (j, k) in zip(grid, layer_pairs.items(), strict=True):
            maps = {f"teacher\nlayer {k}": teacher[k]}
            for name, student in students.items():
                maps[f"{name}\nlayer {j}, KL {divergence(teacher[k], student[j])[head]:.3f}"] = student[j]
            darkest = max(float(attention[head].max()) for attention in maps.values())
            for axes, (title, attention) in zip(row, maps.items(), strict=True):
                axes.imshow(attention[head], vmin=0, vmax=darkest, cmap="Blues")
                axes.grid(visible=False)
                axes.set_title(title, fontsize=8)
                axes.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=5)
                axes.set_yticks(range(len(tokens)), tokens, fontsize=5)
    return figure


def sample(size: int, count: int) -> np.ndarray:
    """Return the indices of ``count`` of ``size`` examples, at most ``size``: "randomly selected" (ALP-KD).

    The seed is always 0, so that figures of different runs show the same examples. A sample of 10 is
    the first 10 of a sample of 100.
    """
    return np.random.default_rng(SEED).permutation(size)[:count]


def principal_components(groups: Sequence[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Project each group of states (n, H) onto the plane of the first two principal components: (n, 2).

    The components are computed from all groups together, so that one plane can show all groups.

    Returns:
        The coordinates of each group, and the shares (2,) of the variance that the components explain.
    """
    analysis = PCA(2, svd_solver="full")
    coordinates = analysis.fit_transform(np.concatenate(groups).astype(np.float64))
    return np.split(coordinates, np.cumsum([len(group) for group in groups])[:-1]), analysis.explained_variance_ratio_


def distances(student: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """Return 1 minus the cosine between states (n, H) of student and teacher, for each example: (n,), 0 to 2."""
    cosine_distances: np.ndarray = paired_cosine_distances(student.astype(np.float64), teacher.astype(np.float64))
    return cosine_distances


def number_table(header: Sequence[str], rows: Mapping[str, Sequence[float]]) -> str:
    """Return a Markdown table of numbers with three decimals, one row per name under ``header``; NaN is shown as –."""
    cells = {name: ["–" if np.isnan(value) else f"{value:.3f}" for value in values] for name, values in rows.items()}
    return markdown_table(header, [[name, *row] for name, row in cells.items()])


def draw_alpha(weights: Mapping[str, Layers], examples: np.ndarray) -> Figure:
    """Draw a heat map for each run (across) and student layer (down), all with one color scale (Figure 3).

    Args:
        weights: (examples, teacher layers) by run and student layer. NaN where the mapping has no such pair of layers,
            drawn gray.
        examples: indices of the examples in the split.
    """
    layers = next(iter(weights.values()))
    rows, depth = next(iter(layers.values())).shape
    highest = max(float(np.nanmax(alpha)) for run in weights.values() for alpha in run.values())
    with style():
        size = (max(4.0, (0.8 + 0.22 * depth) * len(weights) + 1), (1.0 + 0.22 * rows) * len(layers) + 0.4)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(len(layers), len(weights), squeeze=False)
        for column, (name, run) in zip(grid.T, weights.items(), strict=True):
            for panel, (layer, alpha) in zip(column, run.items(), strict=True):
                panel.set_facecolor("0.85")  # seen where alpha is NaN
                panel.imshow(alpha, cmap="Blues", vmin=0, vmax=highest, aspect="auto")
                panel.set_xticks(range(depth), [str(k) for k in range(1, depth + 1)], fontsize=7)
                panel.set_yticks(range(rows), [str(example) for example in examples], fontsize=7)
                panel.grid(visible=False)
                panel.set_title(f"{name}\nstudent layer {layer}")
        figure.colorbar(grid[0, 0].images[0], ax=grid, label="weight of the teacher's layer")
        figure.supxlabel("teacher layer")
        figure.supylabel("example")
    return figure


def draw_states(layer_pairs: Mapping[int, int], teacher: Layers, students: Mapping[str, Layers]) -> Figure:
    """Draw, for each pair of layers, the states in a plane, and below it the students' distances from the teacher.

    This repeats Figure 4.

    Args:
        layer_pairs: teacher layer by student layer.
        teacher, students: states (examples, H) by layer.
    """
    styles = {_TEACHER: {"color": GREEN, "marker": "^"}}
    for number, name in enumerate(students):
        styles[name] = {"color": (BLUE, RED, *OTHERS)[number % (len(COLORS) - 1)], "marker": "osDv"[number % 4]}
    with style():
        figure = Figure(figsize=(max(5.0, 3.6 * len(layer_pairs)), 6.2), layout="constrained")
        grid = figure.subplots(2, len(layer_pairs), squeeze=False)
        for (plane, lower), (j, k) in zip(grid.T, layer_pairs.items(), strict=True):
            states = {_TEACHER: teacher[k]} | {name: layers[j] for name, layers in students.items()}
            coordinates, explained = principal_components(list(states.values()))
            for name, points in zip(states, coordinates, strict=True):
                plane.plot(*points.T, linestyle="", markersize=4, alpha=0.6, markeredgewidth=0, **styles[name])
            # Otherwise, differences in the second component look as large as in the first.
            plane.set_aspect("equal", adjustable="datalim")
            plane.set_xlabel(f"first component ({explained[0]:.0%} of the variance)")
            plane.set_ylabel(f"second component ({explained[1]:.0%})")
            plane.set_title(f"student layer {j}, teacher layer {k}")
            for name in students:
                values = distances(states[name], states[_TEACHER])
                lower.plot(range(1, len(values) + 1), values, linewidth=0.8, markersize=2.5, **styles[name])
                lower.axhline(values.mean(), color=styles[name]["color"], linestyle="--", linewidth=1)
            lower.set_xlabel("example")
        top = 1.05 * max(panel.dataLim.y1 for panel in grid[1])
        for panel in grid[1]:
            panel.set_ylim(0, top)
        grid[1, 0].set_ylabel("cosine distance from the teacher\n(dashed: mean)")
        legend(figure, {name: {**marker, "linestyle": "", "alpha": 0.7} for name, marker in styles.items()})
    return figure
