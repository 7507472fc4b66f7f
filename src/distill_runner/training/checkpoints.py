"""What training leaves behind so that it can go on: its history, its whole state, and a stop between two steps."""

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
    """What training has come to.

    ``epoch`` and ``step`` count what is done, ``position`` the steps done in the current epoch; ``epochs`` has the
    metrics after each epoch, and ``best`` is the number (from 1) of the one whose model was kept. ``decay`` is what
    weight decay has left of an embedding's rows that no step has touched.
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
        """Of training alone, evaluation and checkpoints left out."""
        return self.examples / self.seconds if self.seconds else 0.0


def save(file: Path, history: History, parts: dict[str, Any]) -> None:
    """Replace ``file`` in one step by the states of ``parts``, the history and the random numbers."""
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save(state | {"history": asdict(history), "random": random_state()}, file.with_suffix(".tmp"))
    file.with_suffix(".tmp").replace(file)


def resume(file: Path, parts: dict[str, Any], device: torch.device) -> History:
    """Put ``parts`` and the random numbers back to where ``save`` found them; a new history if there is no file."""
    if not file.exists():
        return History()
    state = torch.load(file, map_location=device, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    restore_random_state({name: _on_cpu(value) for name, value in state["random"].items()})
    return History(**state["history"])


def _on_cpu(value: Any) -> Any:
    """Random states live on the CPU, wherever the rest of a checkpoint is loaded to."""
    if isinstance(value, list):
        return [_on_cpu(item) for item in value]
    return value.cpu() if isinstance(value, Tensor) else value


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that training stops between two steps; a second one stops at once."""
    received: list[int] = []

    def receive(number: int, _frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever owns it handles signals
        before = {}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
