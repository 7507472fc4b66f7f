"""Pro-KD and its baselines: their losses by hand, the methods that they contain, and checkpoints that come and go."""

import json
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import Progress
from distill_runner.methods.config import TermConfig
from distill_runner.methods.outputs import Classes, Score
from distill_runner.methods.predictions import LogitMatching
from distill_runner.methods.schedules import EpochsPerStep
from distill_runner.models.features import EncoderShape, FeatureRequest, Features
from distill_runner.pipeline.build import teacher_targets, teacher_temperature
from distill_runner.pipeline.planning import plan
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.stages import Stage
from distill_runner.training.teachers import CheckpointTargets, TeacherTargets
from helpers import built_runs as built

Compose = Callable[..., RunConfig]
BATCH: Any = SimpleNamespace(example_weights=None, output_weights=None)  # of which no term of this file reads more


# Losses.


def progress(epoch: int, num_epochs: int = 8) -> Progress:
    return Progress(epoch=epoch, step=0, num_epochs=num_epochs, num_steps=num_epochs)


def matching(student: torch.Tensor, teacher: torch.Tensor, epoch: int, **arguments: Any) -> torch.Tensor:
    """The term's value in float64 with two epochs per temperature."""
    given: dict[str, Any] = {"tau_max": 4, "soften": "divide", "steps": {"epochs": 2}} | arguments
    term = TermConfig.parse({"term": "logit_matching", **given}).make()
    shape = EncoderShape(2, 32, 4, student.shape[1], 100, "bert")
    term.bind(shape, shape, Classes() if student.shape[1] > 1 else Score())
    term.double().begin_epoch(progress(epoch))
    return term(Features(student.double()), Features(teacher.double()), BATCH, progress(epoch))


STUDENT, TEACHER = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[8.0, -4.0], [4.0, 12.0]])


@pytest.mark.parametrize(
    ("epoch", "arguments", "expected"),
    [
        # T = 4: the teacher's logits become [2, -1] and [1, 3], every difference is 1.
        (0, {}, 2.0),
        (1, {}, 2.0),
        # T = 2: [4, -2] and [2, 6]: 9 + 4 and 4 + 16.
        (4, {}, 16.5),
        (4, {"over_classes": "mean"}, 8.25),
        # T = 1, also behind the last step: [8, -4] and [4, 12]: 49 + 16 and 16 + 100.
        (7, {}, 90.5),
        (8, {}, 90.5),
        # phi(4) = 1/4; phi(3) = 1/2; phi(1) = 1.
        (0, {"soften": "scale"}, 2.0),
        (2, {"soften": "scale"}, 16.5),
        (7, {"soften": "scale"}, 90.5),
        (0, {"soften": "none"}, 90.5),
        (3, {"steps": {"epochs": 2, "warmup": 2}}, 2.0),
        (0, {"tau_max": 1}, 90.5),
    ],
)
def test_logit_matching_by_hand(epoch: int, arguments: dict[str, Any], expected: float) -> None:
    assert float(matching(STUDENT, TEACHER, epoch, **arguments)) == pytest.approx(expected, rel=1e-12)


@given(tau_max=st.integers(1, 9), each=st.integers(1, 4), warmup=st.integers(0, 3))
def test_temperatures_fall_by_one_to_1(tau_max: int, each: int, warmup: int) -> None:
    term = LogitMatching(tau_max, "divide", EpochsPerStep(epochs=each, warmup=warmup))
    temperatures = [term.temperature(progress(epoch)) for epoch in range(tau_max * each + warmup)]
    assert temperatures == sorted(temperatures, reverse=True)
    assert set(temperatures) == set(range(1, tau_max + 1))
    assert temperatures.count(tau_max) == each + warmup


def test_a_temperature_below_the_number_of_checkpoints_stays_at_1() -> None:
    term = LogitMatching(2, "divide", EpochsPerStep(epochs=[1, 2, 1], warmup=0), num_checkpoints=3)
    assert [term.temperature(progress(epoch)) for epoch in range(4)] == [2, 1, 1, 1]


def test_the_gradient_is_the_students_alone() -> None:
    student = STUDENT.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda logits: matching(logits, TEACHER, 2), (student,))


@pytest.mark.parametrize("fewer", ["teacher.optim.epochs=3", "route.checkpoints=[1,3,5]"])
def test_temperatures_go_by_the_checkpoints_that_are_followed(compose: Compose, fewer: str) -> None:
    """Of whatever recipe: seven are followed in that of BERT-small."""
    phase1 = compose("experiment=pro_kd/bert_small", "task=rte", "method=prokd", fewer, tiny=False).stages["phase1"]
    (term,) = phase1.method.make().named_terms().values()
    assert isinstance(term, LogitMatching)
    assert phase1.optim.epochs == 4
    assert [term.temperature(progress(epoch, 4)) for epoch in range(4)] == [3, 3, 2, 1]
    assert "num_checkpoints" not in phase1.method.spec(Classes())["logits"]


def test_temperatures_that_would_not_fall_to_1_are_refused() -> None:
    LogitMatching(3, "divide", EpochsPerStep(epochs=1), num_checkpoints=3)
    with pytest.raises(UserError, match=r"^loss\.tau_max=4: .* the 3 checkpoints") as raised:
        LogitMatching(4, "divide", EpochsPerStep(epochs=1), num_checkpoints=3)
    assert "loss.tau_max=3" in raised.value.remedy


# Following.


def test_a_checkpoint_is_opened_when_its_turn_comes_and_the_one_before_let_go() -> None:
    events: list[str] = []

    class Targets(TeacherTargets):
        def __init__(self, number: int) -> None:
            self.number = number
            torch.rand(3)  # as building a model does
            events.append(f"open {number}")

        def prepare(self, batch: Batch, progress: Progress | None, needs: FeatureRequest | None) -> Features:
            return Features(torch.tensor(float(self.number)))

        def __del__(self) -> None:
            events.append(f"close {self.number}")

    def followed(epoch: int) -> float:
        logits = follow(BATCH, progress(epoch), FeatureRequest(logits=True)).logits_OC
        return float(logits)

    follow = CheckpointTargets((3, 3, 1, 2), Targets)
    before = torch.get_rng_state()
    assert [followed(epoch) for epoch in (0, 0, 1, 2, 3)] == [3, 3, 3, 1, 2]
    assert events == ["open 3", "close 3", "open 1", "close 1", "open 2"]
    assert torch.equal(torch.get_rng_state(), before)
    # A training that is taken up in its third epoch.
    follow = CheckpointTargets((3, 3, 1, 2), Targets)
    assert [followed(epoch) for epoch in (2, 3)] == [1, 2]


# Runs.


class Run(built.Run):
    """A run of a phase I and its teacher's checkpoints."""

    @property
    def teacher(self) -> Stage:
        found = self.stage.first_teacher
        assert found is not None
        return found

    @property
    def phase1(self) -> Stage:
        assert self.stage.source_stage is not None
        return self.stage.source_stage

    def checkpoints(self) -> Path:
        return self.store.path(self.teacher.checkpoints_spec)

    def forget(self, *kinds: str) -> None:
        for kind in kinds:
            shutil.rmtree(self.store.folder / kind)


PROKD = ("method=prokd", "teacher.optim.epochs=3", "optim.epochs=1", "student.num_layers=1")


@pytest.fixture(scope="module")
def prokd(compose: Compose) -> Run:
    run = Run(compose(*PROKD))
    run.build()
    return run


@pytest.fixture
def used(compose: Compose, prokd: Run, tmp_path: Path) -> Run:
    """The same run on a copy of the store that it has filled, hard links kept."""
    store = shutil.copytree(prokd.store.folder, tmp_path / "store")
    return Run(compose(*PROKD, f"store.dir={store}"))


def test_phases_and_their_epochs(prokd: Run) -> None:
    assert prokd.trained == ["teacher", "phase1", "student"]
    assert prokd.phase1.route == (1, 1, 2, 3)
    assert prokd.phase1.config.optim.epochs == 4
    assert prokd.stage.route is None
    assert prokd.stage.teacher is None
    assert (prokd.stage.shape.num_layers, prokd.phase1.shape.num_layers) == (1, 1)
    assert prokd.stage.spec["model"]["head"] == "keep"


def test_phase_two_of_prokd_starts_from_the_end_of_phase_one(compose: Compose) -> None:
    """Figure 1: "we start training of the student from T = tau_max and go to T = 1. Phase II: ...". From the best one,
    whoever trains few epochs would start at T = 3, and the later checkpoints would have no effect. Annealing-KD's code
    takes the best one."""
    for method, select in (("prokd", "last"), ("annealing", "best")):
        assert Run(compose(f"method={method}")).phase1.config.select == select


def test_the_best_epoch_is_stored_once(prokd: Run) -> None:
    kept = prokd.checkpoints()
    assert {folder.name for folder in kept.glob("epoch-*")} == {"epoch-1", "epoch-2", "epoch-3"}
    teacher = prokd.store.path(prokd.teacher.spec)
    best = json.loads((teacher / "metrics.json").read_text())["best"]
    places = [
        folder / "model.safetensors" for folder in (kept / f"epoch-{best}", kept / "stage/model", teacher / "model")
    ]
    assert len({place.stat().st_ino for place in places}) == 1
    weights = {(kept / f"epoch-{epoch}" / "model.safetensors").read_bytes() for epoch in (1, 2, 3)}
    assert len(weights) == 3
    assert not list(kept.rglob("checkpoint.pt"))


def test_cached_and_live_checkpoints_give_the_same_student(compose: Compose, prokd: Run) -> None:
    live = Run(compose(*PROKD, "runtime.targets=live"))
    assert live.build() == prokd.build()
    assert not (live.store.folder / "targets").exists()
    assert len(list((prokd.store.folder / "targets").glob("*/logits.npy"))) == 3


def test_the_plan_names_checkpoints_and_their_targets(compose: Compose, prokd: Run, used: Run) -> None:
    fresh = Run(compose(*PROKD))
    lines = plan(fresh.stage, fresh.store)
    assert [line.name for line in lines] == ["teacher", "checkpoints", *["targets"] * 3, "phase1", "student"]
    assert not any(line.hit for line in lines)
    assert "logits of teacher after its epoch 2" in lines[3].summary
    shutil.rmtree(used.store.path(used.stage.spec))
    shutil.rmtree(used.store.path(used.phase1.spec))
    used.forget("targets")
    lines = plan(used.stage, used.store)
    assert (lines[1].name, lines[1].hit, lines[1].summary) == ("checkpoints", True, "of teacher")
    used.forget("checkpoints")
    lines = plan(used.stage, used.store)
    assert [(line.name, line.hit) for line in lines[:2]] == [("teacher", True), ("checkpoints", False)]
    assert "trains the teacher again" in lines[1].summary


def test_checkpoints_may_be_deleted(prokd: Run, used: Run) -> None:
    used.forget("checkpoints")
    assert used.build() == prokd.build()
    assert used.trained == []
    # Their targets are enough to train the student again,
    used.forget("stage/" + used.stage.key, "stage/" + used.phase1.key)
    assert used.build() == prokd.build()
    assert used.trained == ["phase1", "student"]
    # and without those the teacher is trained again, to the same end.
    used.forget("targets", "stage/" + used.stage.key, "stage/" + used.phase1.key)
    assert used.build() == prokd.build()
    assert used.trained == ["phase1", "student", "teacher", "phase1", "student"]
    for epoch in (1, 2, 3):
        files = [run.checkpoints() / f"epoch-{epoch}" / "model.safetensors" for run in (prokd, used)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_run_that_follows_nothing_keeps_no_checkpoints_unless_told(compose: Compose) -> None:
    vanilla = ("method=vanilla", "student.num_layers=1", "optim.epochs=1")
    plain = Run(compose(*vanilla))
    weights = plain.build()
    assert not (plain.store.folder / "checkpoints").exists()
    told = Run(compose(*vanilla, "stages.teacher.keep_checkpoints=true"))
    assert told.stage.key == plain.stage.key
    assert told.build() == weights
    assert told.trained == ["teacher", "student"]
    assert {folder.name for folder in told.checkpoints().glob("*/")} == {
        *("epoch-1", "epoch-2", "predictions-of-epoch-1", "predictions-of-epoch-2", "stage")
    }


@pytest.mark.parametrize(
    ("stage", "step"),
    [
        pytest.param("teacher", 3, marks=pytest.mark.slow),
        ("phase1", 6),
        pytest.param("student", 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_in_any_phase_goes_on_to_the_same_end(compose: Compose, prokd: Run, stage: str, step: int) -> None:
    run = Run(compose(*PROKD, "runtime.log_every=1"))

    def interrupting(name: str) -> Callable[[Mapping[str, Any], int, float], None]:
        now = name == stage
        return lambda values, done, epoch: signal.raise_signal(signal.SIGINT) if now and done == step else None

    run.pipeline.log_of = interrupting
    with pytest.raises(KeyboardInterrupt):
        run.build()
    run.pipeline.log_of = run.report
    assert run.build() == prokd.build()
    assert run.trained[0] == stage


# Compositions.


def test_an_intermediate_loss_while_checkpoints_are_followed(compose: Compose) -> None:
    """ALP-KD's term in Pro-KD's phase I reads the layers of each checkpoint."""
    run, points = Run(compose("experiment=pro_kd/with_alp", "optim.epochs=1", "runtime.log_every=1")), []

    def report(name: str) -> Callable[[Mapping[str, Any], int, float], None]:
        return lambda values, step, epoch: points.append((name, values))

    run.pipeline.log_of = report
    weights = run.build()
    losses = [values for name, values in points if name == "phase1" and "loss" in values]
    terms = {"loss/logits", "loss/intermediate", "intermediate/alpha_entropy_1"}
    assert all(terms <= values.keys() for values in losses)
    assert [values["logits/temperature"] for values in losses] == [2.0] * 8 + [1.0] * 4
    caches = {frozenset(file.stem for file in folder.glob("*.npy")) for folder in run.store.folder.glob("targets/*/")}
    assert caches == {frozenset({"logits", "cls"})}
    without = Run(compose("experiment=pro_kd/with_alp", "optim.epochs=1", "loss.lambda=0.0"))
    assert without.stage.key == Run(compose("method=prokd", "optim.epochs=1")).stage.key
    assert without.build() != weights


# Identities.

SMALL = ("student.num_layers=1", "optim.epochs=2", "+stages.teacher.select=last")


def test_rco_with_one_anchor_is_vanilla(compose: Compose) -> None:
    vanilla = Run(compose("method=vanilla", *SMALL))
    weights = vanilla.build()
    last, first = (
        Run(compose("method=rco", *SMALL, f"route.checkpoints=[{epoch}]", f"store.dir={vanilla.store.folder}"))
        for epoch in (2, 1)
    )
    assert last.build() == weights
    assert first.build() != weights


def test_prokd_with_one_temperature_is_logit_matching_then_the_labels(compose: Compose) -> None:
    """Also with the whole teacher instead of its only checkpoint, by the other factor, or by none."""
    epochs = ("teacher.optim.epochs=1", "loss.tau_max=1", "optim.epochs=1")
    one = (*epochs, "student.num_layers=1", "student.phase1.select=last")
    runs = [Run(compose(*one, *other)) for other in (["method=prokd"], ["method=annealing"])]
    runs.append(Run(compose(*one, "method=annealing", "loss.soften=none")))
    assert [run.phase1.route for run in runs] == [(1, 1), None, None]
    assert runs[0].build() == runs[1].build() == runs[2].build()
    assert len({run.phase1.key for run in runs}) == 3


def test_a_temperature_that_does_not_reach_1_is_told(compose: Compose, caplog: pytest.LogCaptureFixture) -> None:
    for epochs, told in ((4, False), (3, True)):  # 3, 3, 2, 1
        caplog.clear()
        run = compose("method=annealing", "loss.tau_max=3", f"stages.phase1.optim.epochs={epochs}")
        resolve_stage(run.stages, "phase1", "fp32")
        assert ("T falls from loss.tau_max=3 to 2 in 3 epochs" in caplog.text) == told


def test_each_checkpoint_is_calibrated_by_its_own_predictions(compose: Compose) -> None:
    """The last one is the teacher's result if the last epoch is, and earlier ones have other temperatures."""
    run = Run(compose("method=rco", *SMALL, "teacher.optim.epochs=2", "teacher.optim.lr=1e-3"))
    stage, builder = run.stage, run.pipeline
    first, second, result = (teacher_temperature(stage, builder, checkpoint) for checkpoint in (1, 2, None))
    assert first != second == result

    calibrated = replace(stage, config=stage.config.model_copy(update={"calibrate_teacher": True}))
    batch = builder.inputs.data(stage).batch(np.arange(4), 0)
    for epoch, temperature in enumerate((first, second)):
        plain, scaled = (
            teacher_targets(one, builder)(batch, progress(epoch, 2), one.teacher_needs).logits_OC
            for one in (stage, calibrated)
        )
        torch.testing.assert_close(scaled * temperature, plain)
