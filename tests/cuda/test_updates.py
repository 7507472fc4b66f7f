"""Updates of every method in every precision on a GPU, without waiting for it between two reports."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from distill_runner.compose.folders import choices
from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.store import Store
from distill_runner.training.devices import Device
from distill_runner.training.train import Training
from fake_cuda import COUNTS
from helpers.small_runs import made_small

Compose = Callable[..., RunConfig]
LAUNCHES, LAUNCHES_OF_A_LAYER = 800, 100
"""Of an update at most, and more for each layer of what is trained: pd_truncated pre-trains 12."""


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Counter[str], int]]]:
    """For each update what made the host wait, where that is counted, and the kernels launched."""
    seen: list[tuple[Counter[str], int]] = []
    step = Training.take_update

    def counted(training: Training, *arguments: Any) -> None:
        COUNTS.reset()
        step(training, *arguments)
        seen.append((COUNTS.waits.copy(), COUNTS.launches.total() + COUNTS.copies.total()))

    with monkeypatch.context() as patch:
        patch.setattr(Training, "take_update", counted)
        yield seen


def losses_of(run: RunConfig, device: str, precision: str) -> list[Mapping[str, Any]]:
    points: list[Mapping[str, Any]] = []

    def report(name: str) -> Callable[[Mapping[str, Any], int, float], None]:
        return lambda values, step, epoch: points.append(values) if name == "student" else None

    runtime = run.runtime.model_copy(update={"device": device, "precision": precision})
    Pipeline(Store(run.store.dir), runtime, report).build(resolve_stage(run.stages, "student", precision))
    return [point for point in points if "loss" in point]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("method", [*choices("method"), "rkd stages.student.optim.name=sgd"])
def test_updates_of_every_method(
    method: str, precision: str, compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = tuple(f"method={method}".split())
    run = compose(*overrides, f"store.dir={tmp_path}", *made_small(overrides), "runtime.log_every=100")
    with watched(monkeypatch) as updates:
        losses = losses_of(run, "cuda:0", precision)
    assert losses
    assert all(math.isfinite(value) for point in losses for value in point.values())
    assert updates
    assert [waits for waits, _ in updates if waits] == []
    deepest = max(stage.model.num_layers or 4 for stage in run.stages.values())
    assert max(launches for _, launches in updates) <= LAUNCHES + LAUNCHES_OF_A_LAYER * deepest


def test_a_gpus_losses_are_a_cpus(compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout, of which each device has its own."""

    def without_dropout(pipeline: Pipeline, *args: Any) -> Any:
        model = built(pipeline, *args)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return model

    built = Pipeline._initial_model
    monkeypatch.setattr(Pipeline, "_initial_model", without_dropout)
    for method in ("alp", "minilmv2"):
        of: dict[str, list[Any]] = {}
        for name, device in (("cpu", "cpu"), ("gpu", "cuda:0")):
            overrides = (f"method={method}",)
            values = ("optim.max_steps=4", "runtime.log_every=1", f"store.dir={tmp_path}/{method}-{name}")
            run = compose(*overrides, *made_small(overrides), *values)
            of[name] = [point["loss"] for point in losses_of(run, device, "fp32")]
        assert len(of["cpu"]) == 4
        assert of["gpu"] == pytest.approx(of["cpu"], rel=1e-4)


def test_a_device_without_a_number(compose: Compose, tmp_path: Path) -> None:
    """``runtime.device=cuda`` is documented, and some functions of torch need a number."""
    small = (f"store.dir={tmp_path}", *made_small(("method=nkd",)))
    assert losses_of(compose("method=nkd", *small), "cuda", "fp32")
    assert Device.from_name("cuda", "fp32").torch == torch.device("cuda:0")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_launches_of_an_update_of_alp(
    precision: str,
    compose: Compose,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A teacher of 12 layers and a student of 4, as BERT-base's: their number does not depend on widths and lengths."""
    bert = BertConfig(vocab_size=300, num_hidden_layers=12, hidden_size=32, num_attention_heads=2, intermediate_size=64)
    BertModel(bert).save_pretrained(tmp_path / "bert")
    AutoTokenizer.from_pretrained(compose("method=alp").teacher.source).save_pretrained(tmp_path / "bert")
    sizes = (f"teacher.source={tmp_path / 'bert'}", "student.num_layers=4", "optim.batch_size=32", "optim.max_steps=2")
    run = compose("method=alp", f"store.dir={tmp_path}", *sizes, "teacher.optim.epochs=1", "runtime.log_every=100")
    with watched(monkeypatch) as updates:
        losses_of(run, "cuda:0", precision)
    waits, launches = updates[-1]
    with capsys.disabled():
        print(f"\nALP, 4 layers, {precision}: {launches} launches and copies an update, {waits.total()} waits")
    assert not waits
    assert launches <= {"fp32": 350, "bf16": 440}[precision]


@pytest.mark.parametrize(
    ("capability", "precision", "warned"), [((7, 0), "bf16", True), ((7, 0), "fp16", False), ((8, 0), "tf32", False)]
)
def test_old_gpus_have_no_units_for_bf16(
    capability: tuple[int, int],
    precision: Any,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    Device.from_name("cuda:0", precision)
    assert ("its fast precision is fp16" in caplog.text) == warned
