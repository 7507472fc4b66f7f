"""Agreement with the teacher, scores by epoch and attention maps: by hand, and from a run's folder."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distill_runner.analysis.comparisons import agreement, agreement_table, disputed
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
    assert counts == [2, 1, 1, 1]
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


@pytest.mark.slow
def test_a_run_is_analyzed(
    compose: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from distill_runner.running import run_stage

    options = ["method=internal", "schedule=pid", f"store.dir={tmp_path}/store", "optim.epochs=3"]
    run = compose(*options)
    settings = json.loads(run.model_dump_json()) | {"method": {"name": run.method}}
    run_stage(run, tmp_path / "run", settings)
    capsys.readouterr()
    run_subcommand("analyze", ["agreement", str(tmp_path / "run")])
    row = capsys.readouterr().out.splitlines()[-1]
    assert sum([int(cell) for cell in row.split("|")[2:-1]]) == 40
    run_subcommand("analyze", ["samples", str(tmp_path / "run"), "--samples", "2"])
    said, *table = capsys.readouterr().out.splitlines()
    assert said.endswith("examples of validation that the teacher gets right, a student wrong")
    assert len(table) == 2 + int(said.split()[0])
    for what in ("history", "attention"):
        run_subcommand("analyze", [what, str(tmp_path / "run"), "--out", str(tmp_path / f"{what}.png")])
        assert (tmp_path / f"{what}.png").stat().st_size > 10_000
    with pytest.raises(UserError, match="--head=4: there are"):
        run_subcommand("analyze", ["attention", str(tmp_path / "run"), "--head", "4"])
