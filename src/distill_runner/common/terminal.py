"""Output for people: the progress of stages, as bars on a terminal and plain lines elsewhere, durations and tables."""

import logging
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TextIO

from distill_runner.common.files import without_secrets

log = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 15.0
WIDTH = 80


def terminal_width() -> int:
    """Return the columns of lines of text: those of the terminal, within 60 to 160."""
    return min(160, max(60, shutil.get_terminal_size((120, 24)).columns))


def output_width() -> int:
    """Return the columns of standard output: those of the terminal; of a file or a pipe, always ``WIDTH``."""
    return terminal_width() if sys.stdout.isatty() else WIDTH


def fitted(text: str, stream: TextIO) -> str:
    """Return lines for a stream: on a terminal as wide as it is, and else as they are."""
    return "\n".join(map(wrapped, text.splitlines())) if stream.isatty() else text


def show(text: str) -> None:
    """Print lines, on a terminal as wide as it is."""
    print(fitted(text, sys.stdout))


def wrapped(line: str) -> str:
    """Return a line as lines as wide as the terminal, of whole words; the further ones are indented by two more."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    wrapper = textwrap.TextWrapper(terminal_width(), subsequent_indent=indent, break_on_hyphens=False)
    wrapper.break_long_words = False
    return wrapper.fill(line)


class WrappingFormatter(logging.Formatter):
    """Format of the lines that a user reads on standard error; a pipe gets them as they are, and so does a file.

    Lines of a file begin with the time. Secrets are masked.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = without_secrets(super().format(record))
        return text if self.usesTime() else fitted(text, sys.stderr)


class Stages(AbstractContextManager["Stages"]):
    """Progress display of the stages in training, from its constructor on: losses, examples per second, time left.

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
        if self.rich:
            terminal = sys.stderr
            self.rich.start()  # sys.stderr now prints above the bars, and the log must do so too
            for handler in logging.root.handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is terminal:
                    handler.setStream(sys.stderr)
                    self.streams.append(handler)

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        if self.rich:
            if error is None:
                self.complete()
            for task in [task for task in self.rich.tasks if not task.finished]:
                self.rich.remove_task(task.id)  # a bar that stands still, with a time left, after a failure
            self.rich.stop()
            for handler in self.streams:
                handler.setStream(sys.stderr)
            self.streams.clear()

    def complete(self) -> None:
        """Show the bars of stages that have ended as full."""
        if rich := self.rich:
            for task in rich.tasks:
                rich.update(task.id, total=1, completed=1, time="")


class Bar:
    """Progress bar of one stage that begins (see ``Stages``); on a terminal it is visible at once."""

    def __init__(self, stages: Stages, stage: str) -> None:
        stages.complete()
        self.stages, self.stage = stages, stage
        self.last_line = 0.0
        self.first: tuple[float, float] | None = None  # time and share of the first report: a stage may resume midway
        rich = stages.rich
        self.task = rich.add_task(stage, total=None, terms="first steps", speed="", time="") if rich else None

    def show(self, values: Mapping[str, Any], step: int, epoch: float) -> None:
        if "share_done" not in values:
            scores = (f"{key.removeprefix('validation/')} {_score(key, value)}" for key, value in values.items())
            log.info("%s  epoch %g  %s", self.stage, round(epoch, 2), "  ".join(scores))
            return
        now, share = time.monotonic(), values["share_done"]
        # The total loss, and the weighted loss of each term, which add up to it.
        losses = sorted((key for key in values if re.match("loss(/|$)", key)), key=lambda key: key != "loss")
        columns = {
            "time": self._time_left(now, share),
            "speed": f"{values['examples_per_second']:.0f} ex/s",
            "terms": "  ".join(f"{key.removeprefix('loss/')} {values[key]:.4f}" for key in losses),
        }
        if self.stages.rich and self.task is not None:
            self.stages.rich.update(self.task, total=1, completed=share, **columns)
        elif now - self.last_line > _SECONDS_BETWEEN_LINES:
            self.last_line = now
            parts = f"{100 * share:3.0f} %  epoch {epoch:.2f}", *columns.values()
            log.info("%s  %s", self.stage, "  ".join(filter(None, parts)))

    def _time_left(self, now: float, share: float) -> str:
        """Return the time left of the stage and of all stages, from the pace so far."""
        self.first = self.first or (now, share)
        begin, first_share = self.first
        if share <= first_share:
            return ""
        stage_seconds, work = (now - begin) / (share - first_share), self.stages.work
        names = [*work]
        later = sum(work[name] for name in names[names.index(self.stage) + 1 :]) if work.get(self.stage) else 0.0
        remaining = stage_seconds * (1 - share)
        total = f" (all: {duration(remaining + stage_seconds * later / work[self.stage])})" if later else ""
        return f"{duration(remaining)} left{total}"


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

    def fixed(text: str) -> progress.TextColumn:
        return progress.TextColumn(text, table_column=Column(no_wrap=True))

    columns = (
        fixed("[bold]{task.description}"),
        progress.BarColumn(bar_width=None, table_column=Column(min_width=8, ratio=1)),
        progress.TaskProgressColumn(),
        fixed("[yellow]{task.fields[time]}"),
        fixed("[green]{task.fields[speed]}"),
        progress.TextColumn("[cyan]{task.fields[terms]}", table_column=Column(no_wrap=True, ratio=3)),
    )
    return progress.Progress(*columns, console=Console(stderr=True), expand=True)


@dataclass(frozen=True)
class AccountLine:
    """One line of the account of what a run reads: its data, its weights, and whatever else a part of it takes in.

    Attributes:
        topic: what was read: ``data``, ``lengths``, ``weights``.
        text: what was taken of it, left out, or not understood.
        warnings: what would surprise the user, a sentence each.
        details: the same in numbers, for ``result.json``.
    """

    topic: str
    text: str
    warnings: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.topic:8} {self.text}"


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
