"""Updates of every method in every precision on a GPU, without waiting for it between two reports."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from distill_runner.compose.config import RunConfig
from distill_runner.compose.folders import choices
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve
from distill_runner.pipeline.store import Store
from distill_runner.training.train import Training
from fake_cuda import COUNTS
from test_configs import made_small

Compose = Callable[..., RunConfig]
LAUNCHES_OF_AN_UPDATE = 1100
"""At most, of the tiny students of two layers."""


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Counter[str], int]]]:
    """For each update what made the host wait, where that is counted, and the kernels launched."""
    seen: list[tuple[Counter[str], int]] = []
    step = Training.step

    def counted(training: Training, update: Any) -> None:
        COUNTS.reset()
        step(training, update)
        seen.append((COUNTS.waits.copy(), COUNTS.launches.total() + COUNTS.copies.total()))

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", counted)
        yield seen


def losses_of(run: RunConfig, device: str, precision: str) -> list[Mapping[str, Any]]:
    points: list[Mapping[str, Any]] = []

    def report(name: str) -> Callable[[Mapping[str, Any], int, float], None]:
        return lambda values, step, epoch: points.append(values) if name == "student" else None

    runtime = run.runtime.model_copy(update={"device": device, "precision": precision})
    Pipeline(Store(run.store.dir), runtime, report).build(resolve(run.stages, "student", precision))
    return [point for point in points if "loss" in point]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("method", choices("method"))
def test_updates_of_every_method(
    method: str, precision: str, compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = (f"method={method}",)
    run = compose(*overrides, f"store.dir={tmp_path}", *made_small(overrides), "runtime.log_every=100")
    with watched(monkeypatch) as updates:
        losses = losses_of(run, "cuda:0", precision)
    assert losses
    assert all(math.isfinite(value) for point in losses for value in point.values())
    assert updates
    assert [waits for waits, _ in updates if waits] == []
    assert max(launches for _, launches in updates) <= LAUNCHES_OF_AN_UPDATE


def test_a_gpus_losses_are_a_cpus(compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout, of which each device has its own."""

    def without_dropout(pipeline: Pipeline, *args: Any) -> Any:
        model = built(pipeline, *args)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return model

    built = Pipeline._initial
    monkeypatch.setattr(Pipeline, "_initial", without_dropout)
    for method in ("alp", "minilmv2"):
        of: dict[str, list[Any]] = {}
        for device in ("cpu", "cuda:0"):
            overrides = (f"method={method}",)
            values = ("optim.max_steps=4", "runtime.log_every=1", f"store.dir={tmp_path}/{method}-{device}")
            run = compose(*overrides, *made_small(overrides), *values)
            of[device] = [point["loss"] for point in losses_of(run, device, "fp32")]
        assert len(of["cpu"]) == 4
        assert of["cuda:0"] == pytest.approx(of["cpu"], rel=1e-4)
