"""Opening the trackers of a run, and keeping their faults from it."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from distill_runner.common.errors import Paused
from distill_runner.tracking.metrics_file import MetricsFile
from distill_runner.tracking.tensorboard import TensorBoardTracker
from distill_runner.tracking.tracker import Tracker, TrackerConfig, Values, first_line, flat
from distill_runner.tracking.wandb import WandbTracker

log = logging.getLogger(__name__)


class FaultTolerant:
    """Passes everything on to several trackers; a fault of one is logged once and reaches nobody else."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = trackers
        self.reported: set[Tracker] = set()

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        plain = {key: value.item() if hasattr(value, "item") else value for key, value in values.items()}
        self._each(lambda tracker: tracker.log(plain, step=step, epoch=epoch))

    def summary(self, values: Values) -> None:
        self._each(lambda tracker: tracker.summary(values))

    def table(self, name: str, rows: Sequence[Values]) -> None:
        self._each(lambda tracker: tracker.table(name, rows))

    def text(self, name: str, text: str) -> None:
        self._each(lambda tracker: tracker.text(name, text))

    def picture(self, name: str, file: Path) -> None:
        self._each(lambda tracker: tracker.picture(name, file))

    def model(self, folder: Path) -> None:
        self._each(lambda tracker: tracker.model(folder))

    def finish(self, exit_code: int) -> None:
        self._each(lambda tracker: tracker.finish(exit_code))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in self.trackers:
            try:
                call(tracker)
            except Exception as error:
                if tracker not in self.reported:
                    self.reported.add(tracker)
                    name = type(tracker).__name__
                    log.warning("%s fails, the run goes on: %s", name, first_line(error))


OPTIONAL: dict[str, Callable[..., Tracker]] = {"wandb": WandbTracker, "tensorboard": TensorBoardTracker}


@contextmanager
def open_tracker(
    config: TrackerConfig, folder: Path, run_id: str, settings: Values, job_type: str
) -> Iterator[Tracker]:
    """The trackers of one run, closed whatever happens, with exit code 1 after an exception.

    Args:
        folder: of the run, exists; ``metrics.jsonl``, ``wandb/`` and ``tensorboard/`` are made in it.
        run_id: stable over restarts: W&B takes the run up again under this id.
        settings: the resolved configuration, shown by the trackers.
        job_type: for grouping in W&B, such as ``distill``.
    Raises:
        UserError: the tracker's package is missing, or W&B refuses the configuration even offline.
    """
    optional = _optional(config, folder, run_id, settings, job_type)
    with _closing([MetricsFile(folder), *optional]) as tracker:
        yield tracker


def track_sweep(
    config: TrackerConfig, folder: Path, name: str, results: Sequence[Values], table: str, pictures: Sequence[Path]
) -> None:
    """One run for a sweep as a whole, in the group of its points: all of them as a table, and the sweep's pictures.

    A tracker observes: what goes wrong here, even a package that is missing, is logged and ends no sweep.

    Args:
        folder: of the sweep, exists; ``wandb/`` and ``tensorboard/`` are made in it.
        name: of the sweep, and of the group of its points. The same name takes the same run up again.
        results: of all points, finished or not, as in ``result.json``.
        table: their table as a terminal shows it.
        pictures: PNG files, shown under ``pictures/<stem>``.
    """
    run_id = "sweep-" + re.sub(r"[^\w.-]", "-", name)
    try:
        kinds = [result.get(key) for key in ("task", "method", "teacher") for result in results]
        config = config.model_copy(update={"group": name, "title": config.title or name}).tagged(*kinds)
        with _closing(_optional(config, folder, run_id, {"sweep": name}, job_type="sweep")) as tracker:
            counts = Counter(result["status"] for result in results)
            tracker.summary({"count": len(results)} | {f"count/{status}": count for status, count in counts.items()})
            tracker.table("points", [flat(result) for result in results])
            tracker.text("table", table)
            for file in pictures:
                tracker.picture(f"pictures/{file.stem}", file)
    except Exception as error:
        log.warning("the sweep is not tracked: %s", error)


def _optional(config: TrackerConfig, folder: Path, run_id: str, settings: Values, job_type: str) -> list[Tracker]:
    """The tracker chosen besides ``metrics.jsonl``, if any."""
    chosen = OPTIONAL.get(config.name)
    return [chosen(config, folder, run_id, settings, job_type)] if chosen else []


@contextmanager
def _closing(trackers: Sequence[Tracker]) -> Iterator[Tracker]:
    tracker = FaultTolerant(trackers)
    exit_code = 1
    try:
        yield tracker
        exit_code = 0
    except Paused:
        exit_code = 0
        raise
    finally:
        tracker.finish(exit_code)
