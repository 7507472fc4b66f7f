"""Errors that a user can cause or act on. Each is reported in one or two lines, without a traceback."""

import difflib
import os
import re
import shlex
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

MAX_LISTED, MAX_NAME = 12, 40
"""Names that a message lists, and characters of a name from data."""


class UserError(Exception):
    """Mistake in the configuration, the data or the environment, never a bug of the program.

    The command line prints the error without a traceback and exits with ``exit_code``.

    Args:
        key: the configuration key (or file) at fault, as typed on the command line. A key that begins with a dot is
            relative to the part of the configuration that is being read; ``error_context`` completes it.
        value: the value of the key; ``None`` leaves the value out of the message.
        problem: what is wrong with the value.
        remedy: what to type or do instead.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, key: str, value: Any, problem: str, remedy: str = "") -> None:
        self.key, self.value, self.problem, self.remedy = key, value, problem, remedy
        super().__init__(key, value, problem, remedy)  # all arguments, so that pickle can rebuild the error

    def __str__(self) -> str:
        key = self.key.removeprefix(".")
        subject = key if self.value is None else f"{key}={format_value(self.value)}"
        subject = "".join(char if char.isprintable() else repr(char)[1:-1] for char in subject)
        return f"{subject}: {self.problem}" + (f"\n  {self.remedy}" if self.remedy else "")

    def with_key(self, key: str) -> "UserError":
        """Return the same error for another key, caused by this one."""
        error = type(self)(key, self.value, self.problem, self.remedy)
        error.__cause__ = self
        return error


class Unavailable(UserError):
    """The network, the hub, the disk or another resource is unavailable at the moment; not the user's mistake."""

    exit_code = 1


class TrainingError(Exception):
    """Training cannot continue, although the program has no bug; the command line exits with code 1."""

    remedy: ClassVar[str]


class UnexpectedExit(TrainingError):
    """Something that the run calls has raised ``SystemExit``."""

    remedy = "A library or a loss term tried to end the process: HYDRA_FULL_ERROR=1 shows where."


class TrainingPaused(Exception):
    """Training has stopped at the requested epoch; its state is saved.

    Args:
        epochs: the metrics after each epoch so far.
    """

    def __init__(self, epochs: Sequence[Mapping[str, float]]) -> None:
        self.epochs = epochs
        super().__init__(epochs)

    def __str__(self) -> str:
        return f"after epoch {len(self.epochs)}"


@contextmanager
def error_context(key: str) -> Iterator[None]:
    """Put ``key`` in front of the keys of errors that begin with a dot; the key ``.`` stands for ``key`` itself."""
    try:
        yield
    except UserError as error:
        if not error.key.startswith("."):
            raise
        raise error.with_key((key + error.key).rstrip(".")) from error


def exit_cause(exitcode: int) -> str:
    """Return why a process ended, from its exit code, which is negative if a signal ended the process."""
    if exitcode >= 0:
        return f"the process exited with code {exitcode}"
    number = -exitcode
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = ": out of memory, or killed from outside" if name == "SIGKILL" else ""
    return f"the process was ended by {name}{hint}"


def format_value(value: Any) -> str:
    """Return a value in the notation of the command line: ``true``, ``null``, ``[a, b]``; floats keep all digits."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


class Remedy(str):
    """Text of a remedy with what it offers to type as data; adding text keeps the offers.

    Attributes:
        offers: alternatives, each as the words that a shell passes on: overrides to append, or a command to run.
    """

    offers: tuple[tuple[str, ...], ...] = ()

    def with_offers(self, *offers: tuple[str, ...]) -> "Remedy":
        self.offers = offers
        return self

    def __add__(self, other: str) -> "Remedy":
        return Remedy(f"{self}{other}").with_offers(*self.offers, *getattr(other, "offers", ()))

    def __radd__(self, other: str) -> "Remedy":
        return Remedy(f"{other}{self}").with_offers(*self.offers)


def override(*keys_and_values: Any) -> Remedy:
    """Return what a user appends to the command: key, value, key, value, ...; ``~key`` stands alone and removes a key.

    Text in angle brackets stands for what only the user knows.
    """
    keys, values = keys_and_values[::2], keys_and_values[1::2]
    words = tuple(f"{key}={format_typed(value)}" for key, value in zip(keys, values, strict=True)) if values else keys
    return Remedy(shlex.join(words)).with_offers(words)


def command(line: str) -> Remedy:
    """Return a command that a user runs instead."""
    return Remedy(line).with_offers(tuple(shlex.split(line)))


def format_typed(value: Any) -> str:
    """Return a value as Hydra's grammar takes it, with quotes around text where the grammar needs them."""
    if isinstance(value, list | tuple):
        return "[" + ",".join(format_typed(part) or '""' for part in value) + "]"
    if not isinstance(value, str):
        return format_value(value)
    plain = re.fullmatch(r"[A-Za-z][\w:/@%.-]*([ .-]+[\w:/@%.-]+)*|0|[1-9]\d*|0/\d+|<.*>|", value, re.ASCII)
    if plain and value.lower() not in {"null", "true", "false", "nan", "inf"}:
        return value
    value = re.sub(r'(\\+)(?="|$)', r"\1\1", value)  # backslashes count only in front of a quotation mark
    return '"' + value.replace('"', '\\"') + '"'


def short_list(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    rest = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {rest:,} more" if rest > 0 else "")


def listed_names(names: Iterable[str]) -> str:
    """Return a short list of names from data, each cut after some characters."""
    return short_list([name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..." for name in names])


def quantity(count: float, noun: str, form: str = "") -> str:
    """Return a count with its noun: ``1 epoch``, ``2 epochs``, ``1,000 more files``.

    Args:
        noun: in the singular; its plural ends in ``s``.
        form: format of the count, such as ``,``.
    """
    return f"{count:{form}} {noun}{'' if count == 1 else 's'}"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error``, the error that caused it, the cause of that error, and so on."""
    visited = set[int]()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """Return the first line of text in the message of ``error``, or the name of its class if there is no text."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def root_cause(error: BaseException) -> str:
    """Return the type and the first line of the innermost cause, at most 160 characters.

    ``datasets`` and other libraries wrap the informative error in further errors.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}"[:160] if lines else type(error).__name__


def require_choice(key: str, value: Any, choices: Collection[Any], problem: str) -> None:
    """Raise a UserError with ``problem`` for a value that is none of the choices, which it suggests."""
    if value not in choices:
        raise UserError(key, value, problem, suggestion(value, choices))


def suggestion(name: Any, candidates: Iterable[Any]) -> str:
    """Return a remedy for a misspelled name: the closest candidate, and all candidates if there are at most 20.

    Case and punctuation do not count, and a name may have the ending of its paper: ``SST-2`` means ``sst2``, and
    ``ALP-KD`` means ``alp``.
    """

    def letters(name: Any) -> str:
        return re.sub(r"[\W_]", "", str(name)).lower()

    names = sorted(map(str, candidates))
    mark = "; " if any("," in name for name in names) else ", "
    words = {letters(candidate): candidate for candidate in names}
    word = letters(name)
    stem = word.removesuffix("kd")
    close = [stem] if stem in words else difflib.get_close_matches(word, words, n=1)
    hint = [f"Did you mean '{words[close[0]]}'?"] if close else []
    return " ".join([*hint, f"Known: {mark.join(names)}."] if 0 < len(names) <= 20 else hint)


def similar_file(path: Path) -> Path | None:
    """Return the file or folder beside ``path`` whose name is most like it; None if none is."""
    names = [name for name in os.listdir(path.parent) if name != path.name] if path.parent.is_dir() else []
    return next((path.with_name(name) for name in difflib.get_close_matches(path.name, names, 1, 0.8)), None)


def require_file(key: str, path: Path) -> None:
    """Raise a UserError that names a similar file, or those of a folder, if ``path`` is no file."""
    if path.is_dir():
        files = ", ".join(sorted(file.name for file in path.iterdir() if file.is_file())[:5])
        raise UserError(key, path, "is a folder", f"Name one of its files: {files}" if files else "It holds no file.")
    if not path.is_file():
        problem = "is not a file that can be read" if path.exists() else "there is no such file"
        similar = similar_file(path)
        raise UserError(key, path, problem, f"Did you mean {similar}?" if similar else "")


def message_and_exit_code(error: BaseException) -> tuple[str, int]:
    """Return the message to print for an error, in one or two lines, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted: repeat the command to resume", 130
    if isinstance(error, TrainingError):
        return f"{error}\n  {error.remedy}", 1
    return str(error), error.exit_code if isinstance(error, UserError) else 2
