"""The interface of a tracker, its configuration, and functions that the trackers share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from distill_runner.common.errors import UserError
from distill_runner.common.schema import Schema

Values = Mapping[str, Any]
"""Name -> number, string or None. The tracker that ``open_tracker`` yields also accepts scalar arrays and tensors."""


class TrackerConfig(Schema):
    """Configuration of the tracker (``conf/tracker``). All fields except ``name`` apply to W&B only.

    Args:
        name: tracker that a run uses in addition to ``metrics.jsonl``.
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

    name: Literal["none", "wandb", "tensorboard"] = "none"
    project: str = "distill-run"
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    title: str | None = None
    mode: Literal["online", "offline"] | None = None
    console: bool = False
    model: bool = False

    def tagged(self, *names: str | None) -> "TrackerConfig":
        """Return a copy with ``names`` as further tags, cut to the 64 characters that W&B allows; None is skipped."""
        added = [name[:64] for name in names if name]
        return self.model_copy(update={"tags": tuple(dict.fromkeys([*self.tags, *added]))})


class Tracker:
    """Destination of the metrics, tables and files of one run; what a subclass leaves out is not recorded."""

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        """Add one point to every curve in ``values``; ``step`` counts optimiser steps and may restart or go back."""

    def summary(self, values: Values) -> None:
        """Record values of the whole run, such as scores, sizes and seconds."""

    def table(self, name: str, rows: Sequence[Values]) -> None:
        """Record a table; its columns are the union of the keys of ``rows``, and missing cells are empty."""

    def text(self, name: str, text: str) -> None:
        """Record a text to be shown in a monospaced font, such as a table made for the terminal."""

    def picture(self, name: str, file: Path) -> None:
        """Record the PNG image in ``file``."""

    def model(self, folder: Path) -> None:
        """Record the finished student, saved in ``folder`` in the Hugging Face layout."""

    def finish(self, exit_code: int) -> None:
        """Write the remaining data and close the tracker. ``exit_code`` is 0, or 1 after an exception."""


def flat(values: Values) -> dict[str, Any]:
    """Flatten nested values: names are joined by slashes as in curves (``loss/kd``), lists by "; ", None is left out.

    Dots in names also become slashes, because W&B reads a name with a dot as a path.
    """
    found: dict[str, Any] = {}
    for name, value in ((name.replace(".", "/"), value) for name, value in values.items()):
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": part for inner, part in flat(value).items()}
        elif isinstance(value, list | tuple):
            found[name] = "; ".join(map(str, value))
        elif value is not None:
            found[name] = value
    return found


def point(values: Values, step: int, epoch: float | None) -> dict[str, Any]:
    """Return ``values`` with step and epoch: one line of ``metrics.jsonl``, or one point of W&B's curves."""
    return {"step": step} | ({} if epoch is None else {"epoch": epoch}) | dict(values)


def columns(rows: Sequence[Values]) -> list[Any]:
    """Return the union of the keys of ``rows``, in the order of their first occurrence."""
    return list(dict.fromkeys(key for row in rows for key in row))


def missing(package: str, error: ImportError) -> UserError:
    """Return the error for a missing ``package`` of a tracker, with the command that installs it."""
    remedy = f"pip install 'distill-run[{package}]'"
    return UserError("tracker", package, f"the package cannot be imported ({error})", remedy)
