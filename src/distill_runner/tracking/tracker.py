"""The interface of a tracker, its configuration, what all trackers share, and the file of every run."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator

from distill_runner.common.errors import UserError, suggestion
from distill_runner.common.plugins import entry_point
from distill_runner.common.schema import Schema

Values = Mapping[str, Any]
"""Name -> number, string or None. The tracker that ``open_tracker`` yields also accepts scalar arrays and tensors."""


TRACKERS = ("none", "wandb", "tensorboard", "trackio", "mlflow")
ENTRY_POINTS = "distill_runner.trackers"
"""Group of entry points by which an installed package registers a subclass of ``Tracker`` under a name."""


class TrackerConfig(Schema):
    """Configuration of the tracker (``conf/tracker``). TensorBoard reads none of its fields except ``name``.

    Args:
        name: tracker that a run uses in addition to ``metrics.jsonl``: ``none``, ``wandb``, ``tensorboard``,
            ``trackio``, ``mlflow``, or one that an installed package has registered as a plugin.
        project: W&B or Trackio project, or MLflow experiment, that the run belongs to.
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
        if name not in TRACKERS and entry_point(ENTRY_POINTS, name) is None:
            problem = f"there is no such tracker, and no installed package registers one as {ENTRY_POINTS}"
            raise UserError("tracker.name", name, problem, suggestion(name, TRACKERS))
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
    full disk, and on opening the file after a process was killed. The outcome has files of its own in the folder.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "metrics.jsonl"
        self.file = path.open("ab", buffering=0)
        lines = path.read_bytes().rpartition(b"\n")[0]
        self.file.truncate(len(lines) + 1 if lines else 0)

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        line = point(values, step, epoch)
        line |= {key: None for key, value in line.items() if isinstance(value, float) and not isfinite(value)}
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


HEADLINE = re.compile(
    r"count(/\w+)?|status|task|method|mapping|attention|teacher|seed|metric|score|teacher_score|test/score|key"
    r"|published/value|best_epoch|epochs|seconds|examples_per_second|num_params"
    r"|settings/(optim/lr|[^/]+/weight|[^/]+/temperature)"
)
"""Names of the values of a result that a tracker shows for a run; all others are in its table ``results``."""


def headline(values: Values) -> dict[str, Any]:
    """Return the values of a result by which runs are compared: names, scores, cost, weights and temperature."""
    return {key: value for key, value in values.items() if HEADLINE.fullmatch(key)}


def columns(rows: Sequence[Values]) -> list[Any]:
    """Return the union of the keys of ``rows``, in the order of their first occurrence."""
    return list(dict.fromkeys(key for row in rows for key in row))
