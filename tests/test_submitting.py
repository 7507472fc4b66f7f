"""Sweeps that are queued and left: what is put into the queue, behind what, and what the same command finds later."""

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline import status
from distill_runner.pipeline.resolving import resolve
from distill_runner.pipeline.store import Store
from distill_runner.sweeping import slurm_queue
from distill_runner.sweeping.points import Grid, GridPoint, SweepConfig
from distill_runner.sweeping.slurm_queue import queued_jobs, submit_grid, submitter

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
    monkeypatch.setattr(slurm_queue, "queued_jobs", lambda: made.alive)
    return made


@pytest.fixture
def grid(compose: Compose, tmp_path: Path) -> Grid:
    """Two students of one chain: teacher, assistant, student."""

    def made(seed: int) -> GridPoint:
        few = ("assistant.num_layers=3", "student.num_layers=1")
        run = compose("method=takd", f"store.dir={tmp_path}", f"seed={seed}", *few)
        stage = resolve(run.stages, "student", "fp32")
        return GridPoint((f"seed={seed}",), tmp_path / "runs" / str(seed), stage.key, {}, run, stage)

    return Grid(lambda overrides: GridPoint(tuple(overrides), tmp_path, "", {}), [made(1), made(2)])


def test_points_wait_for_what_they_share(grid: Grid, queue: Queue, tmp_path: Path) -> None:
    submit_grid(grid, queue, tmp_path, retry_failed=False)
    assert queue.arrays == [(["stage=teacher"], None), (["stage=assistant"], "1"), (["seed=1", "seed=2"], "2")]
    assert [point.result()["status"] for point in grid.points] == ["queued"] * 2
    assert [point.result()["job"] for point in grid.points] == ["3_0", "3_1"]


def test_the_same_command_queues_what_has_left_the_queue(grid: Grid, queue: Queue, tmp_path: Path) -> None:
    submit_grid(grid, queue, tmp_path, retry_failed=False)
    submit_grid(grid, queue, tmp_path, retry_failed=False)
    assert len(queue.arrays) == 3  # all are queued
    chain = grid.points[0].stage
    while chain is not None and (chain := chain.teacher):
        Store(tmp_path).get(chain.spec, lambda folder: None)
    queue.alive.remove("3_1")  # cancelled
    submit_grid(grid, queue, tmp_path, retry_failed=False)
    assert queue.arrays[3:] == [(["seed=2"], None)]
    jobs = json.loads((tmp_path / "jobs.json").read_text())
    assert [jobs[point.key] for point in grid.points] == ["3_0", "4_0"]
    assert [point.result()["job"] for point in grid.points] == ["3_0", "4_0"]  # read by sweeps with other points


def test_a_larger_grid_leaves_alone_what_a_smaller_one_queued(grid: Grid, queue: Queue, tmp_path: Path) -> None:
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
    submit_grid(Grid(grid.point, grid.points[:1]), queue, tmp_path / "small", retry_failed=False)
    submit_grid(grid, queue, tmp_path / "large", retry_failed=False)
    assert [jobs for jobs, _ in queue.arrays] == [["seed=1"], ["seed=2"]]


def test_points_that_run_failed_or_are_done_are_left_alone(grid: Grid, queue: Queue, tmp_path: Path) -> None:
    going, failed = grid.points
    failed.fail("broken")
    with status.locked_run(going.folder):
        status.write_status(going.folder, "running", going.names)
        submit_grid(grid, queue, tmp_path, retry_failed=False)
    assert queue.arrays == []
    submit_grid(grid, queue, tmp_path, retry_failed=True)  # the first one was killed meanwhile
    assert queue.arrays[-1][0] == ["seed=1", "seed=2"]


def test_many_points_are_queued_as_several_arrays(
    grid: Grid, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm refuses ``--array=0-1999`` by default, after the stages that the points share were queued."""
    monkeypatch.setattr(slurm_queue, "max_array_size", lambda: 1)
    submit_grid(grid, queue, tmp_path, retry_failed=False)
    assert queue.arrays[2:] == [(["seed=1"], "2"), (["seed=2"], "2")]
    assert [point.result()["job"] for point in grid.points] == ["3_0", "4_0"]
    jobs = json.loads((tmp_path / "jobs.json").read_text())
    assert [jobs[point.key] for point in grid.points] == ["3_0", "4_0"]
    assert [list(part) for part in slurm_queue.in_arrays(range(3))] == [[0], [1], [2]]


def test_an_array_that_slurm_refuses_leaves_the_earlier_ones_recorded(
    grid: Grid, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command would queue the first thousand points a second time."""
    monkeypatch.setattr(slurm_queue, "max_array_size", lambda: 1)

    def submit(jobs: Sequence[Sequence[str]], after: str | None) -> list[str]:
        if jobs[0][-1] == "seed=2":
            raise RuntimeError("sbatch: error: QOSMaxSubmitJobPerUserLimit")
        return queue(jobs, after)

    with pytest.raises(RuntimeError):
        submit_grid(grid, submit, tmp_path, retry_failed=False)
    assert json.loads((tmp_path / "jobs.json").read_text()) == {grid.points[0].key: "3_0"}


@pytest.mark.parametrize(
    ("output", "size"),
    [
        ("Licenses = (null)\nMaxArraySize            = 10001\n", 10001),
        ("MaxArraySize = 0\n", 1001),
        ("", 1001),
        (None, 1001),
    ],
)
def test_slurm_is_asked_for_the_size_of_arrays(output: str | None, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_arguments: object, **_options: object) -> SimpleNamespace:
        if output is None:
            raise FileNotFoundError("scontrol")
        return SimpleNamespace(stdout=output)

    monkeypatch.setattr(subprocess, "run", run)
    assert slurm_queue.max_array_size() == size


def test_other_launchers_have_no_queue() -> None:
    with pytest.raises(UserError, match=r"sweep\.wait"):
        submitter(SimpleNamespace(), [])


def test_no_slurm_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="squeue"):
        queued_jobs()


def test_jobs_are_read_from_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 0, stdout="2_0\n2_1\n7\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert queued_jobs() == {"2_0", "2_1", "7"}


def test_halving_needs_scores() -> None:
    with pytest.raises(UserError, match=r"sweep\.halving"):
        SweepConfig(wait=False, halving=2)
