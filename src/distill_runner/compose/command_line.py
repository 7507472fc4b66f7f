"""Between the console script and Hydra: rewrite the arguments for Hydra, and raise errors as they occurred."""

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
    """Call ``job`` with the composed configuration, or ``point`` with the configuration of each point of a sweep.

    Raises:
        UserError: a key that nothing reads, a file that cannot be read, or arguments that cannot be composed.
        EndedItself: ``job`` raised ``SystemExit``.
        BaseException: any other exception of ``job``, unchanged. Hydra would print its own traceback instead.
    """
    raised: list[BaseException] = []

    def call(config: DictConfig) -> Any:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            return point(config)
        try:
            return job(config)
        except SystemExit as error:
            raised.append(EndedItself(f"the run ended itself with exit code {error.code or 0}"))
        except BaseException as error:
            raised.append(error)

    _look_at(arguments)
    # conf/hydra/launcher/submitit_slurm.yaml has the plugin's name on purpose, so that the plugin's schema checks it.
    warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")
    sys.argv[1:] = arguments  # Hydra reads its arguments here
    application = hydra.main(version_base="1.3", config_path=str(folders.config_folder()), config_name="config")(call)
    try:
        application()
    except Exception as error:
        from distill_runner.compose.explain import explain

        raise explain(error, arguments) or error from error
    if raised:
        raise raised.pop()


def rewritten(given: Sequence[str]) -> list[str]:
    """Return the arguments for Hydra: the overrides with shorthands expanded, then the options.

    Hydra takes no overrides after an option.

    Raises:
        UserError: there is no such option, or no such configuration folder.
    """
    known, behind = parse_options(given)
    for argument in behind:
        if argument.startswith("-"):
            raise UserError(argument, None, "there is no such option", "See distill-run --help.")
    overrides = [*known.overrides, *behind]
    folders.give(known.config_dir)  # Hydra would search it after the package's own folder
    own = ("--config-dir", "-cd", known.config_dir, f"--config-dir={known.config_dir}", f"-cd={known.config_dir}")
    options, multirun = [argument for argument in given if argument not in (*overrides, *own)], known.multirun
    if not options and any(override.startswith("sweep=") for override in overrides):
        options, multirun = ["-m"], True  # the file says so too, but Hydra may fail before it reads the file
    spelt_out = map(shorthand, overrides)
    return [*(map(_axis, spelt_out) if multirun else spelt_out), *options]


def _look_at(arguments: Sequence[str]) -> None:
    """Check the overrides and the user's own files before anything is composed."""
    own = folders.own_folder()
    if own or any(argument.startswith("+") or "=[" in argument for argument in arguments):
        from distill_runner.compose.given import check_files, check_given

        check_given(arguments)
        if own:
            check_files(own)


def shorthand(override: str) -> str:
    """Expand the shorthands in an override.

    ``student.init=random`` stands for ``student.init.layers=random``, and ``task.columns=a,b`` for a list. Lists need
    no brackets there because zsh reads brackets as a pattern, and no grid varies columns, class names or metrics.

    A part of a split, ``train[:90%]``, gets quotes: Hydra would read its bracket as a list.
    """
    override = re.sub(r"^([\w.]+)=([\w./:-]+\[[\w~%]*:[\w~%]*\])$", r"\1='\2'", override)
    lists = r"^task\.(columns|labels|metrics|probabilities|logits)=([\w. -]+(?:,[\w. -]+)*)$"
    if not override.endswith("=null"):
        override = re.sub(lists, r"task.\1=[\2]", override)
    return re.sub(r"^student\.init=([\w,]+)$", r"student.init.layers=\1", override)


def _axis(override: str) -> str:
    """Turn ``a.b=1`` of a sweep into an axis with one value, which is set after the point has chosen ``a``."""
    of_points = re.fullmatch(r"(?!(?:hydra|sweep|runtime|store|tracker)\.)(\w+(?:\.\w+)+)=([\w.+-]+)", override)
    if not of_points:
        return override
    key, value = of_points.groups()
    return f"{key}=null,null" if value == "null" else f"{key}=choice({value})"  # choice() takes no null
