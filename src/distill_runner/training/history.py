"""Progress of a training run: its history, its checkpoints, and the means of its losses."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill_runner.common.errors import TrainingError, override
from distill_runner.common.files import atomic_replacement
from distill_runner.common.seeds import random_state, restore_random_state
from distill_runner.training.processes import SINGLE_PROCESS, ProcessGroup

Log = Callable[[Mapping[str, Any], int, float], None]
"""Callback that receives values by name, the step, and the epoch as a fraction."""


@dataclass
class History:
    """Progress and metrics of a training run.

    ``epoch`` and ``step`` count finished epochs and steps; ``position`` counts the finished steps of the current epoch.
    ``epochs`` holds the metrics after each epoch. ``best`` is the number (from 1) of the epoch whose model was kept.
    ``decay`` is the factor that weight decay has applied so far to embedding rows that no step has touched.
    """

    epoch: int = 0
    position: int = 0
    step: int = 0
    best: int = 0
    best_score: float = -math.inf
    epochs: list[dict[str, float]] = field(default_factory=list)
    examples: int = 0
    seconds: float = 0.0
    decay: float = 1.0

    @property
    def examples_per_second(self) -> float:
        """Training speed, without the time for evaluation and checkpoints."""
        return self.examples / self.seconds if self.seconds else 0.0


def save_checkpoint(file: Path, history: History, parts: dict[str, Any]) -> None:
    """Replace ``file`` atomically by the states of ``parts``, the history and the state of the random generators."""
    state = {name: part.state_dict() for name, part in parts.items()}
    with atomic_replacement(file, exclusive=True) as partial:
        torch.save(state | {"history": asdict(history), "random": random_state()}, partial)


def load_checkpoint(file: Path, parts: dict[str, Any], group: ProcessGroup = SINGLE_PROCESS) -> History:
    """Restore ``parts`` and the random generators from ``file``; return its history, or a new one without a file.

    Several processes take the state of the main one from the first step on: they might see an old file, or draw other
    weights with another version of torch.
    """
    if group.is_main and group.size > 1 and not file.exists():
        save_checkpoint(file, History(), parts)
    content = group.broadcast_from_main(lambda: file.read_bytes() if file.exists() else b"")
    if not content:
        return History()
    state = torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    restore_random_state(state["random"])
    return History(**state["history"])


class TrainingDiverged(TrainingError):
    """A loss or another logged value is not finite; the message names the step and the value."""

    remedy = "Take a lower optim.lr or a longer optim.warmup; in 16 bits also " + override("runtime.precision", "fp32")


class Meter:
    """Collects the losses of steps and reports their means.

    Losses are read from the device rarely, since a read makes the host wait.

    Args:
        num_steps, per_epoch: number of steps in the whole training run and in one epoch.
        log_every: number of steps between two reports.
    """

    def __init__(self, history: History, num_steps: int, per_epoch: int, log_every: int, log_metrics: Log) -> None:
        self.history, self.num_steps, self.per_epoch = history, num_steps, per_epoch
        self.log_every, self.log_metrics = log_every, log_metrics
        self.pending: list[dict[str, Tensor]] = []
        self.restart()

    def restart(self) -> None:
        """Restart the clock, so that the time since the last report does not count as training."""
        self.clock = time.perf_counter()

    def add(self, values: dict[str, Tensor], rate: float) -> None:
        self.pending.append(values)
        self.rate = rate
        if len(self.pending) == self.log_every:
            self.flush()

    def flush(self) -> None:
        """Report the means of the steps since the last report.

        Raises:
            TrainingDiverged: a value of one of these steps is not finite.
        """
        if not self.pending:
            return
        names = list(self.pending[0])
        values = torch.stack([row[name] for row in self.pending for name in names])  # few kernels for all updates
        table = values.double().view(-1, len(names)).cpu()
        if len(positions := torch.nonzero(~table.isfinite())):
            row, column = positions[0].tolist()
            step = self.history.step - len(self.pending) + row + 1
            raise TrainingDiverged(f"step {step}: {names[column]} is {table[row, column].item()}")
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
        self.log_metrics(means | progress, self.history.step, self.history.step / self.per_epoch)
        self.pending.clear()
