"""The console script: compose, run, print the result.

torch and transformers are imported when a run starts, so that ``--help`` and tab completion answer at once.
"""

import logging
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from distill_runner.common.disk import when_full
from distill_runner.common.errors import EndedItself, TrainingError, UserError, message_and_exit_code
from distill_runner.common.imports import importing
from distill_runner.compose import folders, resolvers
from distill_runner.compose.folders import config_folder
from distill_runner.compose.help import help_text

log = logging.getLogger(__name__)

FULL_ERROR = "HYDRA_FULL_ERROR"
resolvers.register()  # on import: the workers of a launcher import this module, and need to know them too


def main() -> None:
    """Entry point of ``distill-run``. Exit codes: 0, 1 (training failed), 2 (the user's mistake), 130 (interrupted)."""
    show_everything = os.environ.get(FULL_ERROR) == "1"
    os.environ[FULL_ERROR] = "1"  # Hydra then lets errors through, and they are told apart below
    try:
        _compose_and_run()
    except Exception as error:
        if show_everything:
            raise
        _end(error)
    except KeyboardInterrupt as error:
        _end(error)
    finally:
        if not show_everything:
            del os.environ[FULL_ERROR]


def _end(error: BaseException) -> None:
    """In one or two lines, if the error is known."""
    known = error if isinstance(error, UserError | TrainingError | KeyboardInterrupt) else when_full(error)
    if known is None:
        raise error
    text, code = message_and_exit_code(known)
    print(text, file=sys.stderr)
    sys.exit(code)


def _compose_and_run() -> None:
    if sys.argv[1:] == ["--version"]:
        print(f"distill-run {version('distill-run')}")
        return
    sys.argv[1:] = _arguments(sys.argv[1:] or ["--help"])
    if {"--help", "-h"} & set(sys.argv):
        print(help_text(), end="")
        return
    _look_at(sys.argv[1:])
    application = hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(_job)
    _RAISED.clear()
    try:
        application()
    except Exception as error:
        from distill_runner.compose.explain import explain

        raise explain(error, sys.argv[1:]) or error from error
    if _RAISED:
        raise _RAISED.pop()


def _look_at(arguments: Sequence[str]) -> None:
    """What can be wrong before anything is composed."""
    own = get_args_parser().parse_known_args(arguments)[0].config_dir
    if own or any(argument.startswith("+") or "=[" in argument for argument in arguments):
        from distill_runner.compose.given import check_files, check_given

        check_given(arguments)
        if own:
            check_files(Path(own))


def _arguments(given: Sequence[str]) -> list[str]:
    """What Hydra is to parse: overrides first, for it takes none behind an option, and with shorthands spelt out."""
    known, behind = get_args_parser().parse_known_args(given)
    for argument in behind:
        if argument.startswith("-"):
            raise UserError(argument, None, "there is no such option", "See distill-run --help.")
    overrides = [*known.overrides, *behind]
    folders.give(known.config_dir)  # Hydra would put it behind the package's own
    own = ("--config-dir", "-cd", known.config_dir, f"--config-dir={known.config_dir}", f"-cd={known.config_dir}")
    options, multirun = [argument for argument in given if argument not in (*overrides, *own)], known.multirun
    if not options and any(override.startswith("sweep=") for override in overrides):
        options, multirun = ["-m"], True  # as its file says, which Hydra does not get to if anything else is wrong
    spelt_out = map(_shorthand, overrides)
    return [*(map(_axis, spelt_out) if multirun else spelt_out), *options]


def _shorthand(override: str) -> str:
    """``student.init=random`` stands for ``student.init.layers=random``, and ``task.columns=a,b`` for a list.

    A shell may take brackets for a pattern (zsh), and no grid is over columns, names of classes or metrics. A part of a
    split, ``train[:90%]``, gets quotes: Hydra would take its bracket for a list.
    """
    override = re.sub(r"^([\w.]+)=([\w./:-]+\[[\w~%]*:[\w~%]*\])$", r"\1='\2'", override)
    lists = r"^task\.(columns|labels|metrics|probabilities|logits)=([\w. -]+(?:,[\w. -]+)*)$"
    if not override.endswith("=null"):
        override = re.sub(lists, r"task.\1=[\2]", override)
    return re.sub(r"^student\.init=([\w,]+)$", r"student.init.layers=\1", override)


def _axis(override: str) -> str:
    """In a sweep ``a.b=1`` is an axis of one value, set where its points have chosen ``a`` and not before."""
    of_points = re.fullmatch(r"(?!(?:hydra|sweep|runtime|store|tracker)\.)(\w+(?:\.\w+)+)=([\w.+-]+)", override)
    if not of_points:
        return override
    key, value = of_points.groups()
    return f"{key}=null,null" if value == "null" else f"{key}=choice({value})"  # choice() takes no null


_RAISED: list[BaseException] = []
"""What ended a single run; carried past Hydra, which would print a traceback of its own."""


def _job(config: DictConfig) -> Mapping[str, Any] | None:
    """What Hydra calls: a run, or a point of a sweep, which gets a process of its own."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        from distill_runner.sweeping.isolation import run_apart

        return run_apart(run, config, preload="distill_runner.warm")
    with suppress(ValueError):  # not the main thread: whoever owns it handles signals
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C; training heeds both by itself
    try:
        return run(config)
    except SystemExit as error:
        _RAISED.append(EndedItself(f"the run was ended from within, with exit code {error.code or 0}"))
    except BaseException as error:
        _RAISED.append(error)
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return None


def run(config: DictConfig) -> Mapping[str, Any]:
    """Run one configuration, and print its result.

    Raises:
        UserError: before anything is trained, for all that can be known by then.
    """
    from distill_runner.compose.composed import settings_of, typed_run
    from distill_runner.compose.explain import in_words

    overrides = HydraConfig.get().overrides.task
    try:
        typed, settings = typed_run(config, overrides), settings_of(config)
        folder = Path(HydraConfig.get().runtime.output_dir).absolute()
        with importing():
            from distill_runner.running import run_stage

        return run_stage(typed, folder, settings)
    except (UserError, OmegaConfBaseException) as error:
        raise in_words(error, config, overrides) from error


if __name__ == "__main__":
    from distill_runner import cli  # under its own name, which the workers of a launcher can import

    cli.main()
