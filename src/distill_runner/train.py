"""``fit``: the one training loop. It knows models, batches and named losses, and no method."""

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill_runner.batches import Batch
from distill_runner.config import Optim, Runtime
from distill_runner.data import Data, steps
from distill_runner.devices import Device
from distill_runner.encoders import extract
from distill_runner.methods.base import Method, Progress
from distill_runner.schedules import LEARNING_RATES
from distill_runner.seeds import random_state, restore_random_state
from distill_runner.teachers import TeacherTargets

log = logging.getLogger(__name__)

CHECKPOINT, PREDICTIONS = "checkpoint.pt", "predictions-{}.npy"
Log = Callable[[Mapping[str, Any], int, float], None]
"""Receives values, the step and the epoch as a fraction."""


class Diverged(Exception):
    """A loss is not finite any more."""


@dataclass
class History:
    """What training has come to; saved in every checkpoint.

    ``epochs`` has the metrics after each epoch, and ``best`` is the number (from 1) of the one that was kept.
    """

    epoch: int = 0
    position: int = 0
    step: int = 0
    best: int = 0
    best_score: float = -math.inf
    epochs: list[dict[str, float]] = field(default_factory=list)
    examples: int = 0
    seconds: float = 0.0

    @property
    def examples_per_second(self) -> float:
        """Of training alone, evaluation and checkpoints left out."""
        return self.examples / self.seconds if self.seconds else 0.0


@dataclass
class Training:
    """All that changes during training, hence all that a checkpoint holds."""

    model: PreTrainedModel
    method: Method
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    history: History = field(default_factory=History)

    def save(self, file: Path) -> None:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "method", "optimizer", "scaler")}
        state = {**parts, "history": asdict(self.history), "random": random_state()}
        torch.save(state, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)

    def resume(self, file: Path, device: Device) -> bool:
        """Take up the checkpoint, if there is one."""
        if not file.exists():
            return False
        state = torch.load(file, map_location=device.torch, weights_only=True)
        for name in ("model", "method", "optimizer", "scaler"):
            getattr(self, name).load_state_dict(state[name])
        self.history = History(**state["history"])
        restore_random_state({key: _on_cpu(value) for key, value in state["random"].items()})
        return True


def fit(
    model: PreTrainedModel,
    method: Method,
    data: Data,
    teacher: TeacherTargets,
    optim: Optim,
    *,
    select_best: bool,
    seed: int,
    device: Device,
    runtime: Runtime,
    folder: Path,
    report: Log,
) -> History:
    """Train ``model`` and leave it in ``folder/model`` with the predictions of the epoch that was kept.

    An interrupted call (Ctrl-C, SIGTERM, a crash) is taken up from ``folder`` by the next one, with the same end, bit for bit on CPU.

    Args:
        select_best: keep the epoch with the best first metric of ``data``, else the last one.
        report: called every ``runtime.log_every`` steps and after every epoch.
    Raises:
        Diverged: a loss is not finite; the message names the step and the term.
        KeyboardInterrupt: after the checkpoint has been written.
    """
    training = Training(
        device.place(model), device.place(method), _optimizer(model, method, optim, device), device.scaler()
    )
    if training.resume(folder / CHECKPOINT, device):
        log.info("resuming at step %d (epoch %d)", training.history.step, training.history.epoch + 1)
    history, per_epoch = training.history, math.ceil(len(data) / optim.batch_size)
    num_steps = min(optim.epochs * per_epoch, optim.max_steps or math.inf)
    num_epochs = math.ceil(num_steps / per_epoch)
    meter = Meter(history, int(num_steps), per_epoch, runtime.log_every, report)
    saved = time.monotonic()

    if not num_epochs:
        _end_epoch(training, data, select_best, folder, report, per_epoch)
    with interrupts() as interrupted:
        while history.epoch < num_epochs:
            model.train()
            method.train()
            updates = steps(data, optim.batch_size, optim.accumulation, seed, history.epoch)
            remaining = min(per_epoch - history.position, int(num_steps) - history.step)
            for update in islice(updates, history.position, history.position + remaining):
                progress = Progress(history.epoch, history.step, num_epochs, int(num_steps))
                rate = optim.lr * LEARNING_RATES[optim.schedule](history.step, int(num_steps), optim.warmup)
                meter.add(_update(training, update, teacher, progress, rate, optim.clip, device), update, rate)
                if interrupted or time.monotonic() - saved > 60 * runtime.checkpoint_minutes:
                    meter.flush()
                    training.save(folder / CHECKPOINT)
                    saved = time.monotonic()
                if interrupted:
                    raise KeyboardInterrupt
            meter.flush()
            _end_epoch(training, data, select_best, folder, report, per_epoch)
            training.save(folder / CHECKPOINT)
            saved = time.monotonic()
            meter.restart()
    return history


def _update(
    training: Training,
    update: list[Batch],
    teacher: TeacherTargets,
    progress: Progress,
    rate: float,
    clip: float | None,
    device: Device,
) -> dict[str, Tensor]:
    """One step of the optimiser over the batches of ``update``; returns the mean of what is to be logged."""
    model, method = training.model, training.method
    num_examples = sum(batch.size for batch in update)
    logged: dict[str, Tensor] = {}
    for cpu_batch in update:
        batch = device.move(cpu_batch)
        targets = teacher(batch, progress)
        with device.autocast():
            features = extract(model, batch, method.student_needs)
        with torch.autocast(device.torch.type, enabled=False):
            losses = method(features.float(), targets, batch, progress)
        share = batch.size / num_examples
        total = torch.stack(list(losses.values())).sum() * share
        training.scaler.scale(total).backward()
        seen = {f"loss/{name}": value.detach() for name, value in losses.items()} | method.observed()
        for name, value in seen.items():
            logged[name] = logged.get(name, 0) + share * value
    for group in training.optimizer.param_groups:
        group["lr"] = rate
    if clip is not None:
        training.scaler.unscale_(training.optimizer)
        nn.utils.clip_grad_norm_([p for g in training.optimizer.param_groups for p in g["params"]], clip)
    training.scaler.step(training.optimizer)
    training.scaler.update()
    training.optimizer.zero_grad(set_to_none=True)
    return logged


def _optimizer(model: nn.Module, method: nn.Module, optim: Optim, device: Device) -> torch.optim.Optimizer:
    """Weight decay leaves out biases and LayerNorm (vectors), as in BERT's own recipe."""
    parameters = [p for module in (model, method) for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optim.name]
    return kind(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def _end_epoch(training: Training, data: Data, select_best: bool, folder: Path, report: Log, per_epoch: int) -> None:
    """Evaluate, keep the model if it is the one to keep, and count the epoch."""
    history = training.history
    metrics, predictions = data.evaluate(training.model)
    history.epochs.append(metrics)
    history.epoch, history.position = history.epoch + 1, 0
    first = next(iter(metrics.values()))
    if not select_best or first > history.best_score:
        history.best, history.best_score = history.epoch, first
        training.model.save_pretrained(folder / "model")
        for name, outputs in predictions.items():
            np.save(folder / PREDICTIONS.format(name), outputs)
    report(
        {f"validation/{name}": value for name, value in metrics.items()},
        history.step,
        history.step / per_epoch,
    )


class Meter:
    """Counts steps and reports means, reading the device only every ``every`` steps."""

    def __init__(self, history: History, num_steps: int, per_epoch: int, every: int, report: Log) -> None:
        self.history, self.num_steps, self.per_epoch, self.every, self.report = (
            history,
            num_steps,
            per_epoch,
            every,
            report,
        )
        self.pending: list[dict[str, Tensor]] = []
        self.rate = 0.0
        self.restart()

    def restart(self) -> None:
        self.clock = time.perf_counter()

    def add(self, values: dict[str, Tensor], update: list[Batch], rate: float) -> None:
        self.history.step += 1
        self.history.position += 1
        self.history.examples += sum(batch.size for batch in update)
        self.rate = rate
        self.pending.append(values)
        if len(self.pending) == self.every:
            self.flush()

    def flush(self) -> None:
        """Report the mean of the steps since the last call.

        Raises:
            Diverged: one of their losses is not finite.
        """
        if not self.pending:
            return
        names = list(self.pending[0])
        table = torch.stack([torch.stack([row[name].float() for name in names]) for row in self.pending]).cpu()
        bad = torch.nonzero(~table.isfinite())
        if len(bad):
            row, column = bad[0].tolist()
            step = self.history.step - len(self.pending) + row + 1
            raise Diverged(f"step {step}: {names[column]} is {table[row, column].item()}")
        now = time.perf_counter()
        self.history.seconds += now - self.clock
        self.clock = now
        means = dict(zip(names, table.mean(0).tolist(), strict=True))
        means["loss"] = sum(value for name, value in means.items() if name.startswith("loss/"))
        progress = {
            "lr": self.rate,
            "examples_per_second": self.history.examples_per_second,
            "share_done": self.history.step / self.num_steps,
        }
        self.report(means | progress, self.history.step, self.history.step / self.per_epoch)
        self.pending.clear()


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that training stops between two steps; a second one stops at once."""
    received: list[int] = []

    def receive(number: int, _frame: Any) -> None:
        if received:
            signal.default_int_handler(number, None)
        received.append(number)

    try:
        before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: its owner handles signals
        before = {}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _on_cpu(value: Any) -> Any:
    """Random states live on the CPU, wherever the rest of a checkpoint is loaded to."""
    if isinstance(value, list):
        return [_on_cpu(item) for item in value]
    return value.cpu() if isinstance(value, Tensor) else value
