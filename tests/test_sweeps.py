"""Sweeps: which points there are, what becomes of them under faults, and what is found again."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from filelock import BaseFileLock
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from distill_runner.common.errors import UserError, exit_cause
from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline import status
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.store import Store
from distill_runner.sweeping import isolation
from distill_runner.sweeping.halving import by_cell, rungs, survivors
from distill_runner.sweeping.points import Grid, GridPoint, holds
from distill_runner.sweeping.sweep import missing_stages, require_points, run_grid
from distill_runner.training.config import Runtime
from helpers.command import Ended, distill_run
from helpers.fake_results import failed, with_specs

Compose = Callable[..., RunConfig]
ROOT = Path(__file__).parents[1]
FAULTS = """
import os, signal, sys
from distill_runner.methods.predictions import HardLabels

class Raises(HardLabels):
    def forward(self, *_):
        raise ValueError("this term is broken")

class Exits(HardLabels):
    def forward(self, *_):
        sys.exit(3)

class Kills(HardLabels):
    def forward(self, *_):
        os.kill(os.getpid(), signal.SIGKILL)

class StopsServer(HardLabels):
    def forward(self, *arguments):
        os.kill(os.getppid(), signal.SIGTERM)  # as Slurm does before it queues a job again
        return super().forward(*arguments)
"""
SOUND = "hard_labels"


# Conditions.

VALUES = {"loss": {"eta": 0.5, "lambda": 0.7}, "method": {"name": "alp"}, "seed": 3, "lr": 1e-5, "loss_eta": 9}
POINT = OmegaConf.create(VALUES)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("loss.eta + loss.lambda <= 1", False),
        ("method.name in ['nkd', 'rkd'] or (lr == 1e-5 and not seed < 3)", True),
        ("method != 'loss.eta' and loss.eta == 0.5 and loss_eta == 9", True),
    ],
)
def test_a_condition_reads_the_keys_of_a_point(condition: str, expected: bool) -> None:
    assert holds(condition, POINT) is expected


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        ("method.name == alp", "there is no key alp with a value"),
        ("loss != 'alp'", "there is no key loss with a value"),
        ("loss.eta < 'x'", "is not a condition"),
    ],
)
def test_a_condition_that_cannot_be_read_is_refused(condition: str, problem: str) -> None:
    with pytest.raises(UserError, match=re.escape(problem)) as raised:
        holds(condition, POINT)
    assert raised.value.key == "sweep.where"


def test_a_long_condition_is_not_repeated_whole() -> None:
    with pytest.raises(UserError) as raised:
        holds("1 + " * 1000, POINT)
    assert len(str(raised.value)) < 500


# Halving.


def test_rungs() -> None:
    assert rungs(20, 3) == [3, 7]
    assert rungs(8, 2) == [2, 4]
    assert rungs(3, 3) == rungs(2, 2) == [1], "settings are compared once after each epoch"


@pytest.mark.parametrize(
    ("epochs", "schedule", "said"),
    [
        (0, None, "optim.epochs is 0"),
        (None, None, "optim.epochs is null"),
        # Both cuts would rank the settings by the accuracy of a head with random weights.
        (9, SimpleNamespace(classification="at_end", rule="pid"), "which schedule=pid leaves to the end"),
    ],
)
def test_points_without_scores_of_epochs_cannot_be_halved(epochs: int | None, schedule: Any, said: str) -> None:
    config = SimpleNamespace(optim=SimpleNamespace(epochs=epochs), method=SimpleNamespace(schedule=schedule))
    point = GridPoint((), Path(), "0a1b", {}, stage=Mock(config=config))
    with pytest.raises(UserError, match=said):
        require_points(Grid(lambda _: point, [point]), 2)


def test_the_best_survive_and_all_that_tie_with_them() -> None:
    scores = [[[0.5, 0.9]], [[0.6, 0.1]], [[0.6, 0.8]], []]
    assert survivors(scores, 1, 2) == [1, 2]
    assert survivors(scores, 2, 3) == [0]
    assert survivors([[[0.0, 0.1]]] * 3, 1, 3) == [0, 1, 2], "nothing is learnt yet"
    assert survivors([], 1, 3) == []


# Status.


def test_halving_compares_points_that_differ_in_the_students_own_settings_alone() -> None:
    settings: dict[str, Any] = {"optim.lr": 1e-5, "optim.epochs": 3, "distil.relations.heads": 48}
    changes: list[dict[str, Any]] = [{}, {"optim.lr": 2e-5}, {"share": 0.5}, {"distil.relations.heads": 12}]
    student = {"source": "stage:distil", "init": "first of stage:distil"}
    run: Any = SimpleNamespace(runtime=Runtime())
    points = []
    for number, change in enumerate(changes):
        names = with_specs(failed(key=f"{number}", seed=1, student=student, settings={**settings, **change}))
        specs = dict(names.pop("specs"))
        shape = SimpleNamespace(reads_images=False)
        upstream = [SimpleNamespace(key=key, spec=spec) for key, spec in specs.items() if key != f"{number}"]
        config = SimpleNamespace(method=SimpleNamespace(compares_examples=False))
        stage: Any = SimpleNamespace(
            key=f"{number}", spec=specs[f"{number}"], all_upstream=upstream, shape=shape, config=config
        )
        points.append(GridPoint((), Path(), f"{number}", names, run, stage))
    found = [[[points.index(point) for point in setting] for setting in cell] for cell in by_cell(points)]
    assert found == [[[0], [1]], [[2]], [[3]]]


def test_a_run_whose_process_is_gone_reads_killed(tmp_path: Path) -> None:
    assert status.read_run(tmp_path) is None
    with status.locked_run(tmp_path):
        status.write_status(tmp_path, "running", {"method": "alp"})
        running = status.read_run(tmp_path)
    assert running is not None
    assert (running["status"], running["method"]) == ("running", "alp")
    assert (status.read_run(tmp_path) or {})["status"] == "killed"
    status.write_status(tmp_path, "done", {})
    status.write_json(tmp_path / status.RESULT, {"score": 0.5, "status": "done"})
    assert (status.read_run(tmp_path) or {})["score"] == 0.5
    (tmp_path / status.STATUS).write_text('{"status": "do')
    assert status.read_run(tmp_path) is None


# What several points share, and what it costs.


def point(run: RunConfig) -> GridPoint:
    stage = resolve_stage(run.stages, "student", "fp32")
    return GridPoint(("student",), Path("unused"), stage.key, {}, run, stage)


def test_a_shared_teacher_is_trained_by_a_point_that_keeps_its_checkpoints(compose: Compose, tmp_path: Path) -> None:
    store = f"store.dir={tmp_path}"
    vanilla, rco, prokd, nkd = (point(compose(f"method={name}", store)) for name in ("vanilla", "rco", "prokd", "nkd"))
    for keeps in (rco, prokd):
        for points in ([nkd, vanilla, keeps], [keeps, nkd, vanilla]):
            teacher, *rest = missing_stages(points)
            assert (teacher.stage.name, teacher.builder, set(teacher.users)) == ("teacher", keeps, {vanilla, keeps})
            assert [missing.stage.name for missing in rest] == (["phase1"] if keeps is prokd else [])


def test_what_a_shared_stage_needs_is_built_before_it(compose: Compose, tmp_path: Path) -> None:
    few = (f"store.dir={tmp_path}", "assistant.num_layers=3", "student.num_layers=1")
    takd = [point(compose("method=takd", *few, f"seed={seed}")) for seed in (1, 2)]
    assistant = takd[0].stage.teacher if takd[0].stage else None
    assert assistant is not None
    other = point(compose("method=takd", "optim.lr=1e-4", *few))  # of another assistant
    assert [missing.stage.name for missing in missing_stages([takd[0]])] == ["teacher", "assistant"]
    jobs: list[list[str]] = []

    def launch(overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
        jobs.append([override[-1] for override in overrides])
        for override in overrides:
            stage = {"stage=teacher": assistant.teacher, "stage=assistant": assistant}.get(override[-1])
            if stage is not None:
                Store(tmp_path).get(stage.spec, lambda folder: None)
        return []

    grid = Grid(lambda overrides: GridPoint(tuple(overrides), tmp_path / "run", "", {}), [*takd, other])
    run_grid(grid, launch, retry_failed=False, halving=None)
    assert jobs == [["stage=teacher"], ["stage=assistant"], ["student"] * 3]


@pytest.mark.parametrize(
    ("ended", "recorded"), [("failed", "failed"), ("paused", "not run"), ("killed", "not run"), (None, "not run")]
)
def test_points_whose_teacher_did_not_fail_are_tried_again(
    ended: str | None, recorded: str, compose: Compose, tmp_path: Path
) -> None:
    made = [point(compose("method=rkd", f"store.dir={tmp_path}", f"seed={seed}")) for seed in (1, 2)]
    points = [replace(each, folder=tmp_path / each.key) for each in made]

    def launch(overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
        if ended is None:
            raise RuntimeError("the cluster refuses the job")
        status.write_status(tmp_path / "teacher", ended, {"key": ""}, "it broke")
        return []

    grid = Grid(lambda overrides: GridPoint(tuple(overrides), tmp_path / "teacher", "", {}), points)
    run_grid(grid, launch, retry_failed=False, halving=None)
    assert [each.result()["status"] for each in points] == [recorded] * 2


# GPUs.


def test_each_worker_takes_a_place_on_the_emptiest_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from distill_runner.training import devices

    held: list[BaseFileLock] = []
    monkeypatch.setattr(devices, "_CLAIMS", held)
    taken = [devices.claim_gpu(["a", "b"], 2, tmp_path) for _ in range(4)]
    assert taken == [0, 1, 0, 1]

    def one_ends(_seconds: float) -> None:
        held.pop(1).release()

    monkeypatch.setattr(time, "sleep", one_ends)
    assert devices.claim_gpu(["a", "b"], 2, tmp_path) == 1
    assert len(held) == 4


# Whole sweeps.

Sweep = Callable[..., Ended]


@pytest.fixture
def arguments(tmp_path: Path, tiny_task_folder: Path, tiny_bert_folder: Path) -> list[str]:
    (tmp_path / "faults.py").write_text(FAULTS)
    return [
        *("-m", "task=custom", f"task.dataset={tiny_task_folder}", "task.columns=[sentence1,sentence2]"),
        *("task.max_length=48", "teacher=base", f"teacher.source={tiny_bert_folder}", "teacher.name=tiny"),
        *("teacher.optim.lr=3e-3", "teacher.optim.epochs=2", "student.num_layers=2", "optim.lr=3e-3"),
        *("optim.batch_size=16", "optim.epochs=4", "runtime.device=cpu"),
    ]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a process of its own."""
    path = os.pathsep.join([str(ROOT / "src"), str(tmp_path)])
    return {**os.environ, "PYTHONPATH": path}


@pytest.fixture
def sweep(tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Sweep:
    monkeypatch.syspath_prepend(tmp_path)

    def run(*overrides: str) -> Ended:
        sys.modules.pop("faults", None)
        return distill_run(tmp_path, *arguments, *overrides)

    return run


@pytest.fixture
def apart(tmp_path: Path, arguments: list[str], environment: dict[str, str]) -> Sweep:
    """The same in a process of its own."""

    def run(*overrides: str) -> Ended:
        command = [sys.executable, "-m", "distill_runner", *arguments, *overrides]
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    return run


def statuses(folder: Path) -> dict[str, list[str]]:
    """By status, the errors of the runs in ``folder``."""
    found: dict[str, list[str]] = {}
    for run in sorted(folder.glob("outputs/runs/*")):
        read = status.read_run(run)
        assert read is not None
        if read["stage"] == "student":
            found.setdefault(read["status"], []).append(str(read.get("error")))
    return found


def counts(folder: Path) -> dict[str, int]:
    return {name: len(errors) for name, errors in statuses(folder).items()}


def built(folder: Path, stage: str) -> list[str]:
    """The stages that the runs were asked for which built ``stage``, once for each time."""
    found = []
    for file in folder.glob("outputs/runs/*/distill-run.log"):
        read = status.read_run(file.parent)
        assert read is not None
        found += [str(read["stage"])] * file.read_text().count(f"stage {stage}: building")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_faults_of_points_leave_the_others_alone(tmp_path: Path, sweep: Sweep, apart: Sweep, launcher: str) -> None:
    if launcher != "basic":
        pytest.importorskip(f"hydra_plugins.hydra_{launcher}_launcher")
    run = sweep if launcher == "basic" else apart  # whose workers are processes that would outlive the test
    faults = ["Raises", "Exits", "Kills"] if launcher == "basic" else ["Raises", "Kills"]
    targets = f"method.terms.ce.term={','.join(f'faults.{name}' for name in faults)},{SOUND}"
    grid = ["method=nkd", "optim.epochs=1", targets, f"hydra/launcher={launcher}"]
    ended = run(*grid)
    assert ended.code == 1, ended.err
    found = statuses(tmp_path)
    assert {name: len(errors) for name, errors in found.items()} == {"failed": len(faults), "done": 1}
    raised, *exited, killed = sorted(found["failed"], key=lambda error: "VSt".index(error[0]))
    assert raised == "ValueError: this term is broken"
    assert exited == ["SystemExit: 3"] * (launcher == "basic")
    assert killed.startswith("the process was ended by SIGKILL")
    for error in found["failed"]:
        assert error[:20] in ended.out
    logs = [file.read_text() for file in tmp_path.glob("outputs/runs/*/distill-run.log")]
    assert sum("Traceback" in text for text in logs) == len(faults) - 1
    assert sum("SIGKILL" in text for text in logs) == 1

    # Nothing that has ended is tried again, until that is asked for; whoever starts the points.
    if launcher != "basic":
        return
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("outputs/runs/*/status.json")}
    again = run(*grid)
    assert (again.code, "; sweep.retry_failed=true trains again" in again.err) == (1, True)
    assert again.out == ended.out
    assert before == {file: file.stat().st_mtime_ns for file in before}
    (tmp_path / "faults.py").write_text(FAULTS.replace("raise ValueError", "return super().forward(*_)  #"))
    assert run(*grid, "sweep.retry_failed=true").code == 1
    assert counts(tmp_path) == {"failed": 2, "done": 2}


@pytest.mark.slow
def test_the_server_of_points_outlives_what_ends_a_job(tmp_path: Path, sweep: Sweep) -> None:
    ended = sweep("method=nkd", "seed=1,2", "method.terms.ce.term=faults.StopsServer", "optim.epochs=1")
    assert ended.code == 0, ended.err
    assert counts(tmp_path) == {"done": 2}


@pytest.fixture
def of_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a point that this process runs, or whose process is made up."""
    hydra = SimpleNamespace(runtime=SimpleNamespace(output_dir=tmp_path), verbose=False)
    config: Any = OmegaConf.create({"hydra": {"job_logging": {}}})
    told = SimpleNamespace(get=lambda: hydra, instance=lambda: SimpleNamespace(cfg=config))
    monkeypatch.setattr(isolation, "HydraConfig", told)
    for name in ("configure_log", "process.end_with_parent", "process.use_forkserver", "ensure_running"):
        monkeypatch.setattr(f"{isolation.__name__}.{name}", lambda *_, **__: None)
    return tmp_path


@pytest.mark.parametrize(
    ("before", "exitcode", "after"),
    [
        ("paused", isolation.COMPLETED, "paused"),
        ("failed", isolation.FAILED, "failed"),
        ("paused", -signal.SIGKILL, "failed"),
        ("running", 1, "failed"),
        (None, 17, "failed"),
        ("done", -signal.SIGKILL, "done"),
    ],
)
def test_how_a_point_ended_is_recorded(
    before: str | None, exitcode: int, after: str, of_point: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it was killed before it could replace the status of an earlier attempt."""
    if before:
        error = exit_cause(exitcode) if before == "failed" else None
        status.write_status(of_point, before, {"seed": 1}, error)
    process, connection = SimpleNamespace(exitcode=exitcode, join=lambda: None), Mock()
    connection.recv.side_effect = EOFError
    monkeypatch.setattr(isolation, "_started", lambda: (process, connection))
    ended = isolation.run_isolated(lambda _: {}, OmegaConf.create({}), "distill_runner.running")
    assert (ended["status"], ended.get("seed")) == (after, 1 if before else None)
    assert ended["error"] == (exit_cause(exitcode) if after == "failed" else None)


def note_process(config: Any) -> dict[str, Any]:
    with Path(config.file).open("a") as file:
        file.write(f"{os.getpid()}\n")
    if config.fails:
        raise ValueError("this point fails")
    return {}


@pytest.mark.parametrize(("gpus", "processes"), [(1, "aaab"), (0, "abcd")])
def test_a_point_takes_over_the_process_of_the_last_one_on_one_gpu(
    gpus: int, processes: str, of_point: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless that one failed, whose state nobody knows."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("multiprocessing.Process", multiprocessing.get_context("fork").Process)
    monkeypatch.setattr(isolation, "_WAITING", [])
    for fails in (False, False, True, False):
        config = OmegaConf.create({"file": str(of_point / "processes"), "fails": fails})
        isolation.run_isolated(note_process, config, "distill_runner.running")
    for process, _ in isolation._WAITING:
        process.terminate()
    numbers = (of_point / "processes").read_text().split()
    assert "".join("abcd"[sorted(set(numbers), key=numbers.index).index(number)] for number in numbers) == processes


@pytest.mark.parametrize(("before", "after"), [("done", "done"), ("failed", "failed"), ("running", "failed")])
def test_a_point_that_raises_records_it_unless_it_was_finished(before: str, after: str, of_point: Path) -> None:
    """The score of a finished point whose repetition fails left the table."""
    status.write_status(of_point, before, {"seed": 1}, "ValueError: of an earlier attempt")

    def broken(_: Any) -> Any:
        raise UserError("task.dataset", "data", "does not exist")

    with pytest.raises(SystemExit) as ended:
        isolation._run_point(broken, OmegaConf.create({}), OmegaConf.create({"hydra": {"job_logging": {}}}))
    assert ended.value.code == isolation.FAILED
    GridPoint((), of_point, "0a1b", {"key": "0a1b"}).fail("no such folder") if before == "done" else None
    found = status.read_run(of_point) or {}
    assert (found["status"], found["seed"]) == (after, 1)
    assert found["error"].startswith("ValueError" if before == "done" else "UserError: task.dataset=data: does not")


@pytest.mark.slow
def test_what_points_share_is_built_first_and_once(tmp_path: Path, sweep: Sweep) -> None:
    grid = ["method=rkd,alp", "seed=1,2"]
    ended = sweep(*grid)
    assert ended.code == 0, ended.err
    assert built(tmp_path, "teacher") == ["teacher"]
    begun = built(tmp_path, "student")
    assert begun == ["student"] * 4
    again, elsewhere = sweep(*grid), sweep(*grid, "hydra.sweep.dir=outputs/${now:%f}")
    assert (again.code, again.out) == (0, ended.out) == (elsewhere.code, elsewhere.out)
    assert built(tmp_path, "student") == begun


@pytest.mark.slow
def test_points_that_mean_the_same_are_run_once(tmp_path: Path, sweep: Sweep) -> None:
    grid = ["method=nkd,rkd", "loss.eta=0.2,0.7", "loss.lambda=0.2,0.7", "sweep.where=['loss.eta + loss.lambda <= 1']"]
    planned = sweep(*grid, "student.num_layers=2,9", "plan=true")
    assert planned.code == 0, planned.err
    assert "cannot run, the others can:\n  student.num_layers=9" in planned.out
    planned = sweep(*grid, "plan=true")
    # eta 0.7 with lambda 0.7 is dropped; of the three that remain NKD reads neither, RKD eta alone.
    assert planned.out.startswith("3 points (3 merged with an equal point; 2 dropped by sweep.where)")
    assert "temperature=3  =  loss.temperature=2" in sweep("method=nkd", "loss.temperature=2,3", "plan=true").out
    assert re.search(r"^time: \d+ s with one worker", planned.out, re.MULTILINE)
    assert not list(tmp_path.glob("outputs/runs/*"))
    assert sweep(*grid, "optim.epochs=1").code == 0
    assert counts(tmp_path) == {"done": 3}
    shutil.rmtree(tmp_path / "outputs" / "runs")
    again = sweep(*grid, "optim.epochs=1", "plan=true").out
    assert "student  0 points; 3 more are in the store" in again
    assert "time: 0 s with one worker" in again


@pytest.mark.slow
def test_halving_resumes_the_survivors_exactly(tmp_path: Path, sweep: Sweep) -> None:
    grid = ["method=nkd", "optim.lr=1e-4,1e-3,3e-3,6e-3", "task.metrics=[auc,accuracy]"]  # accuracies tie at chance
    halved = sweep(*grid, "sweep.halving=2")
    assert halved.code == 0, halved.err
    assert counts(tmp_path) == {"done": 1, "paused": 3}
    assert re.search(r"halving by 2, nkd on tiny_task0: 8 of 16 epochs trained \(50 % saved\)", halved.out)
    scores = {file.parent.name: json.loads(file.read_text())["history"] for file in tmp_path.rglob("result.json")}
    assert sweep(*grid, "store.dir=elsewhere", "hydra.sweep.dir=full/runs").code == 0
    for name, history in scores.items():
        assert json.loads((tmp_path / "full" / "runs" / name / "result.json").read_text())["history"] == history
    rest = sweep(*grid)
    assert counts(tmp_path) == {"done": 4}
    assert rest.out.endswith(next((tmp_path / "full" / "sweeps").glob("*/table.txt")).read_text())


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on_to_the_same_table(
    tmp_path: Path, sweep: Sweep, arguments: list[str], environment: dict[str, str]
) -> None:
    grid = ["method=rkd,alp", "optim.epochs=8", "runtime.checkpoint_minutes=0.001"]
    undisturbed = sweep(*grid, "store.dir=elsewhere", "hydra.sweep.dir=undisturbed/runs")
    assert undisturbed.code == 0, undisturbed.err
    for number in (signal.SIGKILL, signal.SIGINT):
        command = [sys.executable, "-m", "distill_runner", *arguments, *grid]
        log = (tmp_path / "log").open("w")
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        ends = time.monotonic() + 120
        # In the middle of a student, wherever that is by now.
        while "student  " not in (tmp_path / "log").read_text() and process.poll() is None and time.monotonic() < ends:
            time.sleep(0.05)
        if process.poll() is None:
            os.killpg(process.pid, number)
        assert process.wait(180) in (-number, 130, 0)
    assert sweep(*grid).code == 0
    tables = [
        next(folder.glob("sweeps/*/table.txt")).read_bytes()
        for folder in (tmp_path / "outputs", tmp_path / "undisturbed")
    ]
    assert tables[0] == tables[1]
