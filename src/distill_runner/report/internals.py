"""What distillation of internal representations did: agreement with the teacher, course of the layers, attention maps.

Tables and figures of internal representations: Table 3, Figures 4 and 10, Figures 5 and 11.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def agreement(teacher: np.ndarray, student: np.ndarray, labels: np.ndarray) -> dict[str, int]:
    """How many examples the two get right and wrong together (Table 3).

    Args:
        teacher, student: logits (N, C) of the same examples.
        labels: (N,).
    """
    taught, learnt = teacher.argmax(1) == labels, student.argmax(1) == labels
    return {
        f"teacher_{one}_student_{other}": int((first & second).sum())
        for one, first in (("right", taught), ("wrong", ~taught))
        for other, second in (("right", learnt), ("wrong", ~learnt))
    }


def agreement_table(counts: Mapping[str, Mapping[str, int]]) -> str:
    """Table 3: a row for each student by name, columns by the teacher's success, as Markdown."""
    first = next(iter(counts.values()))
    right, wrong = (first[f"teacher_{kind}_student_right"] + first[f"teacher_{kind}_student_wrong"] for kind in KINDS)
    rows = [f"| student | teacher right ({right:,}): right | wrong | teacher wrong ({wrong:,}): right | wrong |"]
    rows.append("| --- | ---: | ---: | ---: | ---: |")
    for name, count in counts.items():
        cells = [f"{count[f'teacher_{one}_student_{other}']:,}" for one in KINDS for other in KINDS]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


KINDS = ("right", "wrong")


def course(metrics: Path) -> tuple[list[float], list[tuple[int, int]]]:
    """The score after each epoch, and the epochs at whose end the layers of a schedule were through.

    Args:
        metrics: a run's ``metrics.jsonl``; the score is the first metric of the validation.
    Returns:
        The scores, and pairs of a layer (from 1) and the number of epochs that had passed when it was left.
    """
    scores: list[float] = []
    ends: dict[int, int] = {}
    layer, name = 0, None
    for line in metrics.read_text().splitlines():
        point: dict[str, Any] = json.loads(line)
        now = int(point.get("schedule/layer", layer))
        if now != layer and layer:
            ends[layer] = len(scores)
        layer = now
        name = name or next((key for key in point if key.startswith("validation/")), None)
        if name in point:
            scores.append(point[name])
    return scores, list(ends.items())


def draw_courses(runs: Mapping[str, tuple[list[float], list[tuple[int, int]]]]) -> "Figure":
    """Score per epoch, a line for each run; L1, L2, ... mark where a layer was left (Figures 4 and 10)."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, (scores, ends) in runs.items():
        (line,) = axes.plot(range(1, len(scores) + 1), [100 * score for score in scores], label=name)
        for layer, epoch in ends:
            place = (epoch, 100 * scores[epoch - 1])
            axes.plot(*place, "o", color=line.get_color(), markersize=4)
            axes.annotate(f"L{layer}", place, xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="epoch", ylabel="score")
    axes.legend()
    return figure


def divergence(teacher: np.ndarray, student: np.ndarray) -> np.ndarray:
    """KL(teacher || student) of attention maps (heads, L, L), mean over the rows: one number per head."""
    return np.asarray((teacher * np.log(teacher / student)).sum(-1).mean(-1))


def draw_attention(
    tokens: Sequence[str],
    teacher: Mapping[int, np.ndarray],
    students: Mapping[str, Mapping[int, np.ndarray]],
    matched: Mapping[int, int],
    head: int,
) -> "Figure":
    """Attention maps of one head, a row for each matched layer; above a student's, its KL from the teacher's.

    The maps of a row share their colours.

    Args:
        teacher, students: attention (heads, L, L) by layer, of one example.
        matched: teacher layer by student layer.
        head: counted from 0 (Figure 11 shows head 0).
    """
    from matplotlib.figure import Figure

    size = 1 + len(tokens) / 8
    figure = Figure(figsize=(size * (1 + len(students)), size * len(matched)), layout="constrained")
    grid = figure.subplots(len(matched), 1 + len(students), squeeze=False)
    for row, (j, k) in zip(grid, matched.items(), strict=True):
        maps = {f"teacher, layer {k}": teacher[k]}
        for name, student in students.items():
            maps[f"{name}, layer {j}\nKL {divergence(teacher[k], student[j])[head]:.3f}"] = student[j]
        darkest = max(float(attention[head].max()) for attention in maps.values())
        for axes, (title, attention) in zip(row, maps.items(), strict=True):
            axes.imshow(attention[head], vmin=0, vmax=darkest, cmap="Blues")
            axes.set_title(title, fontsize=8)
            axes.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=5)
            axes.set_yticks(range(len(tokens)), tokens, fontsize=5)
    return figure
