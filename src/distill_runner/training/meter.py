"""Means of losses over several steps. They are read from the device rarely, since a read makes the host wait."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from distill_runner.common.errors import TrainingError
from distill_runner.training.checkpoints import History

Log = Callable[[Mapping[str, Any], int, float], None]
"""Callback that receives values by name, the step, and the epoch as a fraction."""


class Diverged(TrainingError):
    """A loss or another logged value is not finite; the message names the step and the value."""

    remedy = "Take a lower optim.lr, or a longer optim.warmup; in low precision also runtime.precision=fp32."


class Meter:
    """Collects the losses of steps and reports their means.

    Args:
        num_steps, per_epoch: number of steps in the whole training and in one epoch.
        every: number of steps between two reports.
    """

    def __init__(self, history: History, num_steps: int, per_epoch: int, every: int, report: Log) -> None:
        self.history, self.num_steps, self.per_epoch = history, num_steps, per_epoch
        self.every, self.report = every, report
        self.pending: list[dict[str, Tensor]] = []
        self.restart()

    def restart(self) -> None:
        """Restart the clock, so that the time since the last report does not count as training."""
        self.clock = time.perf_counter()

    def add(self, values: dict[str, Tensor], rate: float) -> None:
        self.pending.append(values)
        self.rate = rate
        if len(self.pending) == self.every:
            self.flush()

    def flush(self) -> None:
        """Report the means of the steps since the last report.

        Raises:
            Diverged: a value of one of these steps is not finite.
        """
        if not self.pending:
            return
        names = list(self.pending[0])
        rows = [torch.stack([row[name].double() for name in names]) for row in self.pending]
        table = torch.stack(rows).cpu()
        if len(bad := torch.nonzero(~table.isfinite())):
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
