"""Runs each point of a sweep in a separate process, so that the crash of one point does not affect the others.

The processes are forked from a server that has imported what points need; a point starts in a tenth of a second.
"""

import logging
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log
from omegaconf import DictConfig, OmegaConf

from distill_runner.common.errors import TrainingError, TrainingPaused, UserError, exit_cause, message_and_exit_code
from distill_runner.common.files import resource_error
from distill_runner.common.process import POLL_SECONDS, end_with_parent, use_forkserver
from distill_runner.pipeline import status

log = logging.getLogger(__name__)

RunFunction = Callable[[DictConfig], Mapping[str, Any]]
FAILED, COMPLETED, INTERRUPTED = 1, 3, 130
"""Exit codes of points.

A finished or paused point exits with ``COMPLETED``: code 0 could come from other code that ends the process.
"""
SERVER_GONE = 255
"""Exit code that multiprocessing reports for a process whose fork server has ended."""
STARTS = 5
GRACE_SECONDS = 3.0
"""Seconds from the end of a sweep to SIGTERM for its points.

On Ctrl-C the sweep ends while its points, which got the signal too, are still saving. A second signal would disturb
them.
"""


class PointResult(dict[str, Any]):
    """Status of a point, which is also a number for sweepers that optimize one: the score to maximize.

    It is the score by which grids choose: on held-out examples where these select the epoch, else the reported one.
    """

    def __float__(self) -> float:
        """Return the score, from 0 to 1.

        Raises:
            TrainingError: the point failed, or is not finished.
        """
        if self.get("status") != "done" or self.get("score") is None:
            raise TrainingError(f"this point is {self.get('status')}: {self.get('error') or 'it has no score'}")
        return float((self.get("selection") or self)["score"])


def run_isolated(run: RunFunction, config: DictConfig, preload: str) -> PointResult:
    """Call ``run`` in a separate process, and record in the point's folder how the process ended.

    Args:
        preload: module that the fork server imports once for all points.

    Returns:
        The point's status.
    Raises:
        KeyboardInterrupt: after the point, which got the same signal, has saved its state.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir).absolute()
    if multiprocessing.current_process().name != "MainProcess":  # a launcher's worker, which may outlive its sweep
        _end_with_sweep()
    use_forkserver(preload, default=True)
    process = _started(run, config, _plain(HydraConfig.instance().cfg))
    try:
        process.join()
        _wait_for_orphan(process, folder)
    except KeyboardInterrupt:
        process.join()
        raise
    if process.exitcode == INTERRUPTED:
        raise KeyboardInterrupt
    state = status.read_run(folder)
    assert process.exitcode is not None
    if not _is_recorded(process.exitcode, state["status"] if state else None):
        error = exit_cause(process.exitcode)
        log.error("%s", error)
        status.write_status(folder, "failed", state or {}, error)
    recorded = status.read_run(folder) or {"status": "planned"}
    if process.exitcode == FAILED:  # the folder may have a finished run, whose repetition has failed
        recorded = {**recorded, "status": "failed"}
    return PointResult(recorded)


def _is_recorded(exitcode: int, state: str | None) -> bool:
    """Return whether ``state`` is how the point ended, and not what was recorded before it ended or started.

    Args:
        state: the point's status after its end; None if there is none.
    """
    if exitcode == SERVER_GONE:
        return state not in (None, "running", "killed")
    return exitcode == COMPLETED or state == "done" or (exitcode == FAILED and state == "failed")


def _started(*arguments: Any) -> BaseProcess:
    """Start a process that is forked from the server, with a new server if the old one has ended.

    Before Slurm ends a job that it will queue again, it signals all processes of the job. The server ends at once.
    """
    for trials_left in reversed(range(STARTS)):
        process = multiprocessing.Process(target=_run_point, args=arguments)
        try:
            process.start()
            break
        except (EOFError, ConnectionError):
            if not trials_left:
                raise
            log.warning("the fork server of the points was ended from outside: starting a new one")
            time.sleep(POLL_SECONDS)
    return process


def _wait_for_orphan(process: BaseProcess, folder: Path) -> None:
    """Wait for a point whose fork server has ended: the point continues, but its exit code is lost."""
    while process.exitcode == SERVER_GONE and (status.read_run(folder) or {}).get("status") == "running":
        time.sleep(POLL_SECONDS)


def _plain(config: Any) -> Any:
    """Return ``config`` without the classes of launcher settings, which not every process can pickle."""
    return OmegaConf.create(OmegaConf.to_container(config, resolve=False))


def _run_point(run: RunFunction, config: DictConfig, hydra_config: Any) -> None:
    """Run a point in the new process: restore Hydra's state, call ``run``, and log an error."""
    end_with_parent(GRACE_SECONDS)
    HydraConfig.instance().cfg = hydra_config
    hydra = HydraConfig.get()
    configure_log(hydra_config.hydra.job_logging, hydra.verbose)
    try:
        run(config)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except TrainingPaused as pause:
        log.info("paused %s", pause)
    except BaseException as error:
        folder = Path(hydra.runtime.output_dir).absolute()
        if isinstance(error, UserError | TrainingError):
            log.error("%s", message_and_exit_code(error)[0])
        elif full := resource_error(error):
            log.error("%s", full)
        else:
            log.exception("this point failed")
        recorded = status.read_run(folder) or {}
        if recorded.get("status") != "done":  # else only its repetition failed, such as a further test split
            status.write_status(folder, "failed", recorded, f"{type(error).__name__}: {error}")
        sys.exit(FAILED)
    sys.exit(COMPLETED)


@cache
def _end_with_sweep() -> None:
    """End this worker soon after its sweep ends. Cached, since a worker runs several points."""
    end_with_parent()
