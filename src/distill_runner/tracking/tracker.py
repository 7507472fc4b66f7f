"""What a tracker is, and what the trackers share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from distill_runner.common.errors import UserError
from distill_runner.common.schema import Schema

Values = Mapping[str, Any]
"""Name -> number, string or None; ``open_tracker``'s also takes scalar arrays and tensors."""


class TrackerConfig(Schema):
    """``conf/tracker``. All but ``name`` concern W&B only.

    Args:
        group: of runs that belong together, such as a sweep's.
        tags: besides those that every run has: its task, method and teacher.
        title: the name displayed; that of the run's folder by default.
        mode: None leaves the choice to WANDB_MODE, and failing that to whether there is a key and a network.
        console: send what the run prints, too.
        model: upload the finished student as an artifact.
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
        """The same with further tags, as far as they are known, cut to the 64 characters that W&B allows."""
        added = [name[:64] for name in names if name]
        return self.model_copy(update={"tags": tuple(dict.fromkeys([*self.tags, *added]))})


class Tracker(Protocol):
    """Where the numbers of one run go."""

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        """One point of every curve in ``values``; ``step`` counts optimiser steps and may start again."""

    def summary(self, values: Values) -> None:
        """What holds for the whole run: scores, sizes, seconds."""

    def table(self, name: str, rows: Sequence[Values]) -> None:
        """Rows of one table; columns are the union of their keys, missing cells are empty."""

    def text(self, name: str, text: str) -> None:
        """Lines of a fixed pitch, such as a table made for a terminal."""

    def picture(self, name: str, file: Path) -> None:
        """A PNG file."""

    def model(self, folder: Path) -> None:
        """The finished student in Hugging Face layout."""

    def finish(self, exit_code: int) -> None:
        """Write what is left and close. ``exit_code`` is 0, or 1 after an exception."""


def flat(values: Values) -> dict[str, Any]:
    """One level of names, joined by slashes as those of curves are (``loss/kd``); lists joined, None left out.

    Dots become slashes too: to W&B a name with one is a path.
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
    """A line of ``metrics.jsonl``, or a point of W&B's curves."""
    return {"step": step} | ({} if epoch is None else {"epoch": epoch}) | dict(values)


def columns(rows: Sequence[Values]) -> list[Any]:
    """The union of the rows' keys, in the order in which they come."""
    return list(dict.fromkeys(key for row in rows for key in row))


def first_line(error: Exception) -> str:
    """What an error says, or at least its name."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def missing(package: str, error: ImportError) -> UserError:
    """What to install for the tracker called ``package``."""
    remedy = f"pip install 'distill-run[{package}]'"
    return UserError("tracker", package, f"the package cannot be imported ({error})", remedy)
