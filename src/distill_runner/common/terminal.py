"""Progress display while a stage is built: bars on a terminal, plain lines elsewhere. Libraries are silenced."""

import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 15.0


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
            before = sys.stderr
            self.rich.start()  # sys.stderr now prints above the bars, and the log must do so too
            for handler in logging.root.handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is before:
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

    def left_behind(self, stage: str, seconds: float) -> float:
        """Return the estimated seconds of all stages after ``stage``, which itself takes ``seconds``."""
        names = list(self.work)
        behind = sum(self.work[name] for name in names[names.index(stage) + 1 :]) if stage in names else 0.0
        return seconds * behind / self.work[stage] if behind and self.work[stage] else 0.0


class Bar:
    """Progress bar of one stage (see ``Stages``)."""

    def __init__(self, stages: Stages, stage: str) -> None:
        self.stages, self.stage = stages, stage
        self.shown = 0.0
        self.first_share: float | None = None  # at this process's first report: a resumed stage begins midway
        self.last = time.monotonic()
        self.training = self.evaluating = 0.0
        self.evaluations = 0
        rich = stages.rich
        self.task = rich.add_task(stage, total=None, terms="first steps", speed="", left="") if rich else None

    def show(self, values: Mapping[str, Any], step: int, epoch: float) -> None:
        seconds = time.monotonic() - self.last
        self.last += seconds
        if "share_done" not in values:
            self.evaluating += seconds
            self.evaluations += 1
            scores = "  ".join(
                f"{key.removeprefix('validation/')} {_score(key, value)}" for key, value in values.items()
            )
            log.info("%s  epoch %g  %s", self.stage, round(epoch, 2), scores)
            return
        shown = {
            "terms": "  ".join(f"{key.removeprefix('loss/')} {value:.4f}" for key, value in _losses(values).items()),
            "speed": f"{values['examples_per_second']:.0f} ex/s",
            "left": self._left(values["share_done"], epoch, seconds),
        }
        if self.stages.rich and self.task is not None:
            self.stages.rich.update(self.task, total=1, completed=values["share_done"], **shown)
        elif self.last - self.shown > SECONDS_BETWEEN_LINES:
            self.shown = self.last
            parts = f"{100 * values['share_done']:3.0f} %  epoch {epoch:.2f}", *shown.values()
            log.info("%s  %s", self.stage, "  ".join(filter(None, parts)))

    def _left(self, share: float, epoch: float, seconds: float) -> str:
        """Return the time left, from the pace of training and, separately, of the evaluation that ends each epoch."""
        if self.first_share is None:
            self.first_share = share
            return ""
        self.training += seconds
        if share <= self.first_share:
            return ""
        training = self.training / (share - self.first_share)
        evaluation = self.evaluating / max(self.evaluations, 1)
        epochs = epoch / share
        left = training * (1 - share) + evaluation * (epochs - int(epoch))
        behind = self.stages.left_behind(self.stage, training + evaluation * epochs)
        return f"{duration(left)} left" + (f", {duration(left + behind)} left in total" if behind else "")


def _losses(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the total loss and the loss of each term.

    A term that reports a divergence is shown by its divergence instead, which is 0 when nothing is left to learn.
    """
    losses = {key: value for key, value in values.items() if key == "loss" or key.startswith("loss/")}
    told = {key.removesuffix("/divergence"): value for key, value in values.items() if key.endswith("/divergence")}
    return {
        f"{key.removeprefix('loss/')} divergence" if key.removeprefix("loss/") in told else key: told.get(
            key.removeprefix("loss/"), value
        )
        for key, value in losses.items()
    }


def duration(seconds: float) -> str:
    """Return a duration as text, in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _bars() -> Any:
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    columns = (
        progress.TextColumn("[bold]{task.description}"),
        progress.BarColumn(bar_width=None, table_column=Column(min_width=8, ratio=1)),
        progress.TaskProgressColumn(),
        progress.TextColumn("[cyan]{task.fields[terms]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        progress.TextColumn("[green]{task.fields[speed]}", table_column=Column(no_wrap=True)),
        progress.TextColumn("[yellow]{task.fields[left]}", table_column=Column(no_wrap=True)),
    )
    return progress.Progress(*columns, console=Console(stderr=True), expand=True)


class Fetching:
    """Progress display of a download from a repository of the hub: a bar on a terminal, else a line every 15 seconds.

    ``kind`` is the class of progress bar that ``huggingface_hub`` reports to. Files in the cache are not shown.

    Args:
        total: the bytes to download, as far as they are known in advance.
    """

    def __init__(self, name: str, total: int = 0) -> None:
        from tqdm import tqdm

        self.done = self.kept = 0
        self.total, self.started, self.said = total, time.monotonic(), 0.0
        self.name, self.rich = name, _rich_progress() if sys.stderr.isatty() else None
        whole = self

        class Reporter(tqdm):
            """Bar that draws nothing and passes the bytes on to ``Fetching``."""

            def __init__(self, *args: Any, **options: Any) -> None:
                self.counts = options.get("unit") == "B" and options.get("desc") != "Downloading bytes"
                if self.counts and (kept := int(options.get("initial") or 0)):  # bytes from an earlier process
                    whole.kept += kept
                    log.info("downloading %s: resuming after %.1f MB", name, kept / 1e6)
                    whole.advance(kept, 0)
                super().__init__(*args, **{**options, "disable": True})

            def update(self, n: float | None = 1) -> None:
                if self.counts:
                    whole.advance(int(n or 0), int(self.total or 0))

        self.kind = Reporter

    def __enter__(self) -> "Fetching":
        if self.rich:
            self.rich.start()
        return self

    def advance(self, num_bytes: int, total: int) -> None:
        self.done, self.total = self.done + num_bytes, max(self.total, total)
        if self.rich:
            if not self.rich.tasks:
                self.rich.add_task(f"downloading {self.name}")
            self.rich.update(self.rich.tasks[0].id, completed=self.done, total=self.total)
        elif time.monotonic() - max(self.started, self.said) > SECONDS_BETWEEN_LINES:
            self.said = time.monotonic()
            log.info("%s", self)

    def __str__(self) -> str:
        seconds = time.monotonic() - self.started
        rate = f"{(self.done - self.kept) / 1e6 / seconds:.1f} MB/s" if seconds else ""
        return f"downloading {self.name}: {self.done / 1e6:.1f} of {self.total / 1e6:.1f} MB, {rate}"

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self.rich:
            self.rich.stop()
        if self.done and kind is None:
            seconds = time.monotonic() - self.started
            log.info("downloaded %s: %.1f MB in %.0f s", self.name, (self.done - self.kept) / 1e6, seconds)


def _rich_progress() -> Any:
    from rich import progress
    from rich.console import Console

    columns = ("{task.description}", progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
    return progress.Progress(*columns, progress.TimeRemainingColumn(), console=Console(stderr=True), transient=True)


def quiet() -> None:
    """Silence the progress bars of ``transformers`` and its messages below errors; this program reports instead."""
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # the conversion may open a pull request on the hub
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _score(name: str, value: float) -> str:
    return f"{value:.2f}" if name.endswith("perplexity") else f"{100 * value:.2f}"
