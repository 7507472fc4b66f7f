"""What is shown while a stage is built: a bar on a terminal, plain lines otherwise, and nothing of libraries."""

import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 15.0


class Bar:
    """Loss terms, examples per second and time left of one stage.

    On a terminal they are one line that is written over; elsewhere a plain line every 15 seconds. Scores after an epoch
    are always lines of their own.
    """

    def __init__(self, stage: str) -> None:
        self.stage, self.started, self.shown = stage, time.monotonic(), 0.0
        self.terminal = sys.stderr.isatty()
        self.first_share: float | None = None

    def show(self, values: Mapping[str, Any], step: int, epoch: float) -> None:
        if "share_done" not in values:
            scores = "  ".join(
                f"{key.removeprefix('validation/')} {_score(key, value)}" for key, value in values.items()
            )
            self._clear()
            log.info("%s  epoch %g  %s", self.stage, round(epoch, 2), scores)
            return
        line = self._line(values, epoch)
        if self.terminal:
            self._clear()
            sys.stderr.write(line[:100])
            sys.stderr.flush()
        elif time.monotonic() - self.shown > SECONDS_BETWEEN_LINES:
            self.shown = time.monotonic()
            log.info("%s", line)

    def _line(self, values: Mapping[str, Any], epoch: float) -> str:
        share = values["share_done"]
        if self.first_share is None:
            self.first_share, self.started = share, time.monotonic()
        done, elapsed = share - self.first_share, time.monotonic() - self.started
        left = f"  {elapsed / done * (1 - share):.0f} s left" if done > 0 else ""
        terms = "  ".join(f"{key.removeprefix('loss/')} {value:.4f}" for key, value in values.items() if "loss" in key)
        filled = int(20 * share)
        bar = f"[{'#' * filled}{'.' * (20 - filled)}]" if self.terminal else f"{100 * share:3.0f} %"
        return f"{self.stage} {bar} epoch {epoch:.2f}  {terms}  {values['examples_per_second']:.0f} ex/s{left}"

    def _clear(self) -> None:
        if self.terminal:
            sys.stderr.write("\r\033[K")


class Fetching:
    """What is fetched of a repository of the hub: a bar on a terminal, a line every 15 seconds elsewhere.

    ``kind`` is the class of a bar that ``huggingface_hub`` is to report to; what is there already shows nothing.
    """

    def __init__(self, name: str) -> None:
        from tqdm import tqdm

        self.done = 0
        self.total, self.started, self.said = 0, time.monotonic(), 0.0
        self.name, self.rich = name, _rich_progress() if sys.stderr.isatty() else None
        whole = self

        class Reporter(tqdm):  # type: ignore[type-arg]
            """Shows nothing itself."""

            def __init__(self, *args: Any, **options: Any) -> None:
                self.counts = options.get("unit") == "B" and "Reconstructing" in options.get("desc", "")
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
        self.done, self.total = self.done + num_bytes, total
        if self.rich:
            if not self.rich.tasks:
                self.rich.add_task(f"fetching {self.name}")
            self.rich.update(self.rich.tasks[0].id, completed=self.done, total=total)
        elif time.monotonic() - max(self.started, self.said) > SECONDS_BETWEEN_LINES:
            self.said = time.monotonic()
            log.info("%s", self)

    def __str__(self) -> str:
        seconds = time.monotonic() - self.started
        rate = f"{self.done / 1e6 / seconds:.1f} MB/s" if seconds else ""
        return f"fetching {self.name}: {self.done / 1e6:.1f} of {self.total / 1e6:.1f} MB, {rate}"

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self.rich:
            self.rich.stop()
        if self.done and kind is None:
            log.info("fetched %s: %.1f MB in %.0f s", self.name, self.done / 1e6, time.monotonic() - self.started)


def _rich_progress() -> Any:
    from rich import progress
    from rich.console import Console

    columns = ("{task.description}", progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
    return progress.Progress(*columns, progress.TimeRemainingColumn(), console=Console(stderr=True), transient=True)


def quiet() -> None:
    """Libraries say nothing below an error; this program speaks for them."""
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # may open a pull request on the hub
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _score(name: str, value: float) -> str:
    return f"{value:.2f}" if name.endswith("perplexity") else f"{100 * value:.2f}"
