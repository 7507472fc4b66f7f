"""Means of losses over steps, read off the device only now and then: a read makes the host wait for a GPU."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from distill_runner.common.errors import TrainingError
from distill_runner.training.checkpoints import History

Log = Callable[[Mapping[str, Any], int, float], None]
"""Receives values, the step and the epoch as a fraction."""


class Diverged(TrainingError):
    """A loss is not finite any more; the message names the step and the term."""

    remedy = "Take a lower optim.lr, or a longer optim.warmup; in low precision also runtime.precision=fp32."


class Meter:
    """Collects the losses of steps and reports their means.

    Args:
        num_steps, per_epoch: of the whole training, and of an epoch.
        every: steps between two reports.
    """

    def __init__(self, history: History, num_steps: int, per_epoch: int, every: int, report: Log) -> None:
        self.history, self.num_steps, self.per_epoch = history, num_steps, per_epoch
        self.every, self.report = every, report
        self.pending: list[dict[str, Tensor]] = []
        self.restart()

    def restart(self) -> None:
        """Leave out the time since the last report."""
        self.clock = time.perf_counter()

    def add(self, values: dict[str, Tensor], rate: float) -> None:
        self.pending.append(values)
        self.rate = rate
        if len(self.pending) == self.every:
            self.flush()

    def flush(self) -> None:
        """Report the means of the steps since the last report.

        Raises:
            Diverged: one of them is not finite.
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
