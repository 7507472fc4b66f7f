"""Console script ``distill-run``: start a subcommand, such as ``distill-run table``, or a run.

What each of them needs is imported only when it starts, so that ``--help`` and tab completion are fast.
"""

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from distill_runner import __version__
from distill_runner.commands.parser import run_subcommand, subcommand_of
from distill_runner.common.errors import TrainingError, UserError, message_and_exit_code
from distill_runner.common.files import resource_error
from distill_runner.common.process import environment_variable, num_launched, output_error, protect_output
from distill_runner.common.terminal import fitted

FULL_ERROR = "HYDRA_FULL_ERROR"


def main() -> None:
    """Entry point of ``distill-run``.

    Exit codes: 0, 1 (training failed, or a resource is unavailable), 2 (user error), 130 (interrupted).
    """
    protect_output()
    show_traceback = os.environ.get(FULL_ERROR) == "1"
    with environment_variable(FULL_ERROR, "1"):  # Hydra then passes exceptions on, and they are handled below
        try:
            code: Any = _start_launched(sys.argv[1:])
        except SystemExit as error:
            code = error.code
        except (Exception, KeyboardInterrupt) as error:
            shown_error = resource_error(error) or error
            is_known = isinstance(shown_error, UserError | TrainingError | KeyboardInterrupt)
            if not is_known or (show_traceback and isinstance(error, Exception)):
                raise
            text, code = message_and_exit_code(shown_error)
            print(fitted(text, sys.stderr), file=sys.stderr)
    if problem := output_error():
        print(f"standard output: {problem}", file=sys.stderr)
        code = code or 1
    if code:
        sys.exit(code)


def _start_launched(arguments: Sequence[str]) -> int:
    """Start a subcommand or a run. Of several processes of ``torchrun``, the first one does; the others follow it."""
    if num_launched() == 1:
        if (tasks := int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))) > 1:
            problem = f"has started {tasks} tasks, each of which would be a run of its own"
            raise UserError("srun", None, problem, "Start one task on each machine, and torchrun in it.")
        return _start(arguments)
    from distill_runner.training.processes import join_launched

    group = join_launched()
    if not group.is_main:
        return group.follow()
    code = _start(arguments)
    group.start(None)
    return code


def _start(arguments: Sequence[str]) -> int:
    """Start a subcommand or a run, and return the exit code."""
    if name := subcommand_of(arguments):
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        return run_subcommand(name, arguments[1:])
    if arguments == ["--version"]:
        print(f"distill-run {__version__}")
        return 0
    from distill_runner.hydra_app import compose_and_run

    compose_and_run(arguments)
    return 0
