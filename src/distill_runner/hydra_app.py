"""A run as Hydra starts it: compose the configuration, run it, print the result.

torch and transformers are imported only when a run starts, so that ``--help`` and tab completion are fast.
"""

import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from distill_runner.commands.parser import summaries
from distill_runner.common.errors import TrainingPaused, UnexpectedExit, UserError
from distill_runner.common.process import num_launched, protect_output, sigterm_as_interrupt
from distill_runner.common.terminal import output_width
from distill_runner.compose import resolvers
from distill_runner.compose.command_line import help_text, hydra_arguments
from distill_runner.compose.folders import config_folder

log = logging.getLogger(__name__)

resolvers.register()  # on import, because the workers of a launcher import this module and need the resolvers too


def compose_and_run(arguments: Sequence[str]) -> None:
    """Run the configuration, or the sweep, that the arguments ask for; without arguments, print the help.

    Raises:
        UserError: arguments that cannot be composed.
        UnexpectedExit: the run raised ``SystemExit``.
        BaseException: any other exception of the run, unchanged. Hydra would print its own traceback instead.
    """
    arguments = hydra_arguments(arguments or ["--help"])
    if {"--help", "-h"} & set(arguments):
        print(help_text(summaries()), end="")
        return
    folders, states, raised = list[Path](), list[str](), list[BaseException]()

    def start(config: DictConfig) -> Mapping[str, Any]:
        hydra_config = HydraConfig.get()
        folder = Path(hydra_config.runtime.output_dir).absolute()
        if hydra_config.mode == RunMode.MULTIRUN:
            if (count := num_launched()) > 1:
                problem = f"a sweep trains many models, but torchrun has started {count} processes for one"
                raise UserError("--multirun", None, problem, "Start the sweep without torchrun.")
            if hydra_config.runtime.choices["hydra/sweeper"] != "grid":  # which prints a table of its own
                folders.append(folder)
            from distill_runner.sweeping.isolation import run_isolated

            result = run_isolated(run, config, preload="distill_runner.running")  # in a process of its own
            states.append(str(result.get("status")))
            return result
        try:
            with sigterm_as_interrupt():
                return run(config)
        except TrainingPaused as pause:
            log.info("paused %s: the same command without runtime.pause_after resumes", pause)
        except SystemExit as error:
            raised.append(UnexpectedExit(f"something called exit({error.code or 0}) before the run finished"))
        except BaseException as error:
            raised.append(error)
        finally:
            # A run that was refused or only planned has nothing but Hydra's files and the log.
            if folder.is_dir() and {file.name for file in folder.iterdir()} <= {".hydra", "distill-run.log"}:
                _remove_with_log(folder)
        return {}

    sys.argv[1:] = arguments  # Hydra reads its arguments here
    try:
        hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(start)()
    except Exception as error:
        from distill_runner.compose.explain import explain

        raise explain(error, arguments) or error from error
    finally:
        if folders:
            from distill_runner.report.collect import read_results
            from distill_runner.report.formats import terminal
            from distill_runner.report.frame import tabulate

            results = read_results([*dict.fromkeys(folder for folder in folders if folder.is_dir())])
            print(terminal(tabulate(results), width=output_width()))
    if raised:
        raise raised.pop()
    if {"failed", "killed"} & {*states} and folders:
        sys.exit(1)


def _remove_with_log(folder: Path) -> None:
    for handler in [*logging.root.handlers]:
        # Libraries that log at the exit would open the file again.
        if isinstance(handler, logging.FileHandler) and Path(handler.baseFilename).parent == folder:
            logging.root.removeHandler(handler)
            handler.close()
    shutil.rmtree(folder, ignore_errors=True)


def run(config: DictConfig) -> Mapping[str, Any]:
    """Run one configuration, and print its result.

    Raises:
        UserError: the configuration, data or environment is invalid. It is raised before training where possible.
    """
    from distill_runner.running import run_composed

    protect_output()  # a point of a sweep is a process of its own
    hydra_config = HydraConfig.get()
    if hydra_config.job.chdir:
        problem = "would start each run in a folder of its own, from which relative paths and the store are others"
        raise UserError("hydra.job.chdir", "true", problem, "Leave it out; every run has its folder: hydra.run.dir.")
    folder, is_point = Path(hydra_config.runtime.output_dir).absolute(), hydra_config.mode == RunMode.MULTIRUN
    typed: Any = OmegaConf.to_container(hydra_config.overrides.task)  # as typed, with interpolations
    return run_composed(config, typed, folder, hydra_config.runtime.choices, is_point)
