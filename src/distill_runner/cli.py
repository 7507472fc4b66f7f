"""Console script ``distill-run``: compose a configuration, run it, print the result.

torch and transformers are imported only when a run starts, so that ``--help`` and tab completion are fast.
"""

import logging
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from distill_runner.common.disk import when_full
from distill_runner.common.errors import Paused, TrainingError, UserError, message_and_exit_code
from distill_runner.common.exits import exits_raised
from distill_runner.common.imports import importing
from distill_runner.compose import resolvers
from distill_runner.compose.command_line import compose_and_call, rewritten
from distill_runner.compose.help import help_text

log = logging.getLogger(__name__)

FULL_ERROR = "HYDRA_FULL_ERROR"
resolvers.register()  # on import, because the workers of a launcher import this module and need the resolvers too


def main() -> None:
    """Entry point of ``distill-run``. Exit codes: 0, 1 (training failed), 2 (user error), 130 (interrupted)."""
    show_everything = os.environ.get(FULL_ERROR) == "1"
    os.environ[FULL_ERROR] = "1"  # Hydra then passes exceptions on, and they are handled below
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
    """Print a known error in one or two lines and exit with its code; raise any other error again."""
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
    arguments = rewritten(sys.argv[1:] or ["--help"])
    if {"--help", "-h"} & set(arguments):
        print(help_text(), end="")
        return
    compose_and_call(_job, _point, arguments)


def _job(config: DictConfig) -> Mapping[str, Any]:
    """Run a single configuration, outside a sweep."""
    with suppress(ValueError):  # not in the main thread, whose owner handles signals
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM acts like Ctrl-C; training handles both
    try:
        with exits_raised():
            return run(config)
    except Paused as pause:
        log.info("paused %s: the same command without runtime.pause_after resumes", pause)
        return {}
    finally:
        _remove_if_bare(Path(HydraConfig.get().runtime.output_dir))
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _remove_if_bare(folder: Path) -> None:
    """Remove the folder of a run that was refused or only planned: it holds only Hydra's files and the log."""
    with suppress(OSError):
        if {file.name for file in folder.iterdir()} <= {".hydra", "distill-run.log"}:
            for handler in [*logging.root.handlers]:
                # Libraries that log at the exit would open the file again.
                if isinstance(handler, logging.FileHandler) and Path(handler.baseFilename).parent == folder.absolute():
                    logging.root.removeHandler(handler)
                    handler.close()
            shutil.rmtree(folder)


def _point(config: DictConfig) -> Mapping[str, Any]:
    """Run a point of a sweep in a separate process."""
    from distill_runner.sweeping.isolation import run_apart

    return run_apart(run, config, preload="distill_runner.warm")


def run(config: DictConfig) -> Mapping[str, Any]:
    """Run one configuration, and print its result.

    Raises:
        UserError: the configuration, data or environment is invalid. It is raised before training where possible.
    """
    from distill_runner.compose.composed import settings_of, typed_run
    from distill_runner.compose.explain import in_words

    overrides = HydraConfig.get().overrides.task
    try:
        typed, settings = typed_run(config, overrides), settings_of(config)
        if any(one.startswith("transfer=") for one in overrides) and not any(s.transfer for s in typed.stages.values()):
            given = settings["transfer"]["name"]
            log.warning("transfer=%s: method=%s reads no transfer set (method=kd does)", given, typed.method)
        folder = Path(HydraConfig.get().runtime.output_dir).absolute()
        with importing():
            from distill_runner.running import run_stage

        return run_stage(typed, folder, settings)
    except (UserError, OmegaConfBaseException) as error:
        raise in_words(error, config, overrides) from error


if __name__ == "__main__":
    from distill_runner import cli  # not as __main__, which the workers of a launcher cannot import

    cli.main()
