"""Halving of grids with several seeds: which points are trained to the end, and what the table and the report say."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distill_runner.pipeline import status
from distill_runner.report.frame import Cell, tabulate
from distill_runner.sweeping.halving import by_cell, halve, halving_report
from distill_runner.sweeping.points import GridPoint
from helpers.fake_results import failed, with_specs

Point = tuple[float, int]
"""Learning rate and seed."""


def halved(folder: Path, scores: Mapping[Point, float], epochs: int) -> tuple[set[Point], Cell, str]:
    """Halve a grid by 3 whose points have the same score after every epoch.

    Returns:
        The points that were trained to the end, their cell in the table, and the report.
    """
    method = SimpleNamespace(schedule=None, compares_examples=False)
    config = SimpleNamespace(optim=SimpleNamespace(epochs=epochs), method=method)
    run: Any = SimpleNamespace()
    points = {}
    for rate, seed in scores:
        name = f"{rate} {seed}"
        names = failed(key=name, seed=seed, settings={"optim.lr": rate, "optim.epochs": epochs})
        spec = with_specs(names)["specs"][name]
        shape = SimpleNamespace(reads_images=False)
        stage: Any = SimpleNamespace(key=name, spec=spec, all_upstream=[], config=config, shape=shape)
        points[rate, seed] = GridPoint((f"{rate}", f"{seed}"), folder / name, name, names, run, stage)

    def train(jobs: Sequence[Sequence[str]]) -> None:
        for rate, seed, *pause in jobs:
            of = float(rate), int(seed)
            done = int(pause[0].partition("=")[2]) if pause else epochs
            scored = {"score": scores[of], "metric": "accuracy", "history": [{"accuracy": scores[of]}] * done}
            status.write_status(
                points[of].folder, "done" if done == epochs else "paused", {**points[of].names, **scored}
            )

    cells = by_cell(points.values())
    train([point.overrides for point in halve(cells, list(points.values()), train, 3)])
    (row,) = tabulate(point.result() for point in points.values()).rows.values()
    (report,) = (halving_report(cell, 3) for cell in cells)
    return {of for of, point in points.items() if point.result()["status"] == "done"}, row["rte"], report


def test_seeds_of_one_setting_do_not_compete(tmp_path: Path) -> None:
    scores = {(1e-5, seed): 0.5 + seed / 100 for seed in range(1, 10)}
    done, cell, report = halved(tmp_path, scores, epochs=9)
    assert done == set(scores)
    assert cell.kind == ""
    assert cell.value == pytest.approx(55)
    assert report.endswith("81 of 81 epochs trained (0 % saved)")


def test_a_setting_is_judged_by_the_mean_of_its_seeds(tmp_path: Path) -> None:
    scores = {(1e-5, 1): 0.6, (1e-5, 2): 0.6, (2e-5, 1): 0.7, (2e-5, 2): 0.7}
    scores |= {(3e-5, 1): 0.9, (3e-5, 2): 0.4}  # the luckiest seed, but a mean of 0.65
    done, cell, report = halved(tmp_path, scores, epochs=9)
    assert done == {(2e-5, 1), (2e-5, 2)}
    assert cell.value == pytest.approx(70)
    assert report.endswith("22 of 54 epochs trained (59 % saved)"), "four points of one epoch, two of nine"


def test_settings_that_tie_all_continue_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on small tasks, where students predict the larger class for the first epochs."""
    caplog.set_level("INFO")
    done, _, _ = halved(tmp_path, {(number * 1e-5, 1): 0.6838 for number in range(1, 4)}, epochs=9)
    assert len(done) == 3
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "3 of 3 settings continue after epoch 1, because some tie",
        "3 of 3 settings continue after epoch 3, because some tie",
    ]
