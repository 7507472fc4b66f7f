"""Tables of runs that were selected on validation and on held-out examples, and of metrics that do not select."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill_runner.report.compare import optimism
from distill_runner.report.figures import BEST, score_figure
from distill_runner.report.formats import notes, sentence, table_lines
from distill_runner.report.frame import GRID, tabulate
from helpers.fake_results import with_specs

LABELS = np.array([0, 1] * 50)


def run(folder: Path, lr: float, right: int, held_out: float | None = None, **more: Any) -> dict[str, Any]:
    """A finished run of 100 examples, ``right`` of them predicted."""
    place = folder / f"{lr}-{held_out}"
    place.mkdir()
    said = np.where(np.arange(100) < right, LABELS, 1 - LABELS)
    np.savez(place / "predictions-validation.npz", outputs=np.eye(2)[said], labels=LABELS)
    selection = None if held_out is None else {"on": "held_out examples", "score": held_out}
    made = {
        **{"task": "rte", "method": "rkd", "status": "done", "seed": 1, "metric": "accuracy", "teacher": "large"},
        **{"score": right / 100, "selection": selection, "teacher_score": 0.9, "student": {"num_layers": 2}},
        **{"settings": {"optim.lr": lr}, "key": place.name, "folder": str(place), "num_params": 10, "epochs": 1},
        **{"published": None, "dataset": "d", **more},
    }
    return with_specs(made)


@pytest.fixture
def results(tmp_path: Path) -> list[dict[str, Any]]:
    """By validation the second learning rate is best, by held-out examples the first."""
    on_validation = [run(tmp_path, 1e-5, 70), run(tmp_path, 2e-5, 80)]
    return [*on_validation, run(tmp_path, 1e-5, 72, held_out=0.9), run(tmp_path, 2e-5, 78, held_out=0.8)]


def test_each_column_chooses_by_its_own_scores(results: list[dict[str, Any]]) -> None:
    table = tabulate(results)
    assert table.tasks == ["rte", "rte, held out"]
    assert [*table.rows] == ["rkd"]
    cells = table.rows["rkd"]
    assert {name: cell.value for name, cell in cells.items()} == {"rte": 80.0, "rte, held out": 72.0}
    assert [cell.kind for cell in cells.values()] == [GRID, "chosen by held_out examples"]
    assert cells["rte, held out"].settings == {"optim.lr": 1e-5}


def test_the_difference_is_the_optimism_with_its_interval(results: list[dict[str, Any]]) -> None:
    table = tabulate(results)
    assert table_lines(table)[0] == ["rte", "rte, held out"], "two columns of one task have no average"
    (found,) = optimism(table)
    assert found.difference == pytest.approx(8.0)
    assert found.examples is not None
    assert found.examples.low is not None
    assert found.examples.high is not None
    assert found.examples.low < 0.08 < found.examples.high
    assert "rkd selected on validation against on held-out examples on rte: +8.00 accuracy; over" in sentence(found)
    assert found.remarks[-1] == "the best of 2 and of 1 points were chosen on these examples: p is too small"
    assert {line.name: line for line in table_lines(table)[1]}["optimism"].text("rte") == "+8.00"
    assert any("chosen by these scores" in note for note in notes(table))


def test_the_figure_has_a_panel_for_runs_selected_on_held_out_examples(results: list[dict[str, Any]]) -> None:
    for chosen, shown in ((results, {"rte": 80, "rte, held out": 72}), (results[2:], {"rte, held out": 72})):
        panels = score_figure(chosen).axes
        marks = [next(line for line in panel.lines if line.get_label() == BEST) for panel in panels]
        found = {panel.get_title(): np.asarray(mark.get_xdata())[0] for panel, mark in zip(panels, marks, strict=True)}
        assert found == pytest.approx(shown)


def test_a_second_metric_that_a_paper_prints_has_a_column(tmp_path: Path) -> None:
    """Internal representations, Table 1: MRPC is selected by F1, and its accuracy is printed beside."""
    printed = {"value": 77.21, "source": "Internal KD Table 1", "comparable": True}
    other = [{"metric": "accuracy", "score": 0.70, "teacher_score": 0.8, "published": printed}]
    runs = [
        run(tmp_path, 1e-5, 75, metric="f1_weighted", others=[other[0] | {"score": 0.9}]),
        run(tmp_path, 2e-5, 76, metric="f1_weighted", others=other),
    ]
    table = tabulate(runs)
    assert table.tasks == ["rte", "rte accuracy"]
    accuracy = table.rows["rkd"]["rte accuracy"]
    assert accuracy.value == 70.0, "of the run that F1 has chosen, not the best accuracy"
    assert (accuracy.numbers["published"], accuracy.numbers["source"]) == (77.21, "Internal KD Table 1")
    assert accuracy.kind == "chosen by f1_weighted"
    assert table_lines(table)[0] == ["rte", "rte accuracy"]
    assert table.teachers["teacher large"]["rte accuracy"]["value"] == 80.0
