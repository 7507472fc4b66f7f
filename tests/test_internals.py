"""Agreement with the teacher, scores by epoch and attention maps: by hand, and from a run's folder."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from distill_runner.analysis.comparisons import (
    ScoreHistory,
    agreement,
    agreement_table,
    disputed,
    divergence,
    draw_attention,
    draw_histories,
    samples_table,
)
from distill_runner.analysis.finished_run import FinishedRun
from distill_runner.commands import analyze
from distill_runner.commands.parser import run_subcommand
from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig
from distill_runner.tasks.classification import ClassificationTask
from distill_runner.tasks.task import ExamplePredictions

TASK = ClassificationTask(
    name="t", version=1, dataset="d", columns=["text"], label="label", labels=["no", "yes"], metrics=["accuracy"],
    max_length=8, epochs=1, train="train", validation={"validation": "validation"}
)  # fmt: skip


def example_predictions(probabilities: Any, labels: Any) -> ExamplePredictions:
    split: Any = SimpleNamespace(labels=np.asarray(labels))
    return TASK.example_predictions(np.log(np.asarray(probabilities)), split)


def test_agreement_by_hand() -> None:
    labels = np.array([0, 0, 1, 1, 1])
    counts = agreement(np.array([0, 0, 1, 0, 0]) == labels, np.array([0, 1, 1, 1, 0]) == labels)
    assert counts == {
        "teacher_right_student_right": 2,
        "teacher_right_student_wrong": 1,
        "teacher_wrong_student_right": 1,
        "teacher_wrong_student_wrong": 1,
    }
    header, _, row = agreement_table({"internal": counts}).splitlines()
    assert "teacher right (3)" in header
    assert "teacher wrong (2)" in header
    assert row == "| internal | 2 | 1 | 1 | 1 |"


def test_disputed_examples_by_hand() -> None:
    labels = np.array([0, 1, 1, 0, 1])
    teacher = example_predictions([[0.9, 0.1], [0.1, 0.9], [0.2, 0.8], [0.1, 0.9], [0.4, 0.6]], labels)
    one = example_predictions([[0.4, 0.6], [0.9, 0.1], [0.3, 0.7], [0.9, 0.1], [0.7, 0.3]], labels)
    two = example_predictions([[0.8, 0.2], [0.3, 0.7], [0.1, 0.9], [0.2, 0.8], [0.9, 0.1]], labels)
    # 2: both are right; 3: the teacher is wrong; 4: both are wrong. The gap is 0.8 in example 1 and 0.5 in example 0.
    assert disputed(teacher, [one, two]).tolist() == [1, 0, 4]
    assert disputed(teacher, [two, two]).tolist() == [4], "students that are wrong on the same examples"
    assert disputed(teacher, [two]).tolist() == [4]
    assert (one.prediction_text(1), one.label_text(1)) == ("no (0.9000)", "yes")
    np.testing.assert_allclose(one.label_probability, [0.4, 0.1, 0.7, 0.9, 0.3])


def test_a_table_of_samples_keeps_its_columns() -> None:
    table = samples_table(["a | b\nc"], ["yes"], {"teacher": ["yes (0.9000)"], "soft": ["no (0.8000)"]}, [7])
    header, _, row = table.splitlines()
    assert header == "| no. | example | label | teacher | soft |"
    assert row == r"| 7 | a \| b c | yes | yes (0.9000) | no (0.8000) |"


def test_history_by_hand(tmp_path: Path) -> None:
    points = [
        {"schedule/layer": 1, "loss": 2.0},
        {"teacher/validation/accuracy": 0.9},
        {"validation/accuracy": 0.5, "validation/f1": 0.1},
        {"schedule/layer": 1},
        {"validation/accuracy": 0.6, "validation/f1": 0.1},
        {"schedule/layer": 3},
        {"validation/accuracy": 0.7, "validation/f1": 0.1},
        {"schedule/layer": 0},
        {"validation/accuracy": 0.8, "validation/f1": 0.1},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(point) + "\n" for point in points))
    read = ScoreHistory.read(tmp_path)
    assert read == ScoreHistory("accuracy", [0.5, 0.6, 0.7, 0.8], [(1, 2), (3, 3)])
    soft = ScoreHistory("accuracy", [0.5, 0.5], [])
    (axes,) = draw_histories({"sid": [read], "soft": [soft], "again": [read]}).axes
    assert axes.get_ylabel() == "accuracy x 100"
    marks: Any = axes.texts
    assert [mark.get_text() for mark in marks] == ["L1", "L3"] * 2
    assert [mark.xy for mark in marks] == [(2, 60.0), (3, 70.0)] * 2
    assert marks[2].xyann[1] > marks[0].xyann[1]  # where lines meet, one above the other


def test_a_student_that_another_run_trained_has_its_scores_in_the_result(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    epochs = [{"held_out/accuracy": 0.5, "f1": 0.1}, {"held_out/accuracy": 0.6, "f1": 0.1}]
    (tmp_path / "result.json").write_text(json.dumps({"history": epochs}))
    assert ScoreHistory.read(tmp_path) == ScoreHistory("accuracy", [0.5, 0.6], [])


def test_seeds_are_one_line_with_a_band() -> None:
    seeds = [ScoreHistory("accuracy", scores, [(1, 1)]) for scores in ([0.5, 0.6, 0.9], [0.7, 0.6])]
    (axes,) = draw_histories({"sid, 2 seeds": seeds}).axes
    (line,), (band,) = axes.lines, axes.collections
    np.testing.assert_allclose(np.asarray(line.get_xydata()), [[1, 60], [2, 60]])
    (area,) = band.get_paths()
    edges = np.asarray(area.vertices)[:, 1]
    # t(0.975, 1) = 12.706 times the standard error, which is half the distance of two values
    assert [edges.min(), edges.max()] == pytest.approx([60 - 127.06, 60 + 127.06], abs=0.01)
    assert not axes.texts


def test_seeds_are_one_entry_and_a_student_that_two_folders_hold_counts_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds, pipeline = {"run0": 1, "run1": 2, "run2": 1}, cast(Any, None)

    def read(folder: Path, *_: Any) -> FinishedRun:
        student: Any = SimpleNamespace(spec={"lr": 1e-4, "seed": seeds[folder.name]}, key=f"{seeds[folder.name]}")
        return FinishedRun(folder, "nkd", student, pipeline)

    monkeypatch.setattr(FinishedRun, "read", read)
    with ExitStack() as stack:
        runs = analyze._read_runs([*map(Path, seeds)], stack)
    assert [run.folder.name for run in runs] == ["run0", "run1"]
    assert "run2: holds the same student as run0" in capsys.readouterr().err
    assert analyze._seeds_by_name(analyze._with_unique_names(runs)) == {"nkd, 2 seeds": runs}


def test_attention_maps_stand_side_by_side() -> None:
    uniform, sharp = np.full((2, 2, 2), 0.5), np.array([[[0.75, 0.25], [0.5, 0.5]]] * 2)
    expected = (0.75 * np.log(1.5) + 0.25 * np.log(0.5)) / 2
    np.testing.assert_allclose(divergence(sharp, uniform), [expected] * 2)
    assert divergence(sharp, sharp).tolist() == [0, 0]
    students = {"soft": {1: uniform, 2: uniform}, "internal": {1: sharp, 2: sharp}}
    figure = draw_attention(["[CLS]", "[SEP]"], {2: sharp, 4: sharp}, students, {1: 2, 2: 4}, head=1)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:3] == ["teacher\nlayer 2", f"soft\nlayer 1, KL {expected:.3f}", "internal\nlayer 1, KL 0.000"]
    assert len(titles) == 6


@pytest.mark.slow
def test_a_run_is_analyzed(
    compose: Callable[..., RunConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from distill_runner.running import run_stage

    options = ["method=internal", "schedule=pid", f"store.dir={tmp_path}/store", "optim.epochs=3"]
    run = compose(*options)
    settings = json.loads(run.model_dump_json()) | {"method": {"name": run.method}}
    run_stage(run, tmp_path / "run", settings)
    capsys.readouterr()
    run_subcommand("analyze", ["agreement", str(tmp_path / "run")])
    row = capsys.readouterr().out.splitlines()[-1]
    cells = [int(cell) for cell in row.split("|")[2:-1]]
    assert sum(cells) == 40
    run_subcommand("analyze", ["samples", str(tmp_path / "run"), "--samples", "2"])
    said, *table = capsys.readouterr().out.splitlines()
    assert said.endswith("examples of validation that the teacher gets right, a student wrong")
    assert len(table) == 2 + int(said.split()[0])
    for what in ("history", "attention"):
        run_subcommand("analyze", [what, str(tmp_path / "run"), "--out", str(tmp_path / f"{what}.png")])
        assert (tmp_path / f"{what}.png").stat().st_size > 10_000
    with pytest.raises(UserError, match="--head=4: there are"):
        run_subcommand("analyze", ["attention", str(tmp_path / "run"), "--head", "4"])


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the folder of a run"):
        run_subcommand("analyze", ["agreement", str(tmp_path)])
