"""Checkpoints of a training, its history, and its stop between two steps on Ctrl-C or SIGTERM."""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill_runner.common.seeds import random_state, restore_random_state


@dataclass
class History:
    """Progress and metrics of a training.

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


def save(file: Path, history: History, parts: dict[str, Any]) -> None:
    """Replace ``file`` atomically by the states of ``parts``, the history and the state of the random generators."""
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save(state | {"history": asdict(history), "random": random_state()}, file.with_suffix(".tmp"))
    file.with_suffix(".tmp").replace(file)


def resume(file: Path, parts: dict[str, Any], device: torch.device) -> History:
    """Restore ``parts`` and the random generators from ``file``; return its history, or a new one without a file."""
    if not file.exists():
        return History()
    state = torch.load(file, map_location=device, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    restore_random_state({name: _on_cpu(value) for name, value in state["random"].items()})
    return History(**state["history"])


def _on_cpu(value: Any) -> Any:
    """Move the tensors of a random state to the CPU, where torch expects them even for GPUs."""
    if isinstance(value, list):
        return [_on_cpu(item) for item in value]
    return value.cpu() if isinstance(value, Tensor) else value


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list, so that training stops between two steps; a second signal stops at once."""
    received: list[int] = []

    def receive(number: int, _frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # outside the main thread, handlers cannot be set; the program that owns it handles signals
        before = {}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
