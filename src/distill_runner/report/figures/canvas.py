"""Style, colours, panels and legend that all figures share. matplotlib is imported only when something is drawn."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from math import ceil
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from distill_runner.common.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's colours, which colour-blind readers can distinguish (without their yellow, which is too pale)."""


def panels(count: int, most: int, width: float, height: float) -> tuple["Figure", list["Axes"]]:
    """Return a figure of ``count`` panels of ``width`` × ``height`` inches, at most ``most`` panels in a row."""
    from matplotlib.figure import Figure

    rows = ceil(count / most)
    columns = ceil(count / rows)
    figure = Figure(figsize=(max(5.0, width * columns), height * rows + 0.7), layout="constrained")
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for spare in axes[count:]:
        spare.remove()
    return figure, list(axes[:count])


def legend(figure: "Figure", looks: Mapping[str, Mapping[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    below(figure, [Line2D([], [], label=name, **look) for name, look in looks.items()])


def below(figure: "Figure", handles: Sequence[Any]) -> None:
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
    known = sorted(figure.canvas.get_supported_filetypes())
    if (extension := file.suffix.lower()[1:]) not in known:
        raise UserError("--out", file.name, "is not a picture format", f"Known: {', '.join(known)}.")
    with style():  # matplotlib lays out texts only now, with the style that is then active
        figure.savefig(file, metadata={"Software": None} if extension == "png" else None)


def style() -> AbstractContextManager[None]:
    """Return a context with matplotlib's own defaults, whatever the user's defaults are, and a light grid."""
    from matplotlib.style import context

    own = {
        "savefig.dpi": 150,
        "font.size": 9,
        "axes.titlesize": 10,
        "figure.titlesize": 11,
        "figure.labelsize": 9,
        "axes.grid": True,
        "grid.color": "0.9",
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "lines.markersize": 5,
        "legend.frameon": False,
    }
    return context(["default", own])
