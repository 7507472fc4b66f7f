"""What a run reports while it trains: ``metrics.jsonl`` always, Weights & Biases or TensorBoard by choice.

A tracker is an observer. Whatever happens to it during training (no network, a full disk) is logged once, and
the training goes on; only a tracker that cannot be opened at all is an error, before any work is done.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, Literal, Protocol

from distill_runner.errors import UserError
from distill_runner.schema import Schema

log = logging.getLogger(__name__)

Values = Mapping[str, Any]
"""Name -> number, string or None; ``open_tracker``'s also takes scalar arrays and tensors."""

WANDB_INIT_SECONDS = 8.0
"""Time that W&B's server has to answer before the run goes offline: W&B waits 90 s, and then the job dies.

With import, clean-up and offline start the fallback took 3 to 15 s, measured with a server that does not
exist, refuses, never answers, fails, or rejects the key.
"""
WANDB_FINISH_SECONDS = 60.0
"""Time for the last upload. W&B waits for ever if the network is lost; what is left stays on disk."""


class TrackerConfig(Schema):
    """``conf/tracker``. All but ``name`` concern W&B only.

    ``mode: None`` leaves the choice to WANDB_MODE, and failing that to whether there is a key and a network.
    ``title`` is the name displayed; None shows the run's id.
    """

    name: Literal["none", "wandb", "tensorboard"] = "none"
    project: str = "distill-run"
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    title: str | None = None
    mode: Literal["online", "offline"] | None = None


class Tracker(Protocol):
    """Where the numbers of one run go."""

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        """One point of every curve in ``values``; ``step`` counts optimiser steps and may start again."""

    def summary(self, values: Values) -> None:
        """What holds for the whole run: scores, sizes, seconds."""

    def table(self, name: str, rows: Sequence[Values]) -> None:
        """Rows of one table; columns are the union of their keys, missing cells are empty."""

    def finish(self, exit_code: int) -> None:
        """Write what is left and close. ``exit_code`` is 0, or 1 after an exception."""


class MetricsFile:
    """``metrics.jsonl``: one JSON object a line, appended; non-finite numbers become null.

    Every line reaches the file at once, and half a line never stays, be it cut short by a full disk or left
    behind by a killed process.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "metrics.jsonl"
        self.file = path.open("ab", buffering=0)
        whole = path.read_bytes().rpartition(b"\n")[0]
        self.file.truncate(len(whole) + 1 if whole else 0)

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        line = _point(values, step, epoch)
        line |= {key: None for key, value in line.items() if isinstance(value, float) and not isfinite(value)}
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        written = self.file.write(data)
        if written != len(data):
            self.file.truncate(self.file.tell() - (written or 0))
            raise OSError(f"{self.file.name}: the disk is full")

    def summary(self, values: Values) -> None:
        """Nothing: ``result.json`` holds it."""

    def table(self, name: str, rows: Sequence[Values]) -> None:
        """Nothing: tables are made from the results."""

    def finish(self, exit_code: int) -> None:
        self.file.close()


class WandbTracker:
    """One W&B run, taken up again under the same id; offline by itself without a key or a network."""

    def __init__(self, config: TrackerConfig, folder: Path, run_id: str, settings: Values, job_type: str) -> None:
        try:
            from wandb import Settings, Table, init, setup, teardown
        except ImportError as error:
            raise _missing("wandb", error) from error
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # W&B's own telemetry complains offline

        def start(mode: Literal["online", "offline"] | None) -> Any:
            setup(Settings(silent=True))  # also what keeps it from asking for a key on a terminal
            return init(
                id=run_id,
                resume="allow",
                dir=str(folder),
                config=dict(settings),
                name=config.title or run_id,
                job_type=job_type,
                mode=mode,
                project=config.project,
                entity=config.entity,
                group=config.group,
                tags=config.tags,
                settings=Settings(console="off", init_timeout=WANDB_INIT_SECONDS, finish_timeout=WANDB_FINISH_SECONDS),
            )

        try:
            self.run = start(config.mode)
        except Exception as error:
            log.warning("W&B does not start, tracking offline: %s", _first_line(error))
            try:
                teardown()  # its service holds the id of the failed start
                self.run = start("offline")
            except Exception as offline_error:
                raise UserError("tracker", config.name, _first_line(offline_error)) from offline_error
        # Our own step as x axis: W&B drops points whose built-in step goes back, as in a run taken up again.
        self.run.define_metric("*", step_metric="step")
        self.make_table = Table
        log.info("W&B: %s", self.run.url or f"wandb sync {Path(self.run.dir).parent}")

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        self.run.log(_point(values, step, epoch))

    def summary(self, values: Values) -> None:
        self.run.summary.update(dict(values))

    def table(self, name: str, rows: Sequence[Values]) -> None:
        columns = _columns(rows)
        data = [[row.get(column) for column in columns] for row in rows]
        self.run.log({name: self.make_table(columns=columns, data=data, allow_mixed_types=True)})

    def finish(self, exit_code: int) -> None:
        self.run.finish(exit_code=exit_code)


class TensorBoardTracker:
    """Event files in ``<folder>/tensorboard``; texts hold the configuration, the summary and the tables."""

    def __init__(self, config: TrackerConfig, folder: Path, run_id: str, settings: Values, job_type: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard", error) from error
        self.writer = SummaryWriter(str(folder / "tensorboard"))
        code = json.dumps({"id": run_id, "job_type": job_type} | dict(settings), indent=1, default=str)
        self.writer.add_text("config", f"```json\n{code}\n```")

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        for key, value in _point(values, step, epoch).items():
            if key != "step" and isinstance(value, int | float):
                self.writer.add_scalar(key, value, global_step=step)

    def summary(self, values: Values) -> None:
        self.table("summary", [{"name": key, "value": value} for key, value in values.items()])

    def table(self, name: str, rows: Sequence[Values]) -> None:
        columns = _columns(rows)
        lines = [columns, ["---"] * len(columns)]
        lines += [[str(row.get(column, "")) for column in columns] for row in rows]
        self.writer.add_text(name, "\n".join(f"| {' | '.join(cells)} |" for cells in lines))

    def finish(self, exit_code: int) -> None:
        self.writer.close()


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
                    log.warning("%s fails, the training goes on: %s", name, _first_line(error))


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
    chosen = OPTIONAL.get(config.name)
    optional = [chosen(config, folder, run_id, settings, job_type)] if chosen else []
    tracker = FaultTolerant([MetricsFile(folder), *optional])
    exit_code = 1
    try:
        yield tracker
        exit_code = 0
    finally:
        tracker.finish(exit_code)


def _point(values: Values, step: int, epoch: float | None) -> dict[str, Any]:
    return {"step": step} | ({} if epoch is None else {"epoch": epoch}) | dict(values)


def _columns(rows: Sequence[Values]) -> list[Any]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _missing(package: str, error: ImportError) -> UserError:
    remedy = f"pip install 'distill-run[{package}]'"
    return UserError("tracker", package, f"the package cannot be imported ({error})", remedy)
