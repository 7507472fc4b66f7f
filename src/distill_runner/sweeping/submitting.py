"""``sweep.wait=false``: queue a sweep with Slurm and return. The same command later reports and resumes the sweep."""

import json
import logging
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distill_runner.common.errors import UserError
from distill_runner.pipeline import status
from distill_runner.sweeping.points import Grid, GridPoint
from distill_runner.sweeping.sweep import missing_stages, ready_of, summary, to_train

log = logging.getLogger(__name__)

Submit = Callable[[Sequence[Sequence[str]], str | None], Sequence[str]]
"""Queues a job for each list of overrides, to start after the array that is named, if any; returns the job ids."""
JOBS = "jobs.json"


def submit_grid(grid: Grid, submit: Submit, folder: Path, retry_failed: bool) -> None:
    """Queue every point that is neither done nor queued nor running, after the stages that several points share.

    Each shared stage is a separate job. Points start when these jobs have ended. If such a job failed, each point tries
    to build the stage itself. Points that failed are skipped unless ``retry_failed``.

    Args:
        folder: folder of the sweep; its file ``jobs.json`` names the job of each point.
    """
    log.info("%s", summary(grid))
    known: dict[str, str] = _read(folder / JOBS)
    # The status of a point also names its job where another sweep, such as a smaller grid, has queued it.
    jobs_of = {point.key: {known.get(point.key), point.result().get("job")} for point in grid.points}
    alive = queued_jobs() if any(any(jobs) for jobs in jobs_of.values()) else set()
    todo = [
        point
        for point in to_train(grid, retry_failed)
        if not jobs_of[point.key] & alive and point.result()["status"] != "running"
    ]
    before = None
    missing = [found for found in missing_stages(todo) if len(found.users) > 1]
    while missing:
        ready = ready_of(missing)
        log.info(
            "first building the stages that several points share: %s", ", ".join(found.stage.name for found in ready)
        )
        builders = [[*found.builder.overrides, f"stage={found.stage.name}"] for found in ready]
        before = _array(submit(builders, before))
        missing = [found for found in missing if found not in ready]
    if todo:
        jobs = submit([point.overrides for point in todo], before)
        for point, job in zip(todo, jobs, strict=True):
            _queue(point, job)
        status.write_json(folder / JOBS, known | {point.key: job for point, job in zip(todo, jobs, strict=True)})
        log.info("queued %d points; run the same command again to see their status", len(todo))


def queued_jobs() -> set[str]:
    """Return the ids of this user's waiting and running jobs, each job of an array separately.

    Raises:
        UserError: ``squeue`` is missing or fails.
    """
    try:
        found = subprocess.run(["squeue", "--me", "-h", "-r", "-o", "%i"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or error
        raise UserError(
            "sweep.wait", False, f"squeue fails: {why}", "Run it on a machine with Slurm's commands."
        ) from error
    return set(found.stdout.split())


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

    def submit(jobs: Sequence[Sequence[str]], after: str | None) -> list[str]:
        settings = {key: value for key, value in launcher.params.items() if value is not None}
        folder, retries = settings.pop("submitit_folder"), settings.pop("max_num_timeout")
        if after:
            extra = settings.get("additional_parameters", {})
            settings["additional_parameters"] = {**extra, "dependency": f"afterany:{after}"}
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
    if point.result()["status"] == "not run":  # the status of a paused or killed point says more
        status.write(point.folder, "queued", {**point.names, "job": job})


def _array(jobs: Sequence[str]) -> str:
    """Return the id of the Slurm array that the jobs belong to."""
    return jobs[0].partition("_")[0]


def _read(file: Path) -> dict[str, str]:
    return dict(json.loads(file.read_text())) if file.exists() else {}
