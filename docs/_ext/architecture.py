"""Draw the packages of ``src/distill_runner`` and their imports, from the imports themselves."""

import tomllib
from pathlib import Path
from typing import Any

import grimp
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

ROOT = Path(__file__).parents[2]
PACKAGE = "distill_runner"


def layers() -> list[str]:
    """Return the packages from top to bottom, as the import contract in pyproject.toml orders them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    return next(contract["layers"] for contract in contracts if contract["type"] == "layers")


def imports() -> dict[tuple[str, str], int]:
    """Count the modules of one package that import modules of another."""
    graph, counts = grimp.build_graph(PACKAGE, cache_dir=None), dict[tuple[str, str], int]()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            pair = _package(module), _package(imported)
            if pair[0] != pair[1] and all(pair):
                counts[pair] = counts.get(pair, 0) + 1
    return counts


def draw(file: Path) -> None:
    """Draw an arrow to each package that is imported, thicker if more modules import it."""
    packages = [package for layer in layers() for package in layer.split(" | ")]
    height = {package: len(packages) - number for number, package in enumerate(packages)}
    figure = Figure(figsize=(9, 0.5 * len(packages)))
    axes = figure.subplots()
    for (importer, imported), count in imports().items():
        if importer in height and imported in height:
            bend = 0.18 + 0.035 * (height[importer] - height[imported])
            side = 1 if (height[importer] - height[imported]) % 2 else -1
            arrow = FancyArrowPatch(
                (0.5 + side * 0.09, height[importer]),
                (0.5 + side * 0.09, height[imported]),
                connectionstyle=f"arc3,rad={-side * min(bend, 0.6)}",
                arrowstyle="-|>",
                mutation_scale=8,
                linewidth=0.4 + 0.25 * count**0.5,
                color="#4477aa",
                alpha=0.55,
            )
            axes.add_patch(arrow)
    for package, y in height.items():
        box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "#222222"}
        axes.text(0.5, y, package, ha="center", va="center", family="monospace", fontsize=10, bbox=box)
    axes.set_xlim(-0.2, 1.2)
    axes.set_ylim(0.3, len(packages) + 0.7)
    axes.axis("off")
    figure.savefig(file, bbox_inches="tight", metadata={"Date": None})


def _package(module: str) -> str:
    return module.removeprefix(PACKAGE).lstrip(".").partition(".")[0]


def _write(_app: Any) -> None:
    draw(Path(__file__).parents[1] / "architecture.svg")


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True}
