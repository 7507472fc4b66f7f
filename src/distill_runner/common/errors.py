"""What a user can do wrong, and how training can end: both said in one or two lines, without a traceback."""

import difflib
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar


class UserError(Exception):
    """A mistake in the configuration, the data or the environment, never a fault of the program.

    The command line prints it without a traceback and ends with ``exit_code``.

    Args:
        key: the configuration key (or file) at fault, as typed on the command line. One that begins with a dot belongs
            to the part of the configuration that is being read, which ``within`` names.
        value: its value; ``None`` leaves it out of the message.
        problem: what is wrong with it.
        remedy: what to type or do instead.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, key: str, value: Any, problem: str, remedy: str = "") -> None:
        self.key, self.value, self.problem, self.remedy = key, value, problem, remedy
        super().__init__(key, value, problem, remedy)  # all four, so that it survives pickling between processes

    def __str__(self) -> str:
        key = self.key.removeprefix(".")
        subject = key if self.value is None else f"{key}={as_typed(self.value)}"
        subject = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in subject)
        return f"{subject}: {self.problem}" + (f"\n  {self.remedy}" if self.remedy else "")

    def at(self, key: str) -> "UserError":
        """The same of another key."""
        return type(self)(key, self.value, self.problem, self.remedy)


class Unavailable(UserError):
    """What is asked for cannot be had at the moment: the network, the hub, the disk. No mistake of the user's."""

    exit_code = 1


class TrainingError(Exception):
    """Training cannot go on, through no fault of the program; the command line ends with exit code 1."""

    remedy: ClassVar[str]


class EndedItself(TrainingError):
    """Something that the run calls has ended the process."""

    remedy = "A library's or a term's own sys.exit(): HYDRA_FULL_ERROR=1 shows where."


class Paused(Exception):
    """Training has stopped where it was asked to; what there is is saved.

    Args:
        epochs: metrics after each epoch so far.
    """

    def __init__(self, epochs: Sequence[Mapping[str, float]]) -> None:
        self.epochs = epochs
        super().__init__(epochs)

    def __str__(self) -> str:
        return f"after epoch {len(self.epochs)}"


@contextmanager
def within(part: str) -> Iterator[None]:
    """Completes the keys of errors that belong to this part of the configuration; ``.`` is the part itself."""
    try:
        yield
    except UserError as error:
        if not error.key.startswith("."):
            raise
        raise error.at((part + error.key).rstrip(".")) from error


def exit_cause(exitcode: int) -> str:
    """Why a process ended, by its exit code: not 0, and negative if a signal ended it."""
    if exitcode >= 0:
        return f"the process ended itself with exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    hint = ": out of memory, or killed from outside" if name == "SIGKILL" else ""
    return f"the process was ended by {name}{hint}"


def as_typed(value: Any) -> str:
    """A value as the command line takes it: ``true``, ``null``, ``[a, b]``."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_typed, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_list(names: list[str]) -> str:
    """A list in Hydra's command line syntax, names quoted where its grammar needs it."""

    def item(name: str) -> str:
        plain = re.fullmatch(r"[A-Za-z]\w*([ .-]+\w+)*|0|[1-9]\d*", name, re.ASCII)
        if plain and name.lower() not in {"null", "true", "false", "nan", "inf"}:
            return name
        return '"' + name.replace('"', '\\"') + '"'

    return f"[{','.join(map(item, names))}]"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it came from, from the last to the first."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def brief(error: BaseException) -> str:
    """The first line of the innermost cause, which is where ``datasets`` and others keep what happened."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}"[:160] if lines else type(error).__name__


def nearest(name: Any, known: Iterable[Any]) -> str:
    """A remedy for a misspelt name: the nearest known one, and all if they are few."""
    names = sorted(map(str, known))
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = [f"Did you mean '{close[0]}'?"] if close else []
    return " ".join([*hint, f"Known: {', '.join(names)}."] if 0 < len(names) <= 20 else hint)


def message_and_exit_code(error: BaseException) -> tuple[str, int]:
    """What is printed for an error, in one or two lines, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted: the same command goes on from here", 130
    if isinstance(error, TrainingError):
        return f"{error}\n  {error.remedy}", 1
    return str(error), error.exit_code if isinstance(error, UserError) else 2
