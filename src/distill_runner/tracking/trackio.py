"""The Trackio tracker: Hugging Face's dashboard with W&B's interface, on this machine or in a Space."""

import logging
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from distill_runner.common.process import suppressed_output
from distill_runner.tracking.tracker import (
    Tracker,
    TrackerConfig,
    Values,
    columns,
    flatten,
    headline,
    missing_package,
    point,
)

log = logging.getLogger(__name__)

KEY_DIGITS = 8
"""Characters of a run's key in its name."""


class TrackioTracker(Tracker):
    """Tracker that writes one run of a Trackio project, and resumes it by its name.

    The name is ``tracker.title``, or that of the run's folder, with the beginning of its key: runs of one title stay
    apart. ``TRACKIO_DIR`` and ``TRACKIO_SPACE_ID`` say where
    the project is, as in Trackio itself.
    """

    def __init__(self, config: TrackerConfig, folder: Path, run_id: str, settings: Values, job_type: str) -> None:
        try:
            import trackio
        except ImportError as error:
            raise missing_package("trackio", error) from error
        self.trackio = trackio
        names = {"key": run_id, "job_type": job_type, "tags": "; ".join(config.tags)}
        with suppressed_output():  # the console belongs to the progress bar
            self.run = trackio.init(
                project=config.project,
                name=f"{config.title or folder.name} {run_id[:KEY_DIGITS]}",
                group=config.group,
                config=flatten(settings) | names,
                resume="allow",
                embed=False,
            )
        log.info("Trackio: trackio show --project %s", shlex.quote(config.project))

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        numbers = point(values, step, epoch)
        del numbers["step"]
        self.run.log(numbers, step=step)

    def summary(self, values: Values) -> None:
        numbers = {key: value for key, value in headline(values).items() if isinstance(value, int | float)}
        self.run.log({f"summary/{key}": value for key, value in numbers.items() if math.isfinite(value)})

    def table(self, name: str, rows: Sequence[Values]) -> None:
        import pandas as pd

        frame = pd.DataFrame([{key: str(row.get(key, "")) for key in columns(rows)} for row in rows])
        self.run.log({name: self.trackio.Table(dataframe=frame)})

    def text(self, name: str, text: str) -> None:
        self.run.log({name: self.trackio.Markdown(f"```\n{text}\n```")})

    def picture(self, name: str, file: Path) -> None:
        self.run.log({name: self.trackio.Image(str(file), caption=file.stem)})

    def finish(self, exit_code: int) -> None:
        with suppressed_output():
            self.run.finish()
