"""Which weights a schedule of layers moves, and which it leaves: internal representations, "How to distill"."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig
from distill_runner.models.features import EncoderShape, FeatureRequest
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.store import Store
from distill_runner.pipeline.targets import targets_spec
from distill_runner.training.data import predict

Compose = Callable[..., RunConfig]
INTERNAL = ("method=internal", "student.init.layers=group_top", "optim.epochs=3", "teacher.optim.epochs=1")


def moved(compose: Compose, *overrides: str) -> list[set[str]]:
    """For each epoch the parts of the student that differ from what they were before it."""
    run = compose(*INTERNAL, *overrides, "+stages.student.keep_checkpoints=true")
    pipeline, stage = Pipeline(Store(run.store.dir), run.runtime), resolve_stage(run.stages, "student", "fp32")
    pipeline.build(stage)
    kept: Path = pipeline.checkpoints(stage)
    before = {name: tensor.clone() for name, tensor in pipeline.untrained(stage).state_dict().items()}
    found = []
    for epoch in (1, 2, 3):
        after = load_file(kept / f"epoch-{epoch}" / "model.safetensors")
        found.append({part(name) for name in after if not torch.equal(after[name], before[name])})
        before = after
    return found


def part(name: str) -> str:
    """``embeddings``, ``layer.<n>`` counted from 0, ``pooler`` or ``classifier``."""
    if ".layer." in name:
        return "layer." + name.partition(".layer.")[2].partition(".")[0]
    return next(part for part in ("embeddings", "pooler", "classifier") if part in name)


HEAD = {"pooler", "classifier"}
EVERY = {"embeddings", "layer.0", "layer.1", *HEAD}


def test_pid_optimises_one_layer_at_a_time(compose: Compose) -> None:
    assert moved(compose, "schedule=pid", "++schedule.limits=1") == [{"layer.0"}, {"layer.1"}, HEAD]


@pytest.mark.parametrize(("at_end", "last"), [("head", HEAD), ("all", EVERY)])
def test_sid_moves_all_layers_up_to_the_current_one(compose: Compose, at_end: str, last: set[str]) -> None:
    """Whoever repeats Figure 4, "after the L6 point, only the classification layer is trained", would train all."""
    epochs = moved(compose, "schedule=sid", "++schedule.limits=1", f"++schedule.trains_at_end={at_end}")
    assert epochs == [{"embeddings", "layer.0"}, {"embeddings", "layer.0", "layer.1"}, last]


def test_the_end_is_the_head_alone_in_every_experiment_with_a_schedule(compose: Compose) -> None:
    """With a default of one row alone, the rows of Table 1 would differ in more than their names."""
    for name in ("3_3", "3_4", "3_4_together", "3_5", "3_6"):
        schedule = compose(f"experiment=internal/{name}").stages["student"].method.schedule
        assert schedule is not None, name
        assert schedule.trains_at_end == "head", name


def test_a_family_that_runs_padded_is_refused() -> None:
    shape = EncoderShape(2, 32, 4, 2, 100, "albert")
    with pytest.raises(UserError, match=r"schedule\.trains=all schedule\.trains_at_end=all"):
        shape.require(FeatureRequest(first_trained=1), "student")


def test_the_first_checkpoint_at_the_beginning_is_the_untrained_teacher(compose: Compose) -> None:
    """Pro-KD Eq. 2: what the student's first epochs follow is the teacher before its first epoch."""
    options = ("teacher.optim.epochs=2", "optim.epochs=1", "route.moment=beginning", "route.epochs=1", "route.warmup=0")
    run = compose("method=prokd", *options)
    pipeline, stage = Pipeline(Store(run.store.dir), run.runtime), resolve_stage(run.stages, "student", "fp32")
    phase, teacher = stage.source_stage, stage.first_teacher
    assert phase is not None
    assert teacher is not None
    assert phase.route == (0, 1)
    pipeline.build(stage)
    first = pipeline.store.find(targets_spec(phase, 0))
    assert first is not None
    expected = predict(pipeline.untrained(teacher), pipeline.inputs.split(phase, phase.train_split), pipeline.device)
    assert np.load(first / "logits.npy") == pytest.approx(expected, abs=1e-5)
