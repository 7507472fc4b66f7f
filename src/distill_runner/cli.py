"""The console script: compose, run, print the result. The only place where a DictConfig lives.

torch and transformers are imported when a run starts, so that ``--help`` and tab completion answer at once.
"""

import logging
import os
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distill_runner import resolvers
from distill_runner.errors import UserError

if TYPE_CHECKING:
    from distill_runner.config import RunConfig

log = logging.getLogger(__name__)

FULL_ERROR = "HYDRA_FULL_ERROR"
INITS = ("first", "group_top", "alternate", "random", "embeddings_only")


def main() -> None:
    """Entry point of ``distill-run``. Exit codes: 0, 1 (training failed), 2 (the user's mistake), 130 (interrupted)."""
    sys.argv[1:] = [_shorthand(argument) for argument in sys.argv[1:]]
    resolvers.register()
    show_everything = FULL_ERROR in os.environ
    os.environ[FULL_ERROR] = "1"  # Hydra then lets errors through, and they are told apart below
    application = hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(_job)
    try:
        application()
        if _RAISED:
            raise _RAISED[0]
    except (UserError, HydraException, OmegaConfBaseException) as error:
        if show_everything:
            raise
        sys.exit(_told(error))
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    finally:
        if not show_everything:
            del os.environ[FULL_ERROR]


def config_folder() -> Path:
    """The configuration inside the installed package, else that of the checkout."""
    packaged = Path(__file__).parent / "conf"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "conf"


def _shorthand(argument: str) -> str:
    """``student.init=random`` stands for ``student.init.layers=random``."""
    short = re.fullmatch(rf"student\.init=((?:{'|'.join(INITS)})(?:,(?:{'|'.join(INITS)}))*)", argument)
    return f"student.init.layers={short[1]}" if short else argument


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
    except BaseException as error:
        if not in_sweep:
            _RAISED.append(error)
        elif isinstance(error, UserError):
            log.error("%s", error)
        else:
            log.exception("this point failed")
        return {"status": "failed", "error": f"{type(error).__name__}: {error}", **_names(config)}
    return {"status": "interrupted", **_names(config)}


def run(config: DictConfig) -> Mapping[str, Any]:
    """Run one configuration, and print its result.

    Raises:
        UserError: before anything is trained, for all that can be known by then.
    """
    typed_run = _typed_run(config)
    folder = Path(HydraConfig.get().runtime.output_dir).absolute()
    from distill_runner.running import run_student  # imports torch

    return run_student(typed_run, folder, OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]


def _typed_run(config: DictConfig) -> "RunConfig":
    from distill_runner.config import RunConfig, typed

    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    return typed(
        RunConfig,
        {
            "teacher": {key: resolved["teacher"][key] for key in ("name", "source")},
            "method": resolved["method"]["name"],
            **{key: resolved[key] for key in ("stages", "runtime", "store", "tracker", "seed", "plan")},
        },
    )


def _names(config: DictConfig) -> dict[str, Any]:
    return {"task": config.task.name, "method": config.method.name, "seed": config.seed}


def _told(error: Exception) -> int:
    """Print an error in one or two lines; the exit code."""
    from distill_runner.explain import explain

    logging.getLogger(__name__).debug("%s", traceback.format_exc())
    print(explain(error, config_folder()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
