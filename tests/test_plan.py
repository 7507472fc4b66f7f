"""``plan=true``: from where the seconds and bytes of a plan come."""

from pathlib import Path

import numpy as np
import pytest
import torch

from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.stages import METRICS_FILE, Stage
from distill_runner.pipeline.status import write_json
from distill_runner.pipeline.store import Store
from distill_runner.sweeping import plan
from helpers.small_runs import Compose


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Stage]:
    """The stages that are measured; the multiplications of a token take a second in all."""
    stages: list[Stage] = []

    def measure(_self: object, stage: Stage) -> float:
        stages.append(stage)
        return 1 / stage.shape.num_products

    monkeypatch.setattr(plan.Estimator, "_measure", measure)
    return stages


def estimator(run: RunConfig) -> plan.Estimator:
    return plan.Estimator(Pipeline(Store(run.store.dir), run.runtime))


def student(run: RunConfig) -> Stage:
    return resolve_stage(run.stages, "student", "fp32")


def test_all_costs_follow_from_one_measurement(compose: Compose, tmp_path: Path, measured: list[Stage]) -> None:
    """Updates take a second a token of the student, teachers and evaluations a third of their multiplications."""
    run = compose("method=vanilla", "student.num_layers=2", f"store.dir={tmp_path}")
    stage, costs = student(run), estimator(run)
    assert stage.teacher is not None
    data = costs.pipeline.inputs.data(stage)
    length, twice = float(data.lengths.mean()), stage.teacher.shape.num_layers / stage.shape.num_layers
    updates = stage.config.optim.num_steps(len(data))
    own = length * (updates * stage.config.optim.batch_size + 2 * sum(map(len, data.evaluated)) / 3)
    outputs = length * len(data) * twice / 3
    first, second = costs.cost(stage), costs.cost(student(compose("method=vanilla", "student.num_layers=2", "seed=9")))
    assert first.seconds == pytest.approx(plan.START_SECONDS + own + outputs)
    assert second.seconds == pytest.approx(plan.START_SECONDS + own), "the cached outputs are shared"
    assert first.bytes - second.bytes == len(data) * 2 * 4
    live = estimator(compose("method=vanilla", "student.num_layers=2", "runtime.targets=live")).cost(stage).seconds
    assert live == pytest.approx(
        plan.START_SECONDS + own + length * updates * stage.config.optim.batch_size * twice / 3
    )
    assert len(measured) == 2


def test_a_teacher_that_is_known_by_its_predictions_counts_as_zeros(compose: Compose) -> None:
    data = estimator(compose("method=nkd")).pipeline.inputs.data(student(compose("method=nkd")))
    assert torch.equal(plan._ZeroLogits(3)(data.batch(np.arange(2), 0)).logits_OC, torch.zeros(2, 3))


def test_checkpoints_that_a_student_follows_are_counted(
    compose: Compose, tmp_path: Path, measured: list[Stage]
) -> None:
    run = compose("method=rco", f"store.dir={tmp_path}")
    stage, plain = student(run), student(compose("method=vanilla", f"store.dir={tmp_path}"))
    assert stage.teacher is not None
    assert plain.teacher is not None
    assert estimator(run).cost(stage.teacher).bytes == 2 * estimator(run).cost(plain.teacher).bytes
    assert estimator(run).cost(stage).bytes > estimator(run).cost(plain).bytes


def test_runs_in_the_store_tell_the_time_of_others_like_them(
    compose: Compose, tmp_path: Path, measured: list[Stage]
) -> None:
    run = compose("method=nkd", "optim.lr=1e-4", f"store.dir={tmp_path}")
    for seed, seconds, processes in ((1, 10.0, 1), (2, 20.0, 1), (3, 900.0, 2)):
        stage = student(compose("method=nkd", "optim.lr=1e-4", f"seed={seed}"))
        metrics = {"wall_seconds": seconds, "conditions": {"num_processes": processes}}
        Store(tmp_path).get(stage.spec, lambda folder: write_json(folder / METRICS_FILE, metrics))  # noqa: B023
    found = estimator(run)
    assert found.cost(student(compose("method=nkd", "optim.lr=3e-4", "seed=7"))).seconds == 15 + plan.START_SECONDS
    assert measured == []
    assert found.cost(student(compose("method=nkd", "optim.epochs=7"))).seconds != 15 + plan.START_SECONDS
    assert len(measured) == 1


@pytest.mark.parametrize("overrides", [("method=alp",), ("method=internal", "schedule=pid")])
def test_a_few_updates_are_measured(
    overrides: tuple[str, ...], compose: Compose, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = compose(*overrides, f"store.dir={tmp_path}")
    with caplog.at_level("INFO", "distill_runner.methods.schedules"):
        assert 0 < estimator(run)._measure(student(run)) < 1e-3
    assert "finished after" not in caplog.text, "all layers are measured at once"
