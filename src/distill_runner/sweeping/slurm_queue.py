"""A sweep's points in Slurm's queue: ``sweep.wait=false`` submits them and does not wait.

The same command later reports and resumes the sweep.
"""

import logging
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from distill_runner.common.errors import UserError, override
from distill_runner.pipeline import status
from distill_runner.sweeping.points import Grid
from distill_runner.sweeping.sweep import shared_rounds

log = logging.getLogger(__name__)

Submit = Callable[[Sequence[Sequence[str]], str | None], Sequence[str]]
"""Queues an array with a job for each list of overrides, to start after the arrays that are named, if any (``1:2``);
returns the job ids."""
Item = TypeVar("Item")
ARRAY_SIZE = 1000
"""Jobs of an array; Slurm refuses more than 1,001 unless its ``MaxArraySize`` is set."""
JOB = "slurm_job"
"""File in a point's folder that names its last job."""


def submit_grid(grid: Grid, submit: Submit, retry_failed: bool) -> None:
    """Queue every point that is neither done nor queued nor running, after the stages that several points share.

    Each shared stage is a separate job. Points start when these jobs have ended. If such a job failed, each point tries
    to build the stage itself. Points that failed are skipped unless ``retry_failed``.
    """
    log.info("%s", grid)
    files = {point: point.folder / JOB for point in grid.points}
    recorded = {point: file.read_text(encoding="utf-8") for point, file in files.items() if file.is_file()}
    alive = queued_jobs() if recorded else set()
    todo = [
        point
        for point in grid.to_train(retry_failed)
        if recorded.get(point) not in alive and point.result()["status"] != "running"
    ]
    array = None
    for ready in shared_rounds(todo):
        builders = [[*missing.builder.overrides, f"stage={missing.stage.name}"] for missing in ready]
        array = ":".join(submit(part, array)[0].partition("_")[0] for part in in_arrays(builders))
    for part in in_arrays(todo):
        for point, job in zip(part, submit([point.overrides for point in part], array), strict=True):
            if point.result()["status"] == "not run":  # the status of a paused or killed point says more
                status.write_status(point.folder, "queued", point.names)
            files[point].write_text(job, encoding="utf-8")
    if todo:
        log.info("queued %d points; run the same command again to see their status", len(todo))


def queued_jobs() -> set[str]:
    """Return the ids of this user's waiting and running jobs, each job of an array separately.

    Raises:
        UserError: ``squeue`` is missing or fails.
    """
    try:
        command = ["squeue", "--me", "-h", "-r", "-o", "%i"]
        output = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        problem = f"squeue fails: {getattr(error, 'stderr', None) or error}"
        raise UserError("sweep.wait", False, problem, "Run it on a machine with Slurm's commands.") from error
    return set(output.split())


def submitter(launcher: Any, common: Sequence[str]) -> Submit:
    """Return a function that queues jobs as submitit's Slurm launcher does, but does not wait for them.

    Args:
        launcher: Hydra's launcher, which each job calls.
        common: overrides that are added to every job.
    Raises:
        UserError: ``launcher`` is not the Slurm launcher.
    """
    if getattr(launcher, "_EXECUTOR", None) != "slurm":
        remedy = "Take " + override("hydra/launcher", "submitit_slurm") + ", or leave out sweep.wait."
        raise UserError("sweep.wait", False, "needs Slurm's queue", remedy)
    import submitit
    from hydra.core.singleton import Singleton
    from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf

    def submit(jobs: Sequence[Sequence[str]], dependency: str | None) -> list[str]:
        settings = {key: value for key, value in launcher.params.items() if value is not None}
        folder, retries = settings.pop("submitit_folder"), settings.pop("max_num_timeout")
        if dependency:
            extra = settings.get("additional_parameters", {})
            settings["additional_parameters"] = {**extra, "dependency": f"afterany:{dependency}"}
        executor = submitit.AutoExecutor(cluster="slurm", folder=folder, slurm_max_num_timeout=retries)
        shared = BaseQueueConf.__dataclass_fields__
        executor.update_parameters(**{key if key in shared else f"slurm_{key}": settings[key] for key in settings})
        number = range(len(jobs))
        places, ids = ["hydra.sweep.dir"] * len(jobs), [f"job_id_for_{index}" for index in number]
        state = [Singleton.get_state()] * len(jobs)
        queued = executor.map_array(launcher, [[*job, *common] for job in jobs], places, number, ids, state)
        return [job.job_id for job in queued]

    return submit


def in_arrays(jobs: Sequence[Item]) -> list[Sequence[Item]]:
    """Return ``jobs`` in parts that Slurm takes as arrays."""
    return [jobs[start : start + ARRAY_SIZE] for start in range(0, len(jobs), ARRAY_SIZE)]
