"""ALP-KD's figures of inner layers: which teacher layers a student layer attends to, and how close their states are.

The functions repeat Figure 3 (weights of the teacher's layers), Figure 4a-b (states in a plane) and Figure 4c-d
(distances) of ALP-KD.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distill_runner.report.figures.canvas import COLOURS, legend, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SEED = 0
TEACHER = "teacher"
BLUE, RED, GREEN, *OTHERS = COLOURS
"""Colours as in the paper: the teacher green, the first student blue, the second red."""


def sample(size: int, count: int) -> np.ndarray:
    """Return the indices of ``count`` of ``size`` examples, at most ``size``: "randomly selected" (ALP-KD).

    **reading**: the seed is always 0, so that figures of different runs show the same examples. A sample of 10 is the
    first 10 of a sample of 100.
    """
    return np.random.default_rng(SEED).permutation(size)[:count]


def principal_components(groups: Sequence[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Project each group of states (n, H) onto the plane of the first two principal components: (n, 2).

    **reading**: the components are computed from all groups together, so that one plane can show all groups.

    Returns:
        The coordinates of each group, and the shares (2,) of the variance that the components explain.
    """
    from sklearn.decomposition import PCA

    analysis = PCA(2, svd_solver="full")
    flat = analysis.fit_transform(np.concatenate(groups).astype(np.float64))
    return np.split(flat, np.cumsum([len(group) for group in groups])[:-1]), analysis.explained_variance_ratio_


def distances(student: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """Return 1 minus the cosine between states (n, H) of student and teacher, for each example: (n,), 0 to 2."""
    from sklearn.metrics.pairwise import paired_cosine_distances

    found: np.ndarray = paired_cosine_distances(student.astype(np.float64), teacher.astype(np.float64))
    return found


def markdown(head: Sequence[str], rows: Mapping[str, Sequence[float]]) -> str:
    """Return a Markdown table of numbers with three decimals, one row per name under ``head``; NaN is shown as –."""
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    for name, values in rows.items():
        cells = ("–" if np.isnan(value) else f"{value:.3f}" for value in values)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw_alpha(weights: Mapping[str, Mapping[int, np.ndarray]], examples: np.ndarray) -> "Figure":
    """Draw a heat map for each run (across) and student layer (down), all with one colour scale (Figure 3).

    Args:
        weights: (examples, teacher layers) by run and student layer. NaN where the mapping has no such pair of layers,
            drawn hatched.
        examples: indices of the examples in the split.
    """
    from matplotlib.figure import Figure

    layers = list(next(iter(weights.values())))
    some = next(iter(weights.values()))[layers[0]]
    height, width = 1.0 + 0.22 * len(some), 0.8 + 0.22 * some.shape[1]
    most = max(float(np.nanmax(alpha)) for run in weights.values() for alpha in run.values())
    with style():
        size = (max(4.0, width * len(weights) + 1), height * len(layers) + 0.4)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(len(layers), len(weights), squeeze=False)
        for column, (name, run) in zip(grid.T, weights.items(), strict=True):
            for panel, (layer, alpha) in zip(column, run.items(), strict=True):
                _heat_panel(panel, alpha, examples, most)
                panel.set_title(f"{name}\nstudent layer {layer}")
        figure.colorbar(grid[0, 0].images[0], ax=grid, label="weight of the teacher's layer")
        figure.supxlabel("teacher layer")
        figure.supylabel("example")
    return figure


def _heat_panel(panel: "Axes", alpha: np.ndarray, examples: np.ndarray, most: float) -> None:
    from matplotlib.patches import Rectangle

    hatched: dict[str, Any] = {"facecolor": "0.95", "edgecolor": "0.75", "hatch": "///", "linewidth": 0}
    panel.add_patch(Rectangle((0, 0), 1, 1, transform=panel.transAxes, zorder=-1, **hatched))  # seen where alpha is NaN
    panel.imshow(alpha, cmap="Blues", vmin=0, vmax=most, aspect="auto")
    panel.set_xticks(range(alpha.shape[1]), [str(k) for k in range(1, alpha.shape[1] + 1)], fontsize=7)
    panel.set_yticks(range(len(examples)), [str(example) for example in examples], fontsize=7)
    panel.grid(visible=False)


def draw_states(
    matched: Mapping[int, int],
    teacher: Mapping[int, np.ndarray],
    students: Mapping[str, Mapping[int, np.ndarray]],
) -> "Figure":
    """Draw, for each pair of layers, the states in a plane, and below it the students' distances from the teacher.

    This repeats Figure 4.

    Args:
        matched: teacher layer by student layer.
        teacher, students: states (examples, H) by layer.
    """
    from matplotlib.figure import Figure

    looks = {TEACHER: {"color": GREEN, "marker": "^"}}
    for number, name in enumerate(students):
        looks[name] = {"color": (BLUE, RED, *OTHERS)[number % (len(COLOURS) - 1)], "marker": "osDv"[number % 4]}
    with style():
        figure = Figure(figsize=(max(5.0, 3.6 * len(matched)), 6.2), layout="constrained")
        grid = figure.subplots(2, len(matched), squeeze=False)
        for (above, below), (j, k) in zip(grid.T, matched.items(), strict=True):
            states = {TEACHER: teacher[k]} | {name: layers[j] for name, layers in students.items()}
            _plane(above, states, looks)
            above.set_title(f"student layer {j}, teacher layer {k}")
            _distances(below, states, looks)
        top = 1.05 * max(panel.dataLim.y1 for panel in grid[1])
        for panel in grid[1]:
            panel.set_ylim(0, top)
        grid[1, 0].set_ylabel("cosine distance from the teacher\n(dashed: mean)")
        legend(figure, {name: {**look, "linestyle": "", "alpha": 0.7} for name, look in looks.items()})
    return figure


def _plane(panel: "Axes", states: Mapping[str, np.ndarray], looks: Mapping[str, Mapping[str, Any]]) -> None:
    flat, explained = principal_components(list(states.values()))
    for name, places in zip(states, flat, strict=True):
        panel.plot(*places.T, linestyle="", markersize=4, alpha=0.6, markeredgewidth=0, **looks[name])
    # Otherwise, differences in the second component look as large as in the first.
    panel.set_aspect("equal", adjustable="datalim")
    panel.set_xlabel(f"first component ({explained[0]:.0%} of the variance)")
    panel.set_ylabel(f"second component ({explained[1]:.0%})")


def _distances(panel: "Axes", states: Mapping[str, np.ndarray], looks: Mapping[str, Mapping[str, Any]]) -> None:
    teacher, *students = states
    for name in students:
        apart = distances(states[name], states[teacher])
        panel.plot(range(1, len(apart) + 1), apart, linewidth=0.8, markersize=2.5, **looks[name])
        panel.axhline(apart.mean(), color=looks[name]["color"], linestyle="--", linewidth=1)
    panel.set_xlabel("example")
