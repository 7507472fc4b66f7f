"""Sweepers that optimize a number: the result of a point as a number, and Optuna's trials."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from distill_runner.common.errors import TrainingError
from distill_runner.compose.command_line import hydra_arguments
from distill_runner.sweeping.isolation import PointResult
from helpers.command import distill_run


def test_a_finished_point_is_the_score_that_a_grid_would_choose_by() -> None:
    assert float(PointResult(status="done", score=0.5)) == 0.5
    assert float(PointResult(status="done", score=0.5, selection={"on": "held_out", "score": 0.25})) == 0.25


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"status": "failed", "error": "UserError: x"}, "this point is failed: UserError: x"),
        ({"status": "paused", "score": 0.5}, "this point is paused: it has no score"),
        ({"status": "planned"}, "this point is planned: it has no score"),
    ],
)
def test_another_point_is_no_number(result: Mapping[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=f"^{message}$"):
        float(PointResult(result))


def test_values_are_axes_only_for_the_grid() -> None:
    """Optuna would list each value that is set as a parameter of the study."""
    assert "optim.lr=choice(0.1)" in hydra_arguments(["-m", "optim.lr=0.1"])
    assert "optim.lr=0.1" in hydra_arguments(["-m", "hydra/sweeper=optuna", "optim.lr=0.1"])


@pytest.mark.slow
def test_optuna_reports_its_best_trial(tmp_path: Path, tiny_task_folder: Path, tiny_bert_folder: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="Hydra's plugin, which needs Optuna 2")
    inputs = ("task=custom", f"task.dataset={tiny_task_folder}", "task.columns=sentence1,sentence2", "method=rkd")
    models = ("teacher=base", f"teacher.source={tiny_bert_folder}", "teacher.name=tiny", "student.num_layers=2")
    short = ("task.max_length=48", "optim.epochs=1", "teacher.optim.epochs=1", "runtime.device=cpu")
    study = ("-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.sampler.seed=1")
    ended = distill_run(
        tmp_path, *inputs, *models, *short, *study, "loss.eta=choice(0.2,0.8,1.5)", "hydra/sweeper/sampler=random"
    )
    results = [json.loads(file.read_text()) for file in (tmp_path / "outputs" / "runs").glob("*/result.json")]
    assert ended.code == 0, ended.err
    best = re.search(r"Best value: ([\d.]+)", ended.out + ended.err)
    assert best
    assert float(best[1]) == max(result["score"] for result in results)


def test_points_that_fail_end_a_sweep_of_hydra_s_own_sweeper_with_1(tmp_path: Path) -> None:
    """A job of a queue went on as if there were students."""
    own = ("-m", "hydra/sweeper=basic", "experiment=demo", "method=rkd", "seed=1,2")
    assert distill_run(tmp_path, *own, "student.num_layers=99", "runtime.device=cpu").code == 1
