"""Weights of training examples: what they do to the losses, where they are refused, and a run with them."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distill_runner.common.errors import UserError
from distill_runner.datasets.batches import Batch
from distill_runner.datasets.splits import TokenSplit
from distill_runner.datasets.tokenization import Examples
from distill_runner.methods import predictions
from distill_runner.methods.attention import AttentionRelationLoss, AttentionScoreLoss
from distill_runner.methods.base import LossTerm, Progress
from distill_runner.methods.hidden_states import EmbeddingLoss, HiddenStateLoss, PooledStateLoss, TokenStateLoss
from distill_runner.methods.layer_mapping import LayerMapping
from distill_runner.methods.outputs import Classes, LabelSets, Outputs, Score
from distill_runner.models.features import EncoderShape, Features
from distill_runner.pipeline.account import example_line
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store
from distill_runner.tasks import make_task
from distill_runner.tasks.split_account import effective_number
from distill_runner.training.data import TaskData
from distill_runner.training.devices import Device
from helpers.columns import column_outputs
from helpers.small_runs import Compose

CPU = Device.from_name("cpu", "fp32")
PROGRESS = Progress(0, 0, 1, 1)
OUTPUTS: dict[str, tuple[Outputs, int]] = {
    "classes": (Classes(), 3),
    "class weights": (Classes([0.5, 1.0, 2.0]), 3),
    "label sets": (LabelSets(), 3),
    "scores": (Score(), 1),
}


def batch_of(labels: Tensor, weights: Tensor | None) -> Batch:
    numbers = torch.arange(len(labels))
    return Batch(numbers, numbers, numbers, numbers, numbers, (), labels, example_weights=weights)


def labels_of(name: str, size: int, generator: torch.Generator) -> Tensor:
    if name == "label sets":
        return torch.randint(2, (size, 3), generator=generator).double()
    if name == "scores":
        return torch.randn(size, dtype=torch.float64, generator=generator)
    return torch.randint(3, (size,), generator=generator)


def all_losses(
    name: str, student: Tensor, teacher: Tensor, labels: Tensor, weights: Tensor | None
) -> dict[str, Tensor]:
    outputs, batch = OUTPUTS[name][0], batch_of(labels, weights)
    losses = {
        "labels": outputs.label_loss(student, batch),
        "soft": outputs.soft_label_loss(student, teacher, batch, 2.0),
        "logits": outputs.logit_loss(student, teacher, batch, "sum"),
    }
    if name == "classes":
        term = predictions.DecoupledSoftLabels()
        losses["decoupled"] = term(Features(student), Features(teacher), batch, PROGRESS)
    return losses


@pytest.mark.parametrize("name", OUTPUTS)
@settings(max_examples=20, deadline=None)
@given(counts=st.lists(st.integers(0, 3), min_size=2, max_size=6).filter(any), seed=st.integers(0, 99))
def test_a_weight_of_n_is_the_example_n_times(name: str, counts: list[int], seed: int) -> None:
    """For the sum over the examples; also for the gradient."""
    generator, size = torch.Generator().manual_seed(seed), len(counts)
    student = torch.randn(size, OUTPUTS[name][1], dtype=torch.float64, generator=generator)
    teacher, labels = (
        torch.randn(student.shape, dtype=torch.float64, generator=generator),
        labels_of(name, size, generator),
    )
    repeats = torch.tensor(counts)
    sums = []
    for rows, weights in (
        (torch.arange(size), repeats.double()),
        (torch.arange(size).repeat_interleave(repeats), None),
    ):
        leaf = student.clone().requires_grad_()
        losses = all_losses(name, leaf[rows], teacher[rows], labels[rows], weights)
        total = torch.stack([*losses.values()]) * len(rows)
        (gradient,) = torch.autograd.grad(total.sum(), leaf)
        sums.append((total.detach(), gradient))
    for one, other in zip(*sums, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def shape(num_layers: int) -> EncoderShape:
    return EncoderShape(num_layers, 8, 2, 3, 100, "bert")


SKIP, ALL = LayerMapping(rule="skip", supervise_last=True), LayerMapping(rule="all", supervise_last=True)
INNER_TERMS: dict[str, Callable[[], LossTerm]] = {
    "pkd": lambda: HiddenStateLoss(SKIP, "select", "normalized"),
    "pkd's code": lambda: HiddenStateLoss(SKIP, "select", "normalized_mse"),
    "cosine": lambda: HiddenStateLoss(SKIP, "select", "cosine", "mean"),
    "ckd": lambda: HiddenStateLoss(ALL, "concatenate", "mse"),
    "alp": lambda: HiddenStateLoss(ALL, "attend", "mse", states="outputs"),
    "tinybert": lambda: TokenStateLoss(SKIP),
    "distilbert": lambda: TokenStateLoss(SKIP, "cosine", project=False),
    "embeddings": EmbeddingLoss,
    "rail": lambda: PooledStateLoss(SKIP),
    "rail, concatenated": lambda: PooledStateLoss(SKIP, "concatenation"),
    "relations of tokens": lambda: AttentionRelationLoss(SKIP, ["QK", "VV"], over_rows="token"),
    "relations of sequences": lambda: AttentionRelationLoss(SKIP, ["QQ"], heads=4),
    "scores of attention": lambda: AttentionScoreLoss(SKIP),
}


@pytest.mark.parametrize("name", INNER_TERMS)
@settings(max_examples=8, deadline=None)
@given(counts=st.lists(st.integers(0, 3), min_size=2, max_size=4).filter(any), seed=st.integers(0, 99))
def test_inner_terms_take_an_example_n_times(name: str, counts: list[int], seed: int, tokens: TokenSplit) -> None:
    """For the sum over the term's units, examples or tokens, of packed batches; also for the gradient."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        term = INNER_TERMS[name]().double()
        term.bind(shape(2), shape(4), Classes())
        term.double()
    lengths = np.asarray(tokens.lengths)
    leaves = [
        {
            key: [torch.randn(int(lengths[i]), 8, dtype=torch.float64, generator=generator) for i in range(len(counts))]
            for key in [*range(5), *product(("query", "key", "value"), range(1, 5))]
        }
        for _ in range(2)
    ]
    for own in leaves[0].values():
        for leaf in own:
            leaf.requires_grad_()

    def features(own: dict[Any, list[Tensor]], batch: Batch) -> Features:
        packed = {key: torch.cat([values[i] for i in batch.index.tolist()]) for key, values in own.items()}
        states = {key: values for key, values in packed.items() if isinstance(key, int)}
        projections = {key: values for key, values in packed.items() if not isinstance(key, int)}
        return Features(None, {key: values[batch.starts] for key, values in states.items()}, projections, states)

    results = []
    weighted = tokens.batch(np.arange(len(counts)))
    weighted = replace(weighted, example_weights=torch.tensor(counts)[weighted.index].double())
    for batch in (weighted, tokens.batch(np.repeat(np.arange(len(counts)), counts))):
        units = batch.num_tokens if term.mean_over == "token" else batch.size
        total = units * term(features(leaves[0], batch), features(leaves[1], batch), batch, PROGRESS)
        flat = [leaf for own in leaves[0].values() for leaf in own]
        results.append((total.detach(), torch.autograd.grad(total, flat, allow_unused=True)))
    (one, gradients), (other, other_gradients) = results
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert any(gradient is not None for gradient in gradients)
    for gradient, expected in zip(gradients, other_gradients, strict=True):
        zero = torch.zeros(1, dtype=torch.float64)
        one, other = (zero if value is None else value for value in (gradient, expected))
        torch.testing.assert_close(one, other.expand_as(one), rtol=1e-8, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(weights=st.lists(st.floats(0.1, 4), min_size=3, max_size=6), seed=st.integers(0, 99))
def test_dist_has_weighted_correlations(weights: list[float], seed: int) -> None:
    """Against numpy's weighted covariance; and an example of weight n is n examples for the part over examples."""
    rng = np.random.default_rng(seed)
    student, teacher = (rng.dirichlet(np.ones(3), size=len(weights)) for _ in range(2))
    one, other = torch.from_numpy(student), torch.from_numpy(teacher)
    own = torch.tensor(weights, dtype=torch.float64)
    expected = []
    for x, y in zip(student.T, teacher.T, strict=True):
        covariance = np.cov(x, y, aweights=weights)
        expected.append(1 - covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1]))
    assert predictions.correlation_over_outputs(one, other, own).item() == pytest.approx(np.mean(expected), abs=1e-9)
    rows = [1 - np.corrcoef(x, y)[0, 1] for x, y in zip(student, teacher, strict=True)]
    mean = np.mean(np.array(weights) * rows)
    assert predictions.correlation_over_classes(one, other, own).item() == pytest.approx(mean, abs=1e-9)
    repeats = torch.from_numpy(rng.integers(1, 4, len(weights)))
    twin, other_twin = (values.repeat_interleave(repeats, 0) for values in (one, other))
    counted = predictions.correlation_over_outputs(one, other, repeats.double())
    assert counted.item() == pytest.approx(predictions.correlation_over_outputs(twin, other_twin).item(), abs=1e-9)
    assert torch.isfinite(predictions.correlation_over_outputs(one, other, torch.zeros(len(weights))))


def test_cross_entropy_by_hand() -> None:
    """Logits 0, 0 and ln 3, 0 with the labels 0 and 1: losses ln 2 and ln 4; weights 3 and 1 of a mean of 2."""
    logits = torch.tensor([[0.0, 0.0], [np.log(3.0), 0.0]], dtype=torch.float64)
    batch = batch_of(torch.tensor([0, 1]), torch.tensor([1.5, 0.5], dtype=torch.float64))
    assert Classes().label_loss(logits, batch).item() == pytest.approx((1.5 * np.log(2) + 0.5 * np.log(4)) / 2)


def task_of(**options: Any) -> Any:
    base = {"name": "own", "columns": ["text"], "labels": ["no", "yes"], "metrics": ["accuracy"], "max_length": 16}
    return make_task(**base | {"epochs": 1, "dataset": "data", "validation": {"validation": "validation"}} | options)


def split_of(folder: Path, wordpiece: Any, weights: list[float]) -> TokenSplit:
    folder.mkdir()
    size = len(weights)
    examples = Examples([["good movie"] * size], np.arange(size) % 2, np.array(weights))
    TokenSplit.write(folder, examples, wordpiece, 16)
    return TokenSplit(folder)


def test_batches_have_weights_with_a_mean_of_1_over_the_examples_that_are_used(tmp_path: Path, wordpiece: Any) -> None:
    split = split_of(tmp_path / "a", wordpiece, [1, 2, 3, 4, 0, 6, 7, 8])
    batch = TaskData(task_of(), split, {}, CPU, share=0.5).batch(np.arange(4), 0)
    own = np.array([1, 2, 3, 4, 0, 6, 7, 8])[batch.index.numpy()]
    assert batch.example_weights is not None
    np.testing.assert_allclose(batch.example_weights.numpy(), own / own.mean())
    equal = TaskData(task_of(), split_of(tmp_path / "b", wordpiece, [3.0] * 4), {}, CPU)
    assert equal.batch(np.arange(4), 0).example_weights is None, "equal weights change nothing, to the bit"
    with pytest.raises(UserError, match="all have the weight 0"):
        TaskData(task_of(), split_of(tmp_path / "c", wordpiece, [0.0] * 4), {}, CPU)


def test_effective_number_by_hand() -> None:
    assert effective_number(np.array([1.0, 1.0, 2.0])) == pytest.approx(16 / 6)
    assert effective_number(np.array([5.0] * 7)) == pytest.approx(7)


def written(folder: Path, weights: list[str], header: str = "text,label,w") -> Path:
    folder.mkdir(exist_ok=True)
    rows = [f"text number {number},{('no', 'yes')[number % 2]}" for number in range(len(weights))]
    lines = [f"{row},{weight}" for row, weight in zip(rows, weights, strict=True)]
    (folder / "train.csv").write_text("\n".join([header, *lines]) + "\n")
    (folder / "validation.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    return folder


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (["1", "-0.5", "1", "1"], "row 1 of split 'train' holds '-0.5', which is no number of 0 or more"),
        (["1", "1", "nan", "-1"], "row 2 of split 'train' holds 'nan'"),
        (["inf", "1", "1", "1"], "row 0 of split 'train' holds 'inf'"),
        (["x", "1", "1", "1"], "row 0 of split 'train' holds 'x'"),
        (["0", "0", "0.0", "0"], "all examples of split 'train' have the weight 0"),
    ],
)
def test_values_that_are_no_weights(tmp_path: Path, weights: list[str], message: str) -> None:
    task = task_of(dataset=str(written(tmp_path / "data", weights)), example_weight="w")
    with pytest.raises(UserError, match=message) as error:
        task.examples("train")
    assert error.value.key == "task.example_weight"


def test_weights_follow_the_rows_that_are_used(tmp_path: Path) -> None:
    folder = written(tmp_path / "data", ["1,0.9", "2,", "3,0.5", "4,0.1"], "text,label,w,p")
    task = task_of(dataset=str(folder), example_weight="w", probabilities=["p"], gold="all")
    assert task.examples("train").weights.tolist() == [1, 3, 4]
    assert task.examples("validation").weights is None
    kept = task.model_copy(update={"keep": "confident:0.8"})
    assert kept.examples("train").weights.tolist() == [1, 4]
    assert len(column_outputs(kept)) == 2


@pytest.mark.parametrize("options", [{"type": "embeddings", "labels": None, "columns": ["a", "b"]}, {"type": "images"}])
def test_types_without_weights(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="has no such weights"):
        task_of(example_weight="w", max_length=options.get("max_length", 16), **{"metrics": None} | options)


def test_methods_and_transfer_sets_without_weights(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [f"task.dataset={written(tmp_path / 'data', ['1', '2', '3', '4'])}", "task.columns=[text]", "task.test=null"]

    def resolved(*overrides: str) -> Stage:
        run = compose(*data, "task.example_weight=w", *overrides)
        return resolve_stage(run.stages, run.stage, run.runtime.precision)

    assert resolved("method=rkd", "teacher.optim.epochs=0"), "a stage that is not trained reads no weights"
    monkeypatch.setattr(predictions.CorrelatedSoftLabels, "weighs_examples", False)  # as a term of one's own may be
    with pytest.raises(UserError, match="no term of the method reads weights: kd"):
        resolved("method=dist", "stages.student.method.weights.ce=0", "loss.temperature=2")
    with pytest.raises(UserError, match="the stage trains on a transfer set"):
        resolved(
            "method=kd",
            f"stages.student.transfer={{name: x, parts: {{a: {{dataset: {tmp_path / 'data'}, columns: [text]}}}}}}",
        )
    assert resolved("method=rkd").key != resolve_stage(compose(*data, "method=rkd").stages, "student", "fp32").key


def test_the_account_tells_the_effective_number(compose: Compose, tmp_path: Path) -> None:
    """Of the rows that are used: here one without a score is not."""
    written(tmp_path / "data", ["1,0.9", "1,0.2", "2,0.8", "0,0.5", "9,"], "text,label,w,p")
    options = ("task.columns=[text]", "task.test=null", "teacher=labels", "task.probabilities=[p]", "method=rkd")
    run = compose(f"task.dataset={tmp_path / 'data'}", "task.example_weight=w", *options)
    stage = resolve_stage(run.stages, run.stage, run.runtime.precision)
    (line,) = filter(None, [example_line(stage, Pipeline(Store(run.store.dir), run.runtime).inputs)])
    assert "weights of w, 0 to 2, as 3 of 4 examples with equal weights ((sum w)^2 / sum w^2)" in line.text
    assert line.details["effective"] == pytest.approx(16 / 6)


@pytest.mark.parametrize(("batch_size", "is_refused"), [(4, True), (3, False)])
def test_a_transfer_set_of_one_batch_is_refused(
    compose: Compose, tmp_path: Path, batch_size: int, is_refused: bool
) -> None:
    """It must have been read otherwise than the user means."""
    data = written(tmp_path / "data", ["1", "2", "3", "4"])
    transfer = f"stages.student.transfer={{name: x, parts: {{a: {{dataset: {data}, columns: [text]}}}}}}"
    options = (f"task.dataset={data}", "task.columns=[text]", "task.test=null", "method=kd", transfer)
    run = compose(*options, f"stages.student.optim.batch_size={batch_size}", "stages.student.optim.epochs=1")
    stage = resolve_stage(run.stages, run.stage, run.runtime.precision)
    with pytest.raises(UserError, match="would be 1 update, on 4 examples") if is_refused else nullcontext():
        Pipeline(Store(run.store.dir), run.runtime).prepare(stage)
