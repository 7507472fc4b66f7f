"""Predictions from elsewhere: columns of the data, several teachers, teachers that read other tokens."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.pretraining import train_wordpiece
from distill_runner.datasets.tokenization import Examples
from distill_runner.methods.outputs import Classes, Score
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store
from distill_runner.pipeline.targets import targets_spec, with_teacher_tokenizer
from distill_runner.report.result import scores_by_class

Compose = Callable[..., RunConfig]
SHORT = ["method=rkd", "teacher.optim.epochs=1", "optim.epochs=1"]


def student(run: RunConfig) -> tuple[Stage, Pipeline]:
    return resolve_stage(run.stages, "student", "fp32"), Pipeline(Store(run.store.dir), run.runtime)


def with_columns(folder: Path, examples: dict[str, Examples], columns: dict[str, list[str]]) -> Path:
    """The tiny task as CSV files, with further columns in its training split."""
    folder.mkdir()
    for split, read in examples.items():
        assert read.labels is not None
        names = list(columns) if split == "train" else []
        with (folder / f"{split}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["sentence1", "sentence2", "label", *names])
            extra = [columns[name] for name in names]
            labels = [["no", "yes"][label] for label in read.labels]
            rows.writerows(zip(*read.texts, labels, *extra, strict=True))
    return folder


def test_a_column_of_the_teachers_outputs_is_the_teacher_to_the_bit(
    compose: Compose, tiny_examples: dict[str, Examples], tmp_path: Path
) -> None:
    stage, pipeline = student(compose(*SHORT))
    reference = load_file(pipeline.build(stage) / "model" / "model.safetensors")
    said = np.load(pipeline.store.get(targets_spec(stage, None), lambda folder: None) / "logits.npy")
    columns = {f"z{number}": [repr(float(value)) for value in said[:, number]] for number in range(2)}
    data = with_columns(tmp_path / "data", tiny_examples, columns)
    again, other = student(compose(*SHORT, "teacher=labels", f"task.dataset={data}", "task.logits=[z0,z1]"))
    assert again.key != stage.key
    assert "teacher" not in {part.name for part in again.upstream if part.config.prediction_source is None}
    weights = load_file(other.build(again) / "model" / "model.safetensors")
    assert weights.keys() == reference.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in reference.items())


def test_probabilities_are_the_softmax_of_what_is_read(
    compose: Compose, tiny_examples: dict[str, Examples], tmp_path: Path
) -> None:
    shares = np.random.default_rng(0).dirichlet([0.3, 0.3], size=64)
    shares[5] = [1.0, 0.0]
    columns = {f"p{number}": [repr(float(value)) for value in shares[:, number]] for number in range(2)}
    data = with_columns(tmp_path / "data", tiny_examples, columns)
    run = compose(*SHORT, "teacher=labels", f"task.dataset={data}", "task.probabilities=[p0,p1]")
    stage, pipeline = student(run)
    pipeline.build(stage)
    logits = np.load(pipeline.store.get(targets_spec(stage, None), lambda folder: None) / "logits.npy")
    powers = np.exp(logits.astype(np.float64))
    np.testing.assert_allclose(powers / powers.sum(1, keepdims=True), shares, atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "columns", "said"),
    [
        (["task.probabilities=[p0,p1]"], {"p0": ["0.5"] * 64, "p1": ["0.9"] * 64}, "which are no probabilities"),
        (
            ["task.logits=[a,b,p0]"],
            dict.fromkeys(["a", "b", "p0"], ["1"] * 64),
            "names 3 columns, but the task has 2 outputs",
        ),
        (["task.probabilities=[p0,q]"], {"p0": ["1"] * 64}, "has no column 'q'"),
        (
            ["task.logits=[p0,p1]"],
            {"p0": ["1"] * 64, "p1": ["high"] * 64},
            "row 0 of split 'train' has 'high', not a finite number",
        ),
        ([], {}, "needs columns with its predictions"),
        (["method=alp", "task.logits=[p0,p1]"], {"p0": ["1"] * 64, "p1": ["-1"] * 64}, "gives only predictions"),
    ],
)
def test_mistakes_are_told_before_training(
    compose: Compose,
    tiny_examples: dict[str, Examples],
    tmp_path: Path,
    overrides: list[str],
    columns: dict[str, list[str]],
    said: str,
) -> None:
    data = with_columns(tmp_path / "data", tiny_examples, columns)
    run = compose(*SHORT, "teacher=labels", f"task.dataset={data}", *overrides)

    def prepare() -> None:
        stage, pipeline = student(run)
        pipeline.prepare(stage)

    with pytest.raises(UserError, match=said):
        prepare()


@pytest.fixture(scope="module")
def other_vocabulary(tiny_examples: dict[str, Examples], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of 3 layers whose words are not those of the tiny one."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    folder = tmp_path_factory.mktemp("other")
    train_wordpiece([text.upper() for column in tiny_examples["train"].texts for text in column], 60, folder)
    size = len(AutoTokenizer.from_pretrained(folder))
    config: Any = BertConfig
    torch.manual_seed(3)
    sizes = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
    BertModel(config(vocab_size=size, max_position_embeddings=96, **sizes)).save_pretrained(folder)
    return folder


def test_a_teacher_may_read_other_tokens_where_only_predictions_are_read(
    compose: Compose, other_vocabulary: Path, tiny_bert_folder: Path
) -> None:
    how = [*SHORT, f"teacher.source={other_vocabulary}", f"student.init.source={tiny_bert_folder}"]
    stage, pipeline = student(compose(*how))
    assert stage.teacher is not None
    names = [getattr(each.tokenizer, "name", None) for each in (stage, stage.teacher)]
    assert names == [str(tiny_bert_folder), str(other_vocabulary)]
    pipeline.build(stage)
    said = np.load(pipeline.store.get(targets_spec(stage, None), lambda folder: None) / "logits.npy")
    from distill_runner.models.build import build
    from distill_runner.models.config import ModelConfig
    from distill_runner.training.data import predict

    model = build(ModelConfig(source=str(pipeline.build(stage.teacher) / "model"), head="keep"), stage.head)
    own = predict(model, pipeline.inputs.split(stage.teacher, "train"), pipeline.device)
    np.testing.assert_allclose(said, own, atol=1e-6)
    with pytest.raises(UserError, match="this method compares tokens"):
        student(compose(*how, "method=internal"))


def test_an_ensemble_is_the_mean_of_its_teachers(
    compose: Compose, other_vocabulary: Path, tiny_bert_folder: Path
) -> None:
    sources = f"[{tiny_bert_folder},{other_vocabulary}]"
    run = compose(*SHORT, "teacher=ensemble", f"teacher.sources={sources}", "teacher.weights=[3,1]")
    stage, pipeline = student(run)
    assert stage.teacher is not None
    assert len(stage.teacher.members) == 2
    pipeline.build(stage)
    said = np.load(pipeline.store.get(targets_spec(stage, None), lambda folder: None) / "logits.npy").astype(np.float64)
    of_members = []
    for number in (1, 2):
        alone: Any = student(compose(*SHORT, f"teacher.source={[tiny_bert_folder, other_vocabulary][number - 1]}"))[0]
        assert stage.teacher.members[number - 1].spec["data"] == alone.teacher.spec["data"]
        member = stage.teacher.members[number - 1]
        view = with_teacher_tokenizer(stage, member)
        from distill_runner.models.build import build
        from distill_runner.models.config import ModelConfig
        from distill_runner.training.data import predict

        model = build(ModelConfig(source=str(pipeline.build(member) / "model"), head="keep"), stage.head)
        powers = np.exp(predict(model, pipeline.inputs.split(view, "train"), pipeline.device).astype(np.float64))
        of_members.append(powers / powers.sum(1, keepdims=True))
    np.testing.assert_allclose(np.exp(said), 0.75 * of_members[0] + 0.25 * of_members[1], atol=1e-6)
    metrics = json.loads((pipeline.build(stage.teacher) / "metrics.json").read_text())
    assert 0 <= metrics["metrics"]["accuracy"] <= 1
    assert all("teacher_recall" in own for own in scores_by_class(stage, pipeline)["validation"].values())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["teacher.sources=[a]"], "an ensemble needs two models or more"),
        (["teacher.sources=[a,b]", "teacher.weights=[1]"], "must be 2 numbers greater than 0"),
    ],
)
def test_impossible_ensembles_are_told(compose: Compose, values: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        compose(*SHORT, "teacher=ensemble", *values)


def test_means_of_outputs_by_hand() -> None:
    one, two = torch.tensor([[0.0, 0.0]]), torch.tensor([[np.log(3.0), 0.0]])
    mean = Classes().ensemble_mean([one, two], [0.5, 0.5])
    torch.testing.assert_close(mean.exp(), torch.tensor([[0.625, 0.375]], dtype=mean.dtype))
    assert Score().ensemble_mean([torch.tensor([[2.0]]), torch.tensor([[4.0]])], [0.25, 0.75]).item() == 3.5


def test_the_divergence_is_what_is_left_to_learn() -> None:
    """KL by hand, times T²: 0 for equal predictions, whatever the teacher's entropy."""
    from distill_runner.methods.base import Progress
    from distill_runner.methods.predictions import SoftLabels
    from distill_runner.models.features import Features

    student, teacher = torch.tensor([[0.5, -1.0, 2.0]]).double(), torch.tensor([[1.0, 0.0, -2.0]]).double()
    term = SoftLabels(temperature=2.0)
    term.outputs = Classes()
    batch: Any = SimpleNamespace(output_weights=None)
    progress = Progress(0, 0, 1, 1)
    loss = term(Features(student), Features(teacher), batch, progress)
    p, q = np.exp(teacher.numpy() / 2), np.exp(student.numpy() / 2)
    p, q = p / p.sum(), q / q.sum()
    assert loss.item() == pytest.approx(4 * float((p * np.log(p / q)).sum()), rel=1e-9)
    assert term(Features(teacher), Features(teacher), batch, progress).item() == 0
