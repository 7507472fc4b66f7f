"""Between the console script and Hydra: arguments as Hydra parses them, and errors as they were raised."""

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from distill_runner.common.errors import EndedItself, UserError
from distill_runner.compose import folders
from distill_runner.compose.hydra_private import parse_options

Job = Callable[[DictConfig], Any]


def compose_and_call(job: Job, point: Job, arguments: Sequence[str]) -> None:
    """Call ``job`` with the configuration that the arguments compose to, or ``point`` with each of a sweep.

    Raises:
        UserError: keys that nothing reads, files that cannot be read, what cannot be composed.
        BaseException: as ``job`` raised it. Hydra would print a traceback of its own.
    """
    raised: list[BaseException] = []

    def call(config: DictConfig) -> Any:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            return point(config)
        try:
            return job(config)
        except SystemExit as error:
            raised.append(EndedItself(f"the run was ended from within, with exit code {error.code or 0}"))
        except BaseException as error:
            raised.append(error)

    _look_at(arguments)
    # Our launcher/submitit_slurm.yaml has the plugin's name on purpose: the plugin's schema checks it.
    warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")
    sys.argv[1:] = arguments  # where Hydra reads them
    application = hydra.main(version_base="1.3", config_path=str(folders.config_folder()), config_name="config")(call)
    try:
        application()
    except Exception as error:
        from distill_runner.compose.explain import explain

        raise explain(error, arguments) or error from error
    if raised:
        raise raised.pop()


def rewritten(given: Sequence[str]) -> list[str]:
    """What Hydra is to parse: overrides first, for it takes none behind an option, and with shorthands spelt out.

    Raises:
        UserError: there is no such option, or no such folder of configuration.
    """
    known, behind = parse_options(given)
    for argument in behind:
        if argument.startswith("-"):
            raise UserError(argument, None, "there is no such option", "See distill-run --help.")
    overrides = [*known.overrides, *behind]
    folders.give(known.config_dir)  # Hydra would put it behind the package's own
    own = ("--config-dir", "-cd", known.config_dir, f"--config-dir={known.config_dir}", f"-cd={known.config_dir}")
    options, multirun = [argument for argument in given if argument not in (*overrides, *own)], known.multirun
    if not options and any(override.startswith("sweep=") for override in overrides):
        options, multirun = ["-m"], True  # as its file says, which Hydra does not get to if anything else is wrong
    spelt_out = map(shorthand, overrides)
    return [*(map(_axis, spelt_out) if multirun else spelt_out), *options]


def _look_at(arguments: Sequence[str]) -> None:
    """What can be wrong before anything is composed."""
    own = folders.own_folder()
    if own or any(argument.startswith("+") or "=[" in argument for argument in arguments):
        from distill_runner.compose.given import check_files, check_given

        check_given(arguments)
        if own:
            check_files(own)


def shorthand(override: str) -> str:
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
