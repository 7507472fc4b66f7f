"""A sweep's points in Slurm's queue: ``sweep.wait=false`` submits them and does not wait.

The same command later reports and resumes the sweep.
"""

import json
import logging
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from distill_runner.common.errors import UserError
from distill_runner.pipeline import status
from distill_runner.sweeping.points import Grid, GridPoint
from distill_runner.sweeping.remaining import log_shared, missing_stages, ready_of, summary, to_train

log = logging.getLogger(__name__)

Submit = Callable[[Sequence[Sequence[str]], str | None], Sequence[str]]
"""Queues an array with a job for each list of overrides, to start after the arrays that are named, if any (``1:2``);
returns the job ids."""
Job = TypeVar("Job")
DEFAULT_ARRAY_SIZE = 1001
JOBS = "jobs.json"
"""File of a sweep that is queued with Slurm: the job of each point."""


def submit_grid(grid: Grid, submit: Submit, folder: Path, retry_failed: bool) -> None:
    """Queue every point that is neither done nor queued nor running, after the stages that several points share.

    Each shared stage is a separate job. Points start when these jobs have ended. If such a job failed, each point tries
    to build the stage itself. Points that failed are skipped unless ``retry_failed``.

    Args:
        folder: folder of the sweep; its file ``jobs.json`` names the job of each point.
    """
    log.info("%s", summary(grid))
    recorded: dict[str, str] = (
        json.loads((folder / JOBS).read_text(encoding="utf-8")) if (folder / JOBS).exists() else {}
    )
    # The status of a point also names its job where another sweep, such as a smaller grid, has queued it.
    jobs_of = {point.key: {recorded.get(point.key), point.result().get("job")} for point in grid.points}
    alive = queued_jobs() if any(any(jobs) for jobs in jobs_of.values()) else set()
    todo = [
        point
        for point in to_train(grid, retry_failed)
        if not jobs_of[point.key] & alive and point.result()["status"] != "running"
    ]
    array = None
    shared = [missing for missing in missing_stages(todo) if len(missing.users) > 1]
    while shared:
        ready = ready_of(shared)
        log_shared(ready)
        builders = [[*missing.builder.overrides, f"stage={missing.stage.name}"] for missing in ready]
        array = ":".join(submit(part, array)[0].partition("_")[0] for part in in_arrays(builders))
        shared = [missing for missing in shared if missing not in ready]
    for part in in_arrays(todo):
        jobs = submit([point.overrides for point in part], array)
        for point, job in zip(part, jobs, strict=True):
            _queue(point, job)
        recorded |= {point.key: job for point, job in zip(part, jobs, strict=True)}
        status.write_json(folder / JOBS, recorded)  # now, since Slurm may refuse the next array
    if todo:
        log.info("queued %d points; run the same command again to see their status", len(todo))


def queued_jobs() -> set[str]:
    """Return the ids of this user's waiting and running jobs, each job of an array separately.

    Raises:
        UserError: ``squeue`` is missing or fails.
    """
    try:
        output = subprocess.run(
            ["squeue", "--me", "-h", "-r", "-o", "%i"], capture_output=True, text=True, encoding="utf-8", check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or error
        raise UserError(
            "sweep.wait", False, f"squeue fails: {why}", "Run it on a machine with Slurm's commands."
        ) from error
    return set(output.stdout.split())


def submitter(launcher: Any, common: Sequence[str]) -> Submit:
    """Return a function that queues jobs as submitit's Slurm launcher does, but does not wait for them.

    Args:
        launcher: Hydra's launcher, which each job calls.
        common: overrides that are added to every job.
    Raises:
        UserError: ``launcher`` is not the Slurm launcher.
    """
    if getattr(launcher, "_EXECUTOR", None) != "slurm":
        remedy = "Take hydra/launcher=submitit_slurm, or leave out sweep.wait."
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


def _queue(point: GridPoint, job: str) -> None:
    if point.result()["status"] in ("not run", "queued"):  # the status of a paused or killed point says more
        status.write_status(point.folder, "queued", {**point.names, "job": job})


def in_arrays(jobs: Sequence[Job]) -> list[Sequence[Job]]:
    """Return ``jobs`` in parts that Slurm takes as arrays."""
    size = max_array_size()
    return [jobs[start : start + size] for start in range(0, len(jobs), size)]


def max_array_size() -> int:
    """Return how many jobs an array can have: Slurm's ``MaxArraySize``, or its default if Slurm does not say."""
    try:
        command = ["scontrol", "show", "config"]
        output = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        output = ""
    size = re.search(r"^MaxArraySize\s*=\s*(\d+)", output, re.MULTILINE)
    return int(size[1]) if size and int(size[1]) else DEFAULT_ARRAY_SIZE
