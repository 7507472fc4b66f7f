"""Runs each point of a sweep in a separate process, so that the crash of one point does not affect the others.

The processes are forked from a server that has imported what points need; a point starts in a tenth of a second. On a
machine with one GPU, where a process also has to load CUDA and its libraries, the next point takes over the process of
a point that has completed.
"""

import logging
import multiprocessing
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log
from omegaconf import DictConfig, OmegaConf

from distill_runner.common import process
from distill_runner.common.errors import TrainingError, TrainingPaused, UserError, exit_cause, message_and_exit_code
from distill_runner.common.files import resource_error
from distill_runner.pipeline import status

log = logging.getLogger(__name__)

COMPLETED, FAILED, INTERRUPTED = 3, 4, 130
"""Exit codes of points that have recorded how they ended; 0 and 1 could come from other code that ends the process."""
GRACE_SECONDS = 3.0
"""Seconds from the end of a sweep to SIGTERM for its points.

On Ctrl-C the sweep ends while its points, which got the signal too, are still saving. A second signal would disturb
them.
"""
_WAITING: list[tuple[BaseProcess, Connection]] = []
"""The process of the last point, if it waits for the next one."""
end_with_sweep = cache(process.end_with_parent)
"""Ends a launcher's worker, which may outlive its sweep. Cached, since a worker runs several points."""


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


def run_isolated(run: Callable[[DictConfig], Mapping[str, Any]], config: DictConfig, preload: str) -> PointResult:
    """Call ``run`` in a separate process, and record in the point's folder how the process ended.

    Args:
        preload: module that the fork server imports once for all points.

    Returns:
        The point's status.
    Raises:
        KeyboardInterrupt: after the point, which got the same signal, has saved its state.
    """
    folder = Path(HydraConfig.get().runtime.output_dir).absolute()
    if multiprocessing.current_process().name != "MainProcess":
        end_with_sweep()
    process.use_forkserver(preload)
    with process.ignored_sigterm():  # which Slurm sends to all processes of a job before it queues the job again
        ensure_running()
    # Without the classes of launcher settings, which not every process can unpickle.
    hydra_config = OmegaConf.create(OmegaConf.to_container(HydraConfig.instance().cfg, resolve=False))
    child, connection = _WAITING.pop() if _WAITING and _WAITING[0][0].is_alive() else _started()
    connection.send((run, config, hydra_config))
    try:
        exit_code = connection.recv()
        _WAITING[:] = [(child, connection)]
    except EOFError:  # the process has ended
        child.join()
        exit_code = child.exitcode
    except KeyboardInterrupt:
        child.join()
        raise
    if exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    assert exit_code is not None
    state = status.read_run(folder) or {}
    if exit_code not in (COMPLETED, FAILED) and state.get("status") != "done":
        error = exit_cause(exit_code)
        log.error("%s", error)
        status.write_status(folder, "failed", state, error)
    recorded = status.read_run(folder) or {"status": "planned"}
    if exit_code == FAILED:  # the folder may have a finished run, whose repetition has failed
        recorded = {**recorded, "status": "failed"}
    return PointResult(recorded)


def _started() -> tuple[BaseProcess, Connection]:
    """Start a process for points, which ends when this one closes the connection."""
    connection, other = multiprocessing.Pipe()
    child = multiprocessing.Process(target=_run_points, args=(other,))
    child.start()
    other.close()
    Finalize(None, connection.close, exitpriority=1)  # before multiprocessing waits for its processes
    return child, connection


def _run_points(connection: Connection) -> None:
    """Run the points of a connection in this new process: one, or all that follow on a machine with one GPU."""
    process.end_with_parent(GRACE_SECONDS)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            _run_point(*connection.recv())
            import torch  # which the point has imported

            from distill_runner.training.devices import release_gpu

            if torch.cuda.device_count() != 1:
                sys.exit(COMPLETED)
            process.collect_garbage()
            release_gpu()
            connection.send(COMPLETED)


def _run_point(run: Callable[[DictConfig], Mapping[str, Any]], config: DictConfig, hydra_config: Any) -> None:
    """Run a point: restore Hydra's state, call ``run``, and log an error."""
    HydraConfig.instance().cfg = hydra_config
    hydra = HydraConfig.get()
    configure_log(hydra_config.hydra.job_logging, hydra.verbose)
    try:
        with process.sigterm_as_interrupt():
            run(config)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except TrainingPaused as pause:
        log.info("paused %s", pause)
    except BaseException as error:
        folder = Path(hydra.runtime.output_dir).absolute()
        reported = resource_error(error) or error
        if isinstance(reported, UserError | TrainingError):
            log.error("%s", message_and_exit_code(reported)[0])
        else:
            log.exception("this point failed")
        recorded = status.read_run(folder) or {}
        if recorded.get("status") != "done":  # else only its repetition failed, such as a further test split
            status.write_status(folder, "failed", recorded, f"{type(error).__name__}: {error}")
        sys.exit(FAILED)
