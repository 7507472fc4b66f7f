"""Output for people: the progress of stages, as bars on a terminal and plain lines elsewhere, durations and tables."""

import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 15.0
BAR = 8
"""Columns that a bar has at least. The losses, which come last, are shortened first."""


class Stages:
    """Progress display of the stages in training: losses, examples per second and time left.

    On a terminal, each stage has a bar as wide as the window. Elsewhere, a plain line is logged every 15 seconds.
    Scores after an epoch are always logged as separate lines.

    Args:
        work: the work of each stage to train, in build order, in any unit that all stages share. The time left over
            all stages is estimated from the work and the pace so far.
    """

    def __init__(self, work: Mapping[str, float] | None = None) -> None:
        self.work = dict(work or {})
        self.rich = _bars() if sys.stderr.isatty() else None
        self.streams: list[logging.StreamHandler[Any]] = []

    def __enter__(self) -> "Stages":
        if self.rich:
            terminal = sys.stderr
            self.rich.start()  # sys.stderr now prints above the bars, and the log must do so too
            for handler in logging.root.handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is terminal:
                    handler.setStream(sys.stderr)
                    self.streams.append(handler)
        return self

    def __exit__(self, *_: Any) -> None:
        if self.rich:
            self.rich.stop()
            for handler in self.streams:
                handler.setStream(sys.stderr)
            self.streams.clear()

    def bar(self, stage: str) -> "Bar":
        """Return the progress bar of a stage that begins; on a terminal the bar is visible at once."""
        return Bar(self, stage)

    def seconds_after(self, stage: str, seconds: float) -> float:
        """Return the estimated seconds of all stages after ``stage``, which itself takes ``seconds``."""
        names = list(self.work)
        later_work = sum(self.work[name] for name in names[names.index(stage) + 1 :]) if stage in names else 0.0
        return seconds * later_work / self.work[stage] if later_work and self.work[stage] else 0.0


class Bar:
    """Progress bar of one stage (see ``Stages``)."""

    def __init__(self, stages: Stages, stage: str) -> None:
        self.stages, self.stage = stages, stage
        self.last_line = 0.0
        self.first_share: float | None = None  # at this process's first report: a resumed stage begins midway
        self.last_report = time.monotonic()
        self.training = self.evaluating = 0.0
        self.evaluations = 0
        rich = stages.rich
        self.task = rich.add_task(stage, total=None, terms="first steps", speed="", time="") if rich else None

    def show(self, values: Mapping[str, Any], step: int, epoch: float) -> None:
        seconds = time.monotonic() - self.last_report
        self.last_report += seconds
        if "share_done" not in values:
            self.evaluating += seconds
            self.evaluations += 1
            scores = "  ".join(
                f"{key.removeprefix('validation/')} {_score(key, value)}" for key, value in values.items()
            )
            log.info("%s  epoch %g  %s", self.stage, round(epoch, 2), scores)
            return
        losses = [f"{key.removeprefix('loss/')} {value:.4f}" for key, value in _losses(values).items()]
        columns = {
            "time": self._time_left(values["share_done"], epoch, seconds),
            "speed": f"{values['examples_per_second']:.0f} ex/s",
            "terms": "  ".join(losses),
        }
        if self.stages.rich and self.task is not None:
            width = self.stages.rich.console.width - _width_without_losses(self.stage, columns)
            columns["terms"] = _fitting(losses, width)
            self.stages.rich.update(self.task, total=1, completed=values["share_done"], **columns)
        elif self.last_report - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = self.last_report
            parts = f"{100 * values['share_done']:3.0f} %  epoch {epoch:.2f}", *columns.values()
            log.info("%s  %s", self.stage, "  ".join(filter(None, parts)))

    def _time_left(self, share: float, epoch: float, seconds: float) -> str:
        """Return the time left of the stage and of all stages.

        It follows from the pace of training and, separately, of the evaluation that ends each epoch.
        """
        if self.first_share is None:
            self.first_share = share
            return ""
        self.training += seconds
        if share <= self.first_share:
            return ""
        training = self.training / (share - self.first_share)
        evaluation = self.evaluating / max(self.evaluations, 1)
        epochs = epoch / share
        remaining = training * (1 - share) + evaluation * (epochs - int(epoch))
        later = self.stages.seconds_after(self.stage, training + evaluation * epochs)
        return f"{duration(remaining)} left" + (f" (all: {duration(remaining + later)})" if later else "")


def _losses(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the total loss, and the weighted loss of each term, which add up to it."""
    terms = {key: value for key, value in values.items() if key.startswith("loss/")}
    return {key: values[key] for key in ("loss",) if key in values} | terms


def _width_without_losses(stage: str, columns: Mapping[str, str]) -> int:
    """Return the columns of a bar without its losses, with blanks between them."""
    return len(stage) + 1 + BAR + 1 + len("100%") + 1 + len(columns["time"]) + 1 + len(columns["speed"]) + 1


def _fitting(parts: Sequence[str], width: int) -> str:
    """Return the first ``parts`` that fit into ``width`` columns, with an ellipsis in place of the others."""
    for count in range(len(parts), -1, -1):
        text = "  ".join(parts[:count]) + " …" * (0 < count < len(parts))
        if len(text) <= width:
            return text
    return ""


def duration(seconds: float) -> str:
    """Return a duration as text, in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def rounded(seconds: float) -> float:
    """Return the seconds that ``duration`` shows, so that a total of several parts can be that of their texts."""
    if seconds < 120:
        return round(seconds)
    return 60 * round(seconds / 60) if seconds < 7200 else 360 * round(seconds / 360)


def _bars() -> Any:
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    columns = (
        progress.TextColumn("[bold]{task.description}"),
        progress.BarColumn(bar_width=None, table_column=Column(min_width=BAR, ratio=1)),
        progress.TaskProgressColumn(),
        progress.TextColumn("[yellow]{task.fields[time]}", table_column=Column(no_wrap=True)),
        progress.TextColumn("[green]{task.fields[speed]}", table_column=Column(no_wrap=True)),
        progress.TextColumn("[cyan]{task.fields[terms]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    return progress.Progress(*columns, console=Console(stderr=True), expand=True)


class Undefined(float):
    """The value of a metric that is not defined for the outputs of a model, such as a correlation of equal scores.

    It counts and is stored as its number, 0 by convention, but is printed as undefined.
    """

    def __new__(cls, value: float, reason: str) -> "Undefined":
        number = super().__new__(cls, value)
        number.reason = reason
        return number

    reason: str

    def __reduce__(self) -> tuple[Any, ...]:
        return Undefined, (float(self), self.reason)


def _score(name: str, value: float) -> str:
    if isinstance(value, Undefined):
        return "undefined"
    return f"{value:.2f}" if name.endswith("perplexity") else f"{100 * value:.2f}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """Return a table in GitHub's Markdown; all columns after the first ``text_columns`` are aligned to the right."""
    alignment = ["---"] * text_columns + ["---:"] * (len(header) - text_columns)
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, alignment, *rows))
