"""Results as PNG files: scores by task and method, against each hyper-parameter, and over two hyper-parameters.

A result is the content of a run's ``result.json``; only results of finished students are drawn. Scores are fractions
and are shown times 100. Equal results give equal bytes with the same version of matplotlib.
"""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from distill_runner.report.cells import is_scored
from distill_runner.report.collect import Result
from distill_runner.report.figures.canvas import save
from distill_runner.report.figures.scores import score_figure
from distill_runner.report.figures.search import RATE, heat_map, hyper_parameter_figure, varying


def write_pictures(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw every figure that ``results`` have data for; none if no student has finished.

    - ``scores.png``: scores by task and method, with the published numbers;
    - ``hyper-parameters-<task>.png``, if any hyper-parameter varies: score against each hyper-parameter that varies;
    - ``lr-temperature-<task>.png``, if learning rate and temperature both vary: best score over the two.

    Args:
        folder: must exist; files of these names in it are replaced.
    Returns:
        The files, ``scores.png`` first.
    """
    done = drawable(results)
    if not done:
        return []
    figures = {"scores": score_figure(done)}
    for task in dict.fromkeys(result["task"] for result in done):
        here = [result for result in done if result["task"] == task]
        if names := varying(here):
            figures[f"hyper-parameters-{task}"] = hyper_parameter_figure(here)
        temperature = next((name for name in names if name.endswith(".temperature")), None)
        if temperature and RATE in names:
            figures[f"lr-temperature-{task}"] = heat_map(here, temperature)
    files = []
    for name, figure in figures.items():
        files.append(folder / f"{name}.png")
        save(figure, files[-1])
    return files


def drawable(results: Sequence[Result]) -> list[Result]:
    """Return the results of students that have finished with a finite score."""
    return [result for result in results if is_scored(result) and isfinite(result["score"])]
