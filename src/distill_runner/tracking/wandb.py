"""Weights & Biases."""

import logging
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal

from distill_runner.common.errors import UserError
from distill_runner.tracking.tracker import TrackerConfig, Values, columns, first_line, missing, point

log = logging.getLogger(__name__)

WANDB_INIT_SECONDS = 8.0
"""Time that W&B's server has to answer before the run goes offline: W&B waits 90 s, and then the job dies.

With import, clean-up and offline start the fallback took 3 to 15 s, measured with a server that does not
exist, refuses, never answers, fails, or rejects the key.
"""
WANDB_FINISH_SECONDS = 60.0
"""Time for the last upload. W&B waits for ever if the network is lost; what is left stays on disk."""


class WandbTracker:
    """One W&B run, taken up again under the same id; offline by itself without a key or a network."""

    def __init__(self, config: TrackerConfig, folder: Path, run_id: str, settings: Values, job_type: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing("wandb", error) from error
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # W&B's own telemetry complains offline

        limits = wandb.Settings(console="off", init_timeout=WANDB_INIT_SECONDS, finish_timeout=WANDB_FINISH_SECONDS)

        def start(mode: Literal["online", "offline"] | None) -> Any:
            wandb.setup(wandb.Settings(silent=True))  # also what keeps it from asking for a key on a terminal
            return wandb.init(
                id=run_id,
                resume="allow",
                dir=str(folder),
                config=dict(settings),
                name=config.title or folder.name,
                job_type=job_type,
                mode=mode,
                project=config.project,
                entity=config.entity,
                group=config.group,
                tags=config.tags,
                settings=limits,
            )

        try:
            self.run = start(config.mode)
        except Exception as error:
            log.warning("W&B does not start, tracking offline: %s", first_line(error))
            try:
                wandb.teardown()  # its service holds the id of the failed start
                self.run = start("offline")
            except Exception as offline_error:
                raise UserError("tracker", config.name, first_line(offline_error)) from offline_error
        # Our own step as x axis: W&B drops points whose built-in step goes back, as in a run taken up again.
        self.run.define_metric("*", step_metric="step")
        self.wandb = wandb
        log.info("W&B: %s", self.run.url or f"wandb sync {Path(self.run.dir).parent}")

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        self.run.log(point(values, step, epoch))

    def summary(self, values: Values) -> None:
        self.run.summary.update(dict(values))

    def table(self, name: str, rows: Sequence[Values]) -> None:
        names = columns(rows)
        data = [[row.get(column) for column in names] for row in rows]
        self.run.log({name: self.wandb.Table(columns=names, data=data, allow_mixed_types=True)})

    def text(self, name: str, text: str) -> None:
        self.run.log({name: self.wandb.Html(f"<pre>{escape(text)}</pre>")})

    def picture(self, name: str, file: Path) -> None:
        self.run.log({name: self.wandb.Image(str(file), caption=file.stem)})

    def finish(self, exit_code: int) -> None:
        self.run.finish(exit_code=exit_code)
