"""Pictures of scores against sizes, from results."""

from pathlib import Path
from typing import Any

import pytest

from distill_runner.commands.parser import run_subcommand
from distill_runner.common.errors import UserError
from distill_runner.report.figures import constant_cells, curve_cells
from helpers.fake_results import failed, run_folder, with_specs


def result(method: str, layers: int, width: int, score: float, **values: Any) -> dict[str, Any]:
    student = {"num_layers": layers, "width": width}
    named = {"task": "mnli", "metric": "accuracy", "method": method, "status": "done", "teacher": "large", "seed": 1}
    size = {"num_params": layers * width**2, "student": student, "score": score, "teacher_score": 0.9, "transfer": None}
    return with_specs(named | size | values)


SIZE = {"width": 128}
DISTILLED = {"num_layers": 2, "width": 128, "source": "stage:distil"}
CHAIN = {"distil.optim.max_steps": 400, "distil.model.source": None}

RESULTS: list[dict[str, Any]] = [
    result("pd", 2, 768, 0.70, seed=1, transfer={"name": "wiki", "size": 500}),
    result("pd", 2, 768, 0.72, seed=2, transfer={"name": "wiki", "size": 500}),
    result("pd", 12, 128, 0.60, transfer={"name": "books", "size": 1700}),
    result("pf", 2, 128, 0.50),
    {"status": "failed", "method": "pf"},
]


def values(results: list[dict[str, Any]], by: str) -> dict[str, dict[str, float | None]]:
    return {
        name: {place: cell.value for place, cell in cells.items()}
        for name, cells in curve_cells(results, by)[1].items()
    }


def constant_values(results: list[dict[str, Any]], by: str) -> dict[str, float | None]:
    return {name: cell.value for name, cell in constant_cells(results, by).items()}


def test_sizes_are_in_order_of_parameters_or_of_width() -> None:
    assert curve_cells(RESULTS, "size")[0] == ["2/128", "12/128", "2/768"]
    assert values(RESULTS, "size") == {"pd": {"2/768": 71.0, "12/128": 60.0}, "pf": {"2/128": 50.0}}
    assert curve_cells([*RESULTS, result("pf", 4, 128, 0.5)], "width")[0] == ["2/128", "4/128", "12/128", "2/768"]


def test_runs_without_a_transfer_set_have_no_place_on_its_axis() -> None:
    assert curve_cells(RESULTS, "transfer_size")[0] == ["500", "1,700"]
    assert values(RESULTS, "transfer_size") == {"pd": {"500": 71.0, "1,700": 60.0}}
    assert sorted(curve_cells(RESULTS, "transfer")[0]) == ["books", "wiki"]
    with pytest.raises(UserError, match="no finished run"):
        curve_cells(RESULTS[3:], "transfer")
    with pytest.raises(UserError, match="Known: share, size"):
        curve_cells(RESULTS, "depth")


def test_a_row_without_a_place_is_a_level() -> None:
    """Well-read students, Figures 8 and 9: PF and basic training read no transfer set."""
    assert constant_values(RESULTS, "transfer") == {"pf": 50.0}
    assert constant_cells(RESULTS, "size") == {}
    other = [result("basic", 2, 128, 0.4, task="rte"), result("pf", 2, 128, 0.3, task="rte")]
    expected = {"pf on mnli": 50.0, "pf on rte": 30.0, "basic on rte": 40.0}
    assert constant_values([*RESULTS, *other], "transfer") == expected


def test_updates_of_all_stages_that_gave_the_weights() -> None:
    """A distillation of 400 updates, one of 300 that continues from it, and students without either."""
    further = CHAIN | {"further.optim.max_steps": 300, "further.model.source": "stage:distil"}
    by_epochs = {"distil.optim.epochs": 3, "distil.optim.max_steps": None, "distil.model.source": None}
    found = [
        result("minilmv2", 2, 128, 0.5, student=DISTILLED, settings=CHAIN),
        result("minilmv2", 2, 128, 0.6, student=DISTILLED | {"source": "stage:further"}, settings=further),
        result("basic", 2, 128, 0.4, settings={"optim.max_steps": 50}),
        result("pf", 2, 128, 0.3, student=DISTILLED, settings=by_epochs),
    ]
    assert curve_cells(found, "updates")[0] == ["400", "700"]
    assert values(found, "updates") == {"minilmv2": {"400": 50.0, "700": 60.0}}
    assert constant_values(found, "updates") == {"basic": 40.0, "pf": 30.0}


def test_places_may_be_put_in_order() -> None:
    assert curve_cells(RESULTS, "transfer", ["wiki"])[0] == ["wiki", "books"]
    assert curve_cells(RESULTS, "transfer", ["books"])[0] == ["books", "wiki"]
    with pytest.raises(UserError, match=r"--order=wikis: no finished run has this value"):
        curve_cells(RESULTS, "transfer", ["wikis"])


def test_rows_and_tasks_have_lines_of_their_own_and_a_grid_its_best() -> None:
    whole = [result("pd", layers, 128, 0.6, settings={"share": 1.0, "optim.lr": 1e-3}) for layers in (2, 4)]
    part = [result("pd", layers, 128, 0.4, settings={"share": 0.5, "optim.lr": 1e-3}) for layers in (2, 4)]
    grid = [result("pd", 2, 128, 0.7, settings={"share": 1.0, "optim.lr": 1e-4})]
    other = [result("pd", 2, 128, 0.9, task="rte", settings={"share": 1.0, "optim.lr": 1e-3})]
    runs = [*whole, *part, *grid]
    assert values(runs, "size") == {
        "pd, share 1": {"2/128": 70.0, "4/128": 60.0},
        "pd, share 0.5": {"2/128": 40.0, "4/128": 40.0},
    }
    assert [cell.kind for cell in curve_cells(runs, "size")[1]["pd, share 1"].values()] == ["best of grid", ""]
    assert values([*whole, *other], "size") == {
        "pd on mnli": {"2/128": 60.0, "4/128": 60.0},
        "pd on rte": {"2/128": 90.0},
    }


def test_a_run_of_two_folders_counts_once_and_what_goes_with_a_method_names_nothing() -> None:
    runs = [
        result(method, layers, 128, 0.6, key=f"{method} {layers}", student={**SIZE, "num_layers": layers, "init": init})
        for method, init in (("pd", "first of stage:pretrain"), ("kd", "first of None"))
        for layers in (2, 4)
    ]
    (_, found) = curve_cells([*runs, dict(runs[0])], "size")
    assert list(found) == ["pd", "kd"]
    assert {cell.kind for cells in found.values() for cell in cells.values()} == {""}


def test_the_command_draws_the_runs_of_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run_folder(tmp_path, "a", result=RESULTS[0], status=RESULTS[0])
    run_folder(tmp_path, "b", status=failed())
    run_subcommand("curves", [str(tmp_path), "--task", "mnli", "--out", str(tmp_path / "figure.png")])
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"--out=figure.txt: is not a picture format"):
        run_subcommand("curves", [str(tmp_path), "--out", str(tmp_path / "figure.txt")])
    with pytest.raises(UserError, match="--task=cola: no run has this value"):
        run_subcommand("curves", [str(tmp_path), "--task", "cola", "--out", str(tmp_path / "figure.png")])
