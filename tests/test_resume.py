"""A training run that is stopped and resumed ends as an uninterrupted one, bit for bit on a CPU.

Each case depends on state that the other cases do not have, and stops where the loss of this state would show: torch's
random numbers, the layer of a schedule and the epoch in which it began, the momentum of SGD, the scale of fp16's losses
and the running statistics of batch normalization.
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.amp import GradScaler
from transformers import AutoTokenizer

from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.store import Store
from distill_runner.training.config import Precision
from distill_runner.training.devices import Device
from helpers import families
from helpers.small_runs import few_fast

Compose = Callable[..., RunConfig]


@dataclass(frozen=True)
class Case:
    """Overrides of a run, and the updates of the student after which it is stopped; an epoch has 4 updates."""

    overrides: tuple[str, ...]
    stops: tuple[int, ...] = (6,)
    precision: Precision = "fp32"


SCHEDULED = ("method=internal", "schedule=pid", "student.num_layers=3", "teacher.optim.epochs=1", "optim.epochs=7")
CASES = {
    "packed, with trained parameters of the method": Case(("method=ckd", "teacher.optim.epochs=1")),
    "momentum of SGD": Case(("method=nkd", "optim.name=sgd", "optim.lr=0.1")),
    # The second layer is trained in epochs 2 and 3. After epoch 2, the schedule must know in which epoch it began.
    "scheduled by epochs": Case((*SCHEDULED, "schedule.limits=[1,2,2]")),
    # The watched term has a mean of 0.048 in epoch 2 and 0.031 in epoch 3, after which the third layer follows.
    # With half of the sum it would follow too early, and with half of the examples too late.
    "scheduled by thresholds": Case((*SCHEDULED, "schedule.limits=[1,3,3]", "schedule.thresholds=0.035"), (6, 11)),
    # Epoch 2 compares other teacher layers than epoch 1, and the run is stopped within it.
    "layers drawn anew in each epoch": Case(("method=rail", "student.num_layers=3", "teacher.optim.epochs=1")),
    "padded, with torch's dropout": Case(("method=nkd", "student.init.source={albert}")),
    "loss scale of fp16": Case(("method=nkd",), precision="fp16"),
    "images with batch normalization": Case(
        (
            "task=custom_images",
            "task.dataset={images}",
            "task.epochs=2",
            "task.augment.pad=2",
            "student=resnet8",
            "method=nkd",
            "optim=cifar",
            "optim.batch_size=16",
        )
    ),
}


@dataclass(frozen=True)
class HalfPrecisionCpu(Device):
    """A CPU with the loss scaler of a GPU. Its first scale is too large, so the first updates are skipped."""

    def scaler(self) -> GradScaler:
        return GradScaler("cpu", init_scale=2.0**18, growth_interval=3)


@pytest.fixture(scope="module")
def albert(tiny_bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a family that runs padded, where torch draws the dropout masks."""
    folder = tmp_path_factory.mktemp("albert")
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_folder)
    tokenizer.save_pretrained(folder)
    dropout: dict[str, Any] = dict.fromkeys(
        ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob"), 0.1
    )
    families.make("albert", vocab_size=len(tokenizer), **dropout).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", few_fast([*CASES], 4))
def test_resumed_is_uninterrupted(
    name: str, compose: Compose, albert: Path, images_folder: Path, tmp_path: Path
) -> None:
    case = CASES[name]
    folders = {"albert": str(albert), "images": str(images_folder)}
    overrides = [override.format(**folders) for override in case.overrides]

    def student(store: str, stop_at: int | None = None) -> bytes:
        # The weights after the last update: the best epoch may lie before the stop.
        last = ("runtime.log_every=1", "stages.student.select=last")
        run = compose(*overrides, *last, tiny="task=custom_images" not in overrides)

        def report(values: Mapping[str, Any], step: int, epoch: float) -> None:
            if "loss" in values:
                steps.append(step)
                if step == stop_at:
                    signal.raise_signal(signal.SIGINT)

        pipeline = Pipeline(
            Store(tmp_path / store),
            run.runtime,
            lambda stage: report if stage == "student" else lambda values, step, epoch: None,
        )
        if case.precision == "fp16":
            vars(pipeline)["device"] = HalfPrecisionCpu(torch.device("cpu"), "fp16")
        folder = pipeline.build(resolve_stage(run.stages, "student", case.precision))
        return (folder / "model" / "model.safetensors").read_bytes()

    steps: list[int] = []
    expected, num_steps = student("uninterrupted"), len(steps)
    for stop in case.stops:
        with pytest.raises(KeyboardInterrupt):
            student("resumed", stop)
    assert student("resumed") == expected
    assert steps == 2 * [*range(1, num_steps + 1)], "no update is left out, and none is repeated"
