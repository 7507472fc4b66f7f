"""The console script: compose, run, print the result. The only place where a DictConfig lives.

torch and transformers are imported when a run starts, so that ``--help`` and tab completion answer at once.
"""

import logging
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distill_runner import resolvers
from distill_runner.errors import TrainingError, UserError
from distill_runner.help import help_text

if TYPE_CHECKING:
    from distill_runner.config import RunConfig

log = logging.getLogger(__name__)

FULL_ERROR = "HYDRA_FULL_ERROR"


def main() -> None:
    """Entry point of ``distill-run``. Exit codes: 0, 1 (training failed), 2 (the user's mistake), 130 (interrupted)."""
    show_everything = os.environ.get(FULL_ERROR) == "1"
    os.environ[FULL_ERROR] = "1"  # Hydra then lets errors through, and they are told apart below
    try:
        _compose_and_run()
    except (UserError, TrainingError, KeyboardInterrupt) as error:
        if show_everything:
            raise
        text, code = _told(error)
        print(text, file=sys.stderr)
        sys.exit(code)
    finally:
        if not show_everything:
            del os.environ[FULL_ERROR]


def _compose_and_run() -> None:
    resolvers.register()
    sys.argv[1:] = _arguments(sys.argv[1:])
    if {"--help", "-h"} & set(sys.argv):
        print(help_text(config_folder()), end="")
        return
    application = hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(_job)
    _RAISED.clear()
    try:
        application()
    except Exception as error:
        raise _explained(error) from error
    if _RAISED:
        raise _RAISED.pop()


def _told(error: BaseException) -> tuple[str, int]:
    """What is printed of an error, in one or two lines, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted: the same command goes on from here", 130
    if isinstance(error, TrainingError):
        return f"{error}\n  {error.remedy}", 1
    return str(error), 2


def _explained(error: Exception) -> Exception:
    from distill_runner.explain import explain

    return explain(error, sys.argv[1:], config_folder()) or error


def config_folder() -> Path:
    """The configuration inside the installed package, else that of the checkout."""
    packaged = Path(__file__).parent / "conf"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "conf"


def _arguments(given: Sequence[str]) -> list[str]:
    """What Hydra is to parse: overrides first, for it takes none behind an option, and with shorthands spelt out."""
    known, behind = get_args_parser().parse_known_args(given)
    for argument in behind:
        if argument.startswith("-"):
            raise UserError(argument, None, "there is no such option", "See distill-run --help.")
    overrides = [*known.overrides, *behind]
    return [*map(_shorthand, overrides), *(argument for argument in given if argument not in overrides)]


def _shorthand(override: str) -> str:
    """``student.init=random`` stands for ``student.init.layers=random``."""
    return re.sub(r"^student\.init=([\w,]+)$", r"student.init.layers=\1", override)


_RAISED: list[BaseException] = []
"""What ended a single run; carried past Hydra, which would print a traceback of its own."""


def _job(config: DictConfig) -> Mapping[str, Any]:
    """One point. In a sweep nothing that goes wrong here may stop the other points: it is told in the result."""
    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        return run(config)
    except KeyboardInterrupt as error:
        if in_sweep:
            raise
        _RAISED.append(error)
        return {"status": "interrupted", **_names(config)}
    except BaseException as error:
        if not in_sweep:
            _RAISED.append(error)
        elif isinstance(error, UserError | TrainingError):
            log.error("%s", _told(error)[0])
        else:
            log.exception("this point failed")
        return {"status": "failed", "error": f"{type(error).__name__}: {error}", **_names(config)}


def run(config: DictConfig) -> Mapping[str, Any]:
    """Run one configuration, and print its result.

    Raises:
        UserError: before anything is trained, for all that can be known by then.
    """
    from distill_runner.explain import as_on_command_line

    try:
        typed_run, settings = _typed_run(config), OmegaConf.to_container(config, resolve=True)
        folder = Path(HydraConfig.get().runtime.output_dir).absolute()
        from distill_runner.running import run_student  # imports torch

        return run_student(typed_run, folder, settings)  # type: ignore[arg-type]
    except UserError as error:
        raise as_on_command_line(error, config) from error
    except OmegaConfBaseException as error:
        raise _explained(error) from error


def _typed_run(config: DictConfig) -> "RunConfig":
    from distill_runner.config import RunConfig
    from distill_runner.schema import typed

    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return typed(
        RunConfig,
        {
            "teacher": {key: resolved["teacher"][key] for key in ("name", "source", "fine_tuned")},
            "method": resolved["method"]["name"],
            "command": shlex.join(["distill-run", *overrides]),
            **{key: resolved[key] for key in ("stages", "runtime", "store", "tracker", "seed", "plan")},
        },
    )


def _names(config: DictConfig) -> dict[str, Any]:
    keys = {"task": "task.name", "method": "method.name", "seed": "seed"}
    return {name: OmegaConf.select(config, key) for name, key in keys.items()}


if __name__ == "__main__":
    main()
