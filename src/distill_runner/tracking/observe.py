"""Open the trackers of a run or a sweep, and keep their failures from ending it."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from distill_runner.common.errors import TrainingPaused, first_line
from distill_runner.common.plugins import entry_point, load_class
from distill_runner.common.sharing import shareable, without_paths
from distill_runner.tracking.mlflow import MlflowTracker
from distill_runner.tracking.tensorboard import TensorBoardTracker
from distill_runner.tracking.tracker import ENTRY_POINTS, MetricsFile, Tracker, TrackerConfig, Values, flatten
from distill_runner.tracking.trackio import TrackioTracker
from distill_runner.tracking.wandb import WandbTracker

log = logging.getLogger(__name__)


class FaultTolerant(Tracker):
    """Tracker that forwards every call to several trackers; the first failure of each is logged, none is raised.

    Texts lose the folders and secrets of this machine.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = trackers
        self.reported: set[Tracker] = set()

    @property
    def failed(self) -> bool:
        """Whether a tracker has missed a call."""
        return bool(self.reported)

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        plain = {key: value.item() if hasattr(value, "item") else value for key, value in values.items()}
        self._call_all(lambda tracker: tracker.log(plain, step=step, epoch=epoch))

    def summary(self, values: Values) -> None:
        shared = shareable(values)
        self._call_all(lambda tracker: tracker.summary(shared))

    def table(self, name: str, rows: Sequence[Values]) -> None:
        shared = shareable(rows)
        self._call_all(lambda tracker: tracker.table(name, shared))

    def text(self, name: str, text: str) -> None:
        shared = without_paths(text)
        self._call_all(lambda tracker: tracker.text(name, shared))

    def picture(self, name: str, file: Path) -> None:
        self._call_all(lambda tracker: tracker.picture(name, file))

    def model(self, folder: Path) -> None:
        self._call_all(lambda tracker: tracker.model(folder))

    def finish(self, exit_code: int) -> None:
        self._call_all(lambda tracker: tracker.finish(exit_code))

    def _call_all(self, call: Callable[[Tracker], None]) -> None:
        for tracker in self.trackers:
            try:
                call(tracker)
            except Exception as error:
                if tracker not in self.reported:
                    self.reported.add(tracker)
                    name = type(tracker).__name__
                    log.warning("%s failed, the run continues: %s", name, first_line(error))


OPTIONAL: dict[str, Callable[..., Tracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorBoardTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}


@contextmanager
def open_tracker(
    config: TrackerConfig, folder: Path, run_id: str, settings: Values, job_type: str, new_metrics: bool = True
) -> Iterator[FaultTolerant]:
    """Open the trackers of one run and close them at the end, with exit code 1 after an error but ``TrainingPaused``.

    Args:
        folder: folder of the run, which must exist; ``metrics.jsonl``, ``wandb/`` and ``tensorboard/`` are made in it.
        run_id: identifier that is the same after a restart, so that W&B resumes the run.
        settings: the resolved configuration, which the trackers show.
        job_type: type of the job for grouping in W&B, such as ``distill``.
        new_metrics: whether metrics are also written to ``metrics.jsonl``; not if they are read from it.
    Yields:
        One tracker that forwards every call to all trackers of the run.
    Raises:
        UserError: the tracker's package is missing, or W&B refuses the configuration even offline.
    """
    optional = _optional(config, folder, run_id, settings, job_type)
    with _finished_at_end([*([MetricsFile(folder)] if new_metrics else []), *optional]) as tracker:
        yield tracker


def track_sweep(
    config: TrackerConfig, folder: Path, name: str, results: Sequence[Values], table: str, pictures: Sequence[Path]
) -> None:
    """Track a whole sweep as one run with the table of its points and its pictures, in the group of the points.

    Every error, even a missing package, is logged and does not end the sweep.

    Args:
        folder: folder of the sweep, which must exist; ``wandb/`` and ``tensorboard/`` are made in it.
        name: name of the sweep and, unless ``config`` names another, of the group of its points. The same name
            resumes the same run.
        results: results of all points, finished or not, as in ``result.json``.
        table: the table of the results as the terminal shows it.
        pictures: PNG files, shown under ``pictures/<stem>``.
    """
    run_id = "sweep-" + re.sub(r"[^\w.-]", "-", name)
    try:
        tags = [result.get(key) for key in ("task", "method", "teacher") for result in results]
        config = config.model_copy(update={"group": config.group or name, "title": config.title or name})
        config = config.with_tags(*tags)
        with _finished_at_end(_optional(config, folder, run_id, {"sweep": name}, job_type="sweep")) as tracker:
            counts = Counter(result["status"] for result in results)
            tracker.summary({"count": len(results)} | {f"count/{status}": count for status, count in counts.items()})
            tracker.table("points", [flatten(result) for result in results])
            tracker.text("table", table)
            for file in pictures:
                tracker.picture(f"pictures/{file.stem}", file)
    except Exception as error:
        log.warning("the sweep is not tracked: %s", error)


def _optional(config: TrackerConfig, folder: Path, run_id: str, settings: Values, job_type: str) -> list[Tracker]:
    """Return the tracker that is configured besides ``metrics.jsonl``, in a list that is empty if there is none."""
    tracker_class = OPTIONAL.get(config.name)
    if tracker_class is None and (path := entry_point(ENTRY_POINTS, config.name)):
        tracker_class = load_class("tracker.name", path, Tracker)
    return [tracker_class(config, folder, run_id, shareable(settings), job_type)] if tracker_class else []


@contextmanager
def _finished_at_end(trackers: Sequence[Tracker]) -> Iterator[FaultTolerant]:
    tracker = FaultTolerant(trackers)
    exit_code = 1
    try:
        yield tracker
        exit_code = 0
    except TrainingPaused:
        exit_code = 0
        raise
    finally:
        tracker.finish(exit_code)
