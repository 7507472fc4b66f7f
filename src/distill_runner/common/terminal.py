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


def quiet() -> None:
    """Libraries say nothing below an error; this program speaks for them."""
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _score(name: str, value: float) -> str:
    return f"{value:.2f}" if name.endswith("perplexity") else f"{100 * value:.2f}"
