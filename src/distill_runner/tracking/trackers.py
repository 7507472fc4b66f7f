"""Trackers: interface and configuration, the file of every run, W&B and TensorBoard.

The faults of a tracker never end a run or a sweep.
"""

import json
import logging
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator

from distill_runner.common.errors import TrainingPaused, UserError, command, first_line, suggestion
from distill_runner.common.files import shareable, without_paths
from distill_runner.common.plugins import entry_point, load_class
from distill_runner.common.schema import Schema
from distill_runner.common.terminal import markdown_table

log = logging.getLogger(__name__)

Values = Mapping[str, Any]
"""Name -> number, string or None. The tracker that ``open_tracker`` yields also accepts scalar arrays and tensors."""
_ENTRY_POINTS = "distill_runner.trackers"
"""Group of entry points by which an installed package registers a subclass of ``Tracker`` under a name."""
WANDB_INIT_SECONDS = 6.0
"""Time limit to start the run; then it is offline. W&B's own limit is 90 s, and then the job dies."""
WANDB_FINISH_SECONDS = 8.0
"""Time limit for the last upload. W&B waits forever if the network is lost; data not uploaded stays on disk."""
HEADLINE = re.compile(
    r"count(/\w+)?|status|task|method|mapping|attention|teacher|seed|metric|score|teacher_score|test/score|key"
    r"|published/value|best_epoch|epochs|seconds|examples_per_second|num_params"
    r"|settings/(optim/lr|[^/]+/weight|[^/]+/temperature)"
)
"""Names of the values of a result that a tracker shows for a run; all others are in its table ``results``."""


# Interface


class TrackerConfig(Schema):
    """Configuration of the tracker (``conf/tracker``). TensorBoard reads none of its fields except ``name``.

    Args:
        name: tracker that a run uses in addition to ``metrics.jsonl``: ``none``, ``wandb``, ``tensorboard``,
            or one that an installed package has registered as a plugin.
        project: W&B project that the run belongs to.
        entity: W&B user or team that owns the project; null takes the account's default.
        group: name of a group of runs, such as the points of a sweep.
        tags: additional tags. Every run is also tagged with its task, method and teacher.
        title: displayed name of the run; by default the name of its folder.
        mode: whether to upload to W&B; ``offline`` writes to disk only. null uses WANDB_MODE. If that is not set
            either, the run is online if there are an API key and a network.
        console: also send the console output of the run.
        model: upload the finished student as a W&B artifact.
    """

    name: str = "none"
    project: str = "distill-run"
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    title: str | None = None
    mode: Literal["online", "offline"] | None = None
    console: bool = False
    model: bool = False

    @field_validator("name")
    @classmethod
    def _exists(cls, name: str) -> str:
        trackers = ("none", *OPTIONAL)
        if name not in trackers and entry_point(_ENTRY_POINTS, name) is None:
            problem = f"there is no such tracker, and no installed package registers one as {_ENTRY_POINTS}"
            raise UserError("tracker.name", name, problem, suggestion(name, trackers))
        return name

    def with_tags(self, *names: str | None) -> "TrackerConfig":
        """Return a copy with ``names`` as further tags, cut to the 64 characters that W&B allows; None is skipped."""
        new_tags = [name[:64] for name in names if name]
        return self.model_copy(update={"tags": tuple(dict.fromkeys([*self.tags, *new_tags]))})


@dataclass(frozen=True)
class Outcome:
    """What is known at the end of a run or a sweep.

    Attributes:
        summary: values of the whole run, such as scores, sizes and seconds.
        tables: rows by name; their columns are the union of the keys of all rows, and missing cells are empty.
        texts: texts that are shown in a monospaced font, such as a table made for the terminal.
        pictures: PNG files.
        model: folder of the finished student, in the Hugging Face layout.
    """

    summary: Values = field(default_factory=dict)
    tables: Mapping[str, Sequence[Values]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    pictures: Mapping[str, Path] = field(default_factory=dict)
    model: Path | None = None


class Tracker:
    """Destination of the metrics and the outcome of one run; what a subclass leaves out is not recorded.

    It is opened by its constructor: ``Tracker(config, folder, run_id, settings, job_type)``, see ``open_tracker``.
    """

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        """Add one point to every curve in ``values``; ``step`` counts optimizer steps and may restart or go back."""

    def record(self, outcome: Outcome) -> None:
        """Record what is known at the end."""

    def finish(self, exit_code: int) -> None:
        """Write the remaining data and close the tracker. ``exit_code`` is 0, or 1 after an exception."""


class MetricsFile(Tracker):
    """Tracker that appends to ``metrics.jsonl``, one JSON object per line; non-finite numbers become null.

    The file is unbuffered, so every line is written at once. Incomplete lines are removed: after a failed write on a
    full disk, and on opening the file after a process was killed. What that process had logged is not logged again,
    although training goes on at a checkpoint. The outcome has files of its own in the folder.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "metrics.jsonl"
        self.file = path.open("ab", buffering=0)
        lines = path.read_bytes().rpartition(b"\n")[0]
        self.file.truncate(len(lines) + 1 if lines else 0)
        self.existing = {(values["step"], frozenset(values)) for values in map(json.loads, lines.splitlines())}

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        line = point(values, step, epoch)
        if (step, frozenset(line)) in self.existing:
            return
        line |= {key: None for key, value in line.items() if isinstance(value, float) and not math.isfinite(value)}
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        num_bytes = self.file.write(data)
        if num_bytes != len(data):
            self.file.truncate(self.file.tell() - (num_bytes or 0))
            raise OSError(f"{self.file.name}: the disk is full")

    def finish(self, exit_code: int) -> None:
        self.file.close()


def flatten(values: Values) -> dict[str, Any]:
    """Flatten nested values: names are joined by slashes as in curves (``loss/kd``), lists by "; ", None is left out.

    Dots in names also become slashes, because W&B reads a name with a dot as a path.
    """
    result: dict[str, Any] = {}
    for name, value in ((name.replace(".", "/"), value) for name, value in values.items()):
        if isinstance(value, Mapping):
            result |= {f"{name}/{inner}": part for inner, part in flatten(value).items()}
        elif isinstance(value, list | tuple):
            result[name] = "; ".join(map(str, value))
        elif value is not None:
            result[name] = value
    return result


def point(values: Values, step: int, epoch: float | None) -> dict[str, Any]:
    """Return ``values`` with step and epoch: one line of ``metrics.jsonl``, or one point of W&B's curves."""
    return {"step": step} | ({} if epoch is None else {"epoch": epoch}) | dict(values)


def headline(values: Values) -> dict[str, Any]:
    """Return the values of a result by which runs are compared: names, scores, cost, weights and temperature."""
    return {key: value for key, value in values.items() if HEADLINE.fullmatch(key)}


def columns(rows: Sequence[Values]) -> list[Any]:
    """Return the union of the keys of ``rows``, in the order of their first occurrence."""
    return list(dict.fromkeys(key for row in rows for key in row))


# Services


def imported(module: str, package: str) -> Any:
    """Return a module of a tracker's package.

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        problem, remedy = f"the package cannot be imported ({error})", command(f"pip install 'distill-run[{package}]'")
        raise UserError("tracker", package, problem, remedy) from error


class WandbTracker(Tracker):
    """Tracker that writes one W&B run and resumes it by its id; it goes offline by itself without a key or network.

    An agent of ``wandb sweep`` chooses the id itself. The run's own is then only in the configuration, as ``key``.
    """

    def __init__(self, config: TrackerConfig, folder: Path, run_id: str, settings: Values, job_type: str) -> None:
        self.wandb = wandb = imported("wandb", "wandb")
        self.sends_model = config.model
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # W&B's telemetry logs errors while offline
        id_of_agent = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None

        def start(mode: Literal["online", "offline"] | None) -> Any:
            wandb.setup(wandb.Settings(silent=True))  # silent also stops W&B from asking for a key on a terminal
            return wandb.init(
                id=id_of_agent or run_id,
                resume=None if id_of_agent else "allow",
                dir=str(folder),
                config={**settings, "key": run_id} if id_of_agent else dict(settings),
                name=config.title or folder.name,
                job_type=job_type,
                mode=mode,
                project=config.project,
                entity=config.entity,
                group=config.group,
                tags=config.with_tags(*os.environ.get("WANDB_TAGS", "").split(",")).tags,
                settings=wandb.Settings(
                    console="wrap" if config.console else "off",
                    init_timeout=WANDB_INIT_SECONDS,
                    finish_timeout=WANDB_FINISH_SECONDS,
                    x_disable_meta=True,  # user, host, folders and arguments of this process
                    disable_git=True,
                    disable_code=True,
                    host="-",
                ),
            )

        try:
            self.run = start(config.mode)
        except Exception as error:
            log.warning("W&B did not start, tracking offline: %s", first_line(error))
            try:
                wandb.teardown()  # W&B's service still holds the run id of the failed start
                self.run = start("offline")
            except Exception as offline_error:
                problem = " ".join(str(offline_error).partition("[type=")[0].split())
                remedy = "See your options tracker.* and variables WANDB_*."
                raise UserError("tracker", config.name, problem, remedy) from offline_error
        # A separate step is the x axis: W&B drops points whose built-in step goes back, as in a resumed run.
        self.run.define_metric("*", step_metric="step")
        sync = "off, by WANDB_MODE" if self.run.disabled else f"wandb sync {Path(self.run.dir).parent}"
        log.info("W&B: %s", self.run.url or sync)

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        self.run.log(point(values, step, epoch))

    def record(self, outcome: Outcome) -> None:
        wandb = self.wandb
        self.run.summary.update(headline(outcome.summary))
        for name, rows in outcome.tables.items():
            names = columns(rows)
            data = [[row.get(column) for column in names] for row in rows]
            self.run.log({name: wandb.Table(columns=names, data=data, allow_mixed_types=True)})
        for name, text in outcome.texts.items():
            self.run.log({name: wandb.Html(f"<pre>{escape(text)}</pre>")})
        for name, file in outcome.pictures.items():
            self.run.log({name: wandb.Image(str(file), caption=file.stem)})
        if outcome.model and self.sends_model:
            artifact = wandb.Artifact(f"model-{self.run.id}", type="model")
            artifact.add_dir(str(outcome.model))
            self.run.log_artifact(artifact, aliases=["latest", "student"])

    def finish(self, exit_code: int) -> None:
        thread = threading.Thread(target=self.run.finish, kwargs={"exit_code": exit_code}, daemon=True)
        thread.start()
        thread.join(WANDB_FINISH_SECONDS + 2)
        if thread.is_alive():
            log.warning("W&B does not finish: wandb sync %s uploads the rest", Path(self.run.dir).parent)


class TensorBoardTracker(Tracker):
    """Tracker that writes event files to ``<folder>/tensorboard``.

    The configuration, the summary and the tables are written as texts. The page HPARAMS has one row for each run: the
    settings that distinguish runs, and the run's metrics. TensorBoard keeps no models.
    """

    def __init__(self, config: TrackerConfig, folder: Path, run_id: str, settings: Values, job_type: str) -> None:
        self.writer = imported("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder / "tensorboard"))
        code = json.dumps({"id": run_id, "job_type": job_type} | dict(settings), indent=1, default=str)
        self.writer.add_text("config", f"```json\n{code}\n```")

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        for key, value in point(values, step, epoch).items():
            if key != "step" and isinstance(value, int | float):
                self.writer.add_scalar(key, value, global_step=step)

    def record(self, outcome: Outcome) -> None:
        import numpy as np
        from PIL import Image

        summary = outcome.summary
        tables = {"summary": [{"name": key, "value": value} for key, value in summary.items()], **outcome.tables}
        for name, rows in tables.items():
            names = columns(rows)
            cells = [[str(row.get(column, "")) for column in names] for row in rows]
            self.writer.add_text(name, markdown_table(names, cells, text_columns=len(names)))
        identity = ("task", "method", "teacher", "seed")
        settings = {key: value for key, value in summary.items() if key in identity or key.startswith("settings/")}
        hparams = {key: value if isinstance(value, int | float) else str(value) for key, value in settings.items()}
        scores = {key: summary[key] for key in summary if re.match(r"(test/)?(score$|metrics/)", key)}
        self.writer.add_hparams(hparams, scores, run_name=".")  # in the folder of the curves, not in a separate one
        for name, text in outcome.texts.items():
            self.writer.add_text(name, f"```\n{text}\n```")
        for name, file in outcome.pictures.items():
            with Image.open(file) as image:
                self.writer.add_image(name, np.asarray(image.convert("RGB")), dataformats="HWC")

    def finish(self, exit_code: int) -> None:
        self.writer.close()


OPTIONAL: dict[str, Callable[..., Tracker]] = {"wandb": WandbTracker, "tensorboard": TensorBoardTracker}


# Trackers of a run and of a sweep


@dataclass(frozen=True)
class FaultTolerant(Tracker):
    """Tracker that forwards every call to several trackers; the first failure of each is logged, none is raised.

    Texts lose the folders and secrets of this machine.

    Attributes:
        failed: trackers that have missed a call.
    """

    trackers: Sequence[Tracker]
    failed: set[Tracker] = field(default_factory=set)

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        plain = {key: value.item() if hasattr(value, "item") else value for key, value in values.items()}
        self._call_all(lambda tracker: tracker.log(plain, step=step, epoch=epoch))

    def record(self, outcome: Outcome) -> None:
        texts = {name: without_paths(text) for name, text in outcome.texts.items()}
        tables = {name: shareable(rows) for name, rows in outcome.tables.items()}
        shared = replace(outcome, summary=shareable(outcome.summary), tables=tables, texts=texts)
        self._call_all(lambda tracker: tracker.record(shared))

    def finish(self, exit_code: int) -> None:
        self._call_all(lambda tracker: tracker.finish(exit_code))

    def _call_all(self, call: Callable[[Tracker], None]) -> None:
        for tracker in self.trackers:
            try:
                call(tracker)
            except Exception as error:
                if tracker not in self.failed:
                    self.failed.add(tracker)
                    log.warning("%s failed, the run continues: %s", type(tracker).__name__, first_line(error))


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
    config = TrackerConfig(**shareable(config.model_dump()))
    tracker_class = OPTIONAL.get(config.name)
    if tracker_class is None and (path := entry_point(_ENTRY_POINTS, config.name)):
        tracker_class = load_class("tracker.name", path, Tracker)
    optional = [tracker_class(config, folder, run_id, shareable(settings), job_type)] if tracker_class else []
    tracker = FaultTolerant([*([MetricsFile(folder)] if new_metrics else []), *optional])
    exit_code = 1
    try:
        yield tracker
        exit_code = 0
    except TrainingPaused:
        exit_code = 0
        raise
    finally:
        tracker.finish(exit_code)


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
    try:
        tags = [result.get(key) for key in ("task", "method", "teacher") for result in results]
        config = config.model_copy(update={"group": config.group or name, "title": config.title or name})
        config, run_id = config.with_tags(*tags), "sweep-" + re.sub(r"[^\w.-]", "-", name)
        counts = Counter(result["status"] for result in results)
        outcome = Outcome(
            summary={"count": len(results)} | {f"count/{status}": count for status, count in counts.items()},
            tables={"points": [flatten(result) for result in results]},
            texts={"table": table},
            pictures={f"pictures/{file.stem}": file for file in pictures},
        )
        with open_tracker(config, folder, run_id, {"sweep": name}, job_type="sweep", new_metrics=False) as tracker:
            tracker.record(outcome)
    except Exception as error:
        log.warning("the sweep is not tracked: %s", error)
