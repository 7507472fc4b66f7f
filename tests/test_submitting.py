"""Sweeps that are queued and left: what is put into the queue, behind what, and what the same command finds later."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline import status
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.store import Store
from distill_runner.sweeping import sweep
from distill_runner.sweeping.points import Grid, GridPoint
from distill_runner.sweeping.sweep import queued_jobs, submit_grid, submitter

Compose = Callable[..., RunConfig]


class Queue:
    """Slurm's, as far as it is asked: arrays are numbered from 1."""

    def __init__(self) -> None:
        self.arrays: list[tuple[list[str], str | None]] = []
        self.alive: set[str] = set()

    def __call__(self, jobs: Sequence[Sequence[str]], after: str | None) -> list[str]:
        self.arrays.append(([job[-1] for job in jobs], after))
        ids = [f"{len(self.arrays)}_{number}" for number in range(len(jobs))]
        self.alive |= set(ids)
        return ids


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    monkeypatch.setattr(sweep, "queued_jobs", lambda: made.alive)
    return made


@pytest.fixture
def grid(compose: Compose, tmp_path: Path) -> Grid:
    """Two students of one chain: teacher, assistant, student."""

    def made(seed: int) -> GridPoint:
        few = ("assistant.num_layers=3", "student.num_layers=1")
        run = compose("method=takd", f"store.dir={tmp_path}", f"seed={seed}", *few)
        stage = resolve_stage(run.stages, "student", "fp32")
        return GridPoint((f"seed={seed}",), tmp_path / "runs" / str(seed), stage.key, {}, run, stage)

    return Grid(lambda overrides: GridPoint(tuple(overrides), tmp_path, "", {}), [made(1), made(2)])


def jobs(grid: Grid) -> list[str]:
    return [(point.folder / "slurm_job").read_text() for point in grid.points]


def test_points_wait_for_what_they_share(grid: Grid, queue: Queue) -> None:
    submit_grid(grid, queue, retry_failed=False)
    assert queue.arrays == [(["stage=teacher"], None), (["stage=assistant"], "1"), (["seed=1", "seed=2"], "2")]
    assert [point.result()["status"] for point in grid.points] == ["queued"] * 2
    assert jobs(grid) == ["3_0", "3_1"]


def test_the_same_command_queues_what_has_left_the_queue(grid: Grid, queue: Queue, tmp_path: Path) -> None:
    """Also if another sweep has queued it, such as a smaller grid."""
    submit_grid(Grid(grid.point, grid.points[:1]), queue, retry_failed=False)
    submit_grid(grid, queue, retry_failed=False)
    assert [jobs for jobs, _ in queue.arrays] == [["seed=1"], ["seed=2"]]
    submit_grid(grid, queue, retry_failed=False)
    assert len(queue.arrays) == 2  # all are queued
    chain = grid.points[0].stage
    while chain is not None and (chain := chain.teacher):
        Store(tmp_path).get(chain.spec, lambda folder: None)
    queue.alive.remove("2_0")  # cancelled
    submit_grid(grid, queue, retry_failed=False)
    assert queue.arrays[2:] == [(["seed=2"], None)]
    assert jobs(grid) == ["1_0", "3_0"]


def test_points_that_run_failed_or_are_done_are_left_alone(grid: Grid, queue: Queue, tmp_path: Path) -> None:
    going, failed = grid.points
    failed.fail("broken")
    with status.locked_run(going.folder):
        status.write_status(going.folder, "running", going.names)
        submit_grid(grid, queue, retry_failed=False)
    assert queue.arrays == []
    submit_grid(grid, queue, retry_failed=True)  # the first one was killed meanwhile
    assert queue.arrays[-1][0] == ["seed=1", "seed=2"]


def test_many_points_are_queued_as_several_arrays(grid: Grid, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that Slurm refuses leaves the earlier ones recorded: they would be queued a second time."""
    monkeypatch.setattr(sweep, "ARRAY_SIZE", 1)

    def submit(jobs: Sequence[Sequence[str]], after: str | None) -> list[str]:
        if jobs[0][-1] == "seed=2":
            raise RuntimeError("sbatch: error: QOSMaxSubmitJobPerUserLimit")
        return queue(jobs, after)

    with pytest.raises(RuntimeError):
        submit_grid(grid, submit, retry_failed=False)
    assert queue.arrays[2:] == [(["seed=1"], "2")]
    submit_grid(grid, queue, retry_failed=False)
    assert queue.arrays[-1][0] == ["seed=2"]
    assert [list(part) for part in sweep.in_arrays(range(3))] == [[0], [1], [2]]


def test_other_launchers_have_no_queue() -> None:
    with pytest.raises(UserError, match=r"sweep\.wait"):
        submitter(SimpleNamespace(), [])


def test_jobs_are_read_from_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer = subprocess.CompletedProcess([], 0, stdout="2_0\n2_1\n7\n")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *_, **__: answer)
        assert queued_jobs() == {"2_0", "2_1", "7"}
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="squeue"):
        queued_jobs()


def test_an_array_begins_after_the_end_of_another_however_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point whose teacher failed says so itself; with ``afterok`` it would wait for ever."""
    settings: dict[str, Any] = {}

    class SlurmLauncher:
        params: ClassVar = {"submitit_folder": "jobs", "max_num_timeout": 3, "partition": "gpu", "timeout_min": 5}

    class AutoExecutor:
        def __init__(self, **options: Any) -> None:
            settings.update(options)

        def update_parameters(self, **options: Any) -> None:
            settings.update(options)

        def map_array(self, *columns: Any) -> list[Any]:
            return [SimpleNamespace(job_id=f"9_{number}") for number in range(len(columns[1]))]

    shared = SimpleNamespace(BaseQueueConf=SimpleNamespace(__dataclass_fields__={"timeout_min": None}))
    for name, module in (
        ("submitit", SimpleNamespace(AutoExecutor=AutoExecutor)),
        ("hydra_plugins.hydra_submitit_launcher", SimpleNamespace(config=shared)),
        ("hydra_plugins.hydra_submitit_launcher.config", shared),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    assert submitter(SlurmLauncher(), [])([["seed=1"], ["seed=2"]], "7") == ["9_0", "9_1"]
    assert (settings["timeout_min"], settings["slurm_partition"]) == (5, "gpu")
    assert settings["slurm_additional_parameters"] == {"dependency": "afterany:7"}
