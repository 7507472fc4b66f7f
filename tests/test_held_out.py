"""Selection on held-out training examples: stratified, seeded, never trained on; validation is looked at once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.splits import HeldOutSplit, held_out_examples
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.store import Store
from distill_runner.training.data import TaskData, predict

Compose = Callable[..., RunConfig]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.floats(0.01, 0.9))
def test_each_class_gives_its_share(classes: list[int], share: float) -> None:
    labels = np.array(classes)
    rows = held_out_examples(labels, share)
    assert (np.diff(rows) > 0).all()
    for one in np.unique(labels):
        size = int((labels == one).sum())
        if size > 1:
            assert (labels[rows] == one).sum() == min(max(1, round(share * size)), size - 1)


def test_a_class_of_one_example_is_trained_on() -> None:
    assert 4 not in held_out_examples(np.array([0, 0, 1, 1, 2]), 0.5)
    assert len(held_out_examples(np.array([0, 0, 1, 1, 2]), 0.5)) == 2
    assert len(held_out_examples(np.arange(4), 0.5)) == 2, "if all classes are so small, they are one"
    assert len(held_out_examples(np.array([0.5, 0.1, 0.7]), 0.1)) == 1


def test_scores_give_as_many_of_each_range() -> None:
    scores = np.random.default_rng(1).uniform(0, 5, 1000).astype(np.float32)
    rows = held_out_examples(scores, 0.1)
    order = np.argsort(scores, kind="stable")
    place = np.empty(1000, dtype=int)
    place[order] = np.arange(1000)
    assert np.bincount(place[rows] // 100).tolist() == [10] * 10


def built(run: RunConfig) -> tuple[Pipeline, Any, Path]:
    pipeline, stage = Pipeline(Store(run.store.dir), run.runtime), resolve_stage(run.stages, "student", "fp32")
    return pipeline, stage, pipeline.build(stage)


def test_what_is_held_out_is_not_trained_on(compose: Compose) -> None:
    run = compose("method=nkd", "select_on=held_out", "task.hold_out=0.25", "stages.student.share=0.5")
    pipeline, stage = Pipeline(Store(run.store.dir), run.runtime), resolve_stage(run.stages, "student", "fp32")
    data = pipeline.inputs.data(stage)
    assert isinstance(data, TaskData)
    assert isinstance(data.selection, HeldOutSplit)
    assert not set(data.indices) & set(data.selection.numbers)
    size = len(data.train)
    assert len(data.selection) == pytest.approx(0.25 * size, abs=1)
    assert len(data) == pytest.approx(0.5 * 0.75 * size, abs=1)
    batch = data.selection.batch(np.arange(5))
    whole = data.train.batch(data.selection.numbers[:5])
    assert sorted(batch.index.tolist()) == [0, 1, 2, 3, 4]
    assert batch.gold.tolist() == whole.gold.tolist()


def test_validation_is_looked_at_once(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()

    def watched(model: Any, split: Any, device: Any, *group: Any) -> Any:
        seen.append(len(split))
        return predict(model, split, device, *group)

    monkeypatch.setattr("distill_runner.training.data.predict", watched)
    pipeline, stage, folder = built(compose("method=nkd", "select_on=held_out", "optim.epochs=3"))
    data = pipeline.inputs.data(stage)
    assert isinstance(data, TaskData)
    assert data.selection is not None
    assert seen == [len(data.selection)] * 3 + [len(data.validation["validation"])]

    measured = json.loads((folder / "metrics.json").read_text())
    names = list(measured["metrics"])
    assert names[0] == "accuracy"
    assert "held_out/accuracy" in names
    held = [epoch["held_out/accuracy"] for epoch in measured["epochs"]]
    assert not any("accuracy" in epoch for epoch in measured["epochs"])
    assert measured["best"] == held.index(max(held)) + 1
    outputs = np.load(folder / "predictions-validation.npy")
    labels = np.asarray(data.validation["validation"].labels)
    assert measured["metrics"]["accuracy"] == pytest.approx((outputs.argmax(1) == labels).mean())


def test_a_split_named_validation_selects_itself_wherever_it_stands(compose: Compose) -> None:
    task = compose("method=nkd").stages["student"].task
    assert task is not None
    parts = {"first": "validation[:5]", "validation": "validation[5:]"}
    spec = {on: task.model_copy(update={"validation": parts, "select_on": on}).spec() for on in parts}
    assert spec["first"]["scored_on"] == ["first"]
    assert spec["validation"] == spec["first"] | {"scored_on": ["validation"]}


def test_the_teacher_holds_out_the_same(compose: Compose) -> None:
    run = compose("method=rkd", "select_on=held_out")
    pipeline, stage = Pipeline(Store(run.store.dir), run.runtime), resolve_stage(run.stages, "student", "fp32")
    student, teacher = (pipeline.inputs.data(each) for each in (stage, stage.teacher) if each)
    assert isinstance(student, TaskData)
    assert isinstance(teacher, TaskData)
    assert student.selection is not None
    assert teacher.selection is not None
    assert student.selection.numbers.tolist() == teacher.selection.numbers.tolist()
