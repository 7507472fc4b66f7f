"""Sweeps: which points there are, what becomes of them under faults, and what is found again."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import BaseFileLock
from hydra.core.utils import JobReturn
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from distill_runner.common.errors import UserError, exit_cause
from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline import status
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.planning import missing_caches
from distill_runner.pipeline.resolving import resolve
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store, key_of
from distill_runner.pipeline.targets import targets_spec
from distill_runner.sweeping import isolation, plan
from distill_runner.sweeping.halving import by_cell, replay, rungs, survivors
from distill_runner.sweeping.points import Grid, GridPoint, holds
from distill_runner.sweeping.remaining import missing_stages
from distill_runner.sweeping.sweep import run_grid
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

class KillsServer(HardLabels):
    def forward(self, *arguments):
        if os.getppid() == self.server:
            os.kill(self.server, signal.SIGTERM)
        return super().forward(*arguments)

    server = os.getppid()  # that points are forked from, when one imports this
"""
SOUND = "hard_labels"


# Conditions.

VALUES = {"loss": {"eta": 0.5, "lambda": 0.7}, "method": {"name": "alp"}, "seed": 3, "lr": 1e-5, "loss_eta": 9}
POINT = OmegaConf.create(VALUES)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("loss.eta + loss.lambda <= 1", False),
        ("loss.eta + loss.lambda <= 1.2", True),
        ("method.name == 'alp' and not seed < 3", True),
        ("method.name in ['nkd', 'rkd'] or lr == 1e-5", True),
        ("method.name != 'loss.eta'", True),
        ("loss.eta == 0.5 and loss_eta == 9", True),
    ],
)
def test_a_condition_reads_the_keys_of_a_point(condition: str, expected: bool) -> None:
    assert holds(condition, POINT) is expected


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        ("loss.eta <", "is not a condition"),
        ("loss.etta < 1", "there is no key loss.etta"),
        ("method.name == alp", "there is no key alp"),
        ("method != 'alp'", "method is a group of keys"),
        ("__import__('os').system('true')", "there is no key __import__"),
        ("loss.eta < 'x'", "is not a condition"),
        ("9 ** 9 ** 9 > 1", "is not a condition"),
    ],
)
def test_a_condition_that_cannot_be_read_is_refused(condition: str, problem: str) -> None:
    with pytest.raises(UserError, match=re.escape(problem)) as raised:
        holds(condition, POINT)
    assert raised.value.key == "sweep.where"


# Halving.


def test_rungs() -> None:
    assert rungs(20, 3) == [3, 7]
    assert rungs(8, 2) == [2, 4]
    assert rungs(3, 3) == rungs(2, 2) == [1], "settings are compared once after each epoch"


@pytest.mark.parametrize(("epochs", "said"), [(0, "optim.epochs is 0"), (None, "optim.epochs is null")])
def test_points_that_train_no_epochs_cannot_be_halved(epochs: int | None, said: str) -> None:
    method = SimpleNamespace(schedule=None)
    stage: Any = SimpleNamespace(config=SimpleNamespace(optim=SimpleNamespace(epochs=epochs), method=method))
    point = GridPoint((), Path(), "0a1b", {}, stage=stage)
    grid = Grid(lambda _: point, [point])
    with pytest.raises(UserError, match=said):
        run_grid(grid, lambda _: pytest.fail("something is trained"), 1, False, 2)


def test_a_head_that_learns_only_at_the_end_is_not_judged_before() -> None:
    """Both cuts would rank the settings by the accuracy of a head with random weights."""
    method = SimpleNamespace(schedule=SimpleNamespace(classification="at_end", rule="pid"))
    stage: Any = SimpleNamespace(config=SimpleNamespace(optim=SimpleNamespace(epochs=9), method=method))
    point = GridPoint((), Path(), "0a1b", {}, stage=stage)
    with pytest.raises(UserError, match="before the head learns, which schedule=pid leaves to the end"):
        run_grid(Grid(lambda _: point, [point]), lambda _: pytest.fail("something is trained"), 1, False, 2)


def test_the_best_survive_and_all_that_tie_with_them() -> None:
    scores = {"a": [[0.5, 0.9]], "b": [[0.6, 0.1]], "c": [[0.6, 0.8]], "d": []}
    assert survivors(scores, 1, 2) == ["b", "c"]
    assert survivors(scores, 2, 3) == ["a"]
    assert survivors({name: [[0.0, 0.1]] for name in "abc"}, 1, 3) == ["a", "b", "c"], "nothing is learnt yet"
    assert survivors({}, 1, 3) == []


def test_replay_counts_epochs_and_what_is_lost() -> None:
    # After epoch 1 a and b go on, after epoch 2 b does; c would have been the best in the end.
    scores = {"a": [0.5, 0.5, 0.5, 0.5], "b": [0.4, 0.6, 0.6, 0.7], "c": [0.3, 0.3, 0.3, 0.9], "d": [0.1] * 4}
    outcome = replay({name: [values] for name, values in scores.items()}, 4, 2)
    assert (outcome.trained, outcome.total) == (4 * 1 + 2 * 1 + 1 * 2, 16)
    assert (outcome.best, outcome.best_of_all) == (0.7, 0.9)


def test_replay_keeps_the_seeds_of_a_setting_together() -> None:
    # The luckiest seed is of a; by the mean of the seeds' best scores b is better, 0.65 against 0.6.
    outcome = replay({"a": [[0.9, 0.8], [0.3, 0.2]], "b": [[0.7, 0.7], [0.6, 0.5]]}, 2, 2)
    assert (outcome.trained, outcome.total) == (4 * 1 + 2 * 1, 8)
    assert outcome.best == outcome.best_of_all == pytest.approx(0.65)
    assert replay({"a": [[0.1] * 9, [0.2] * 9, [0.3] * 9]}, 9, 3).trained == 27, "one setting is not halved"
    early = replay({"a": [[0.5] * 3], "b": [[0.5] * 7], "c": [[0.1] * 4]}, 8, 2)
    assert (early.trained, early.total) == (3 + 7 + 2, 14), "points that stopped early by optim.patience"


HISTORIES = st.lists(st.floats(0, 1), min_size=9, max_size=9)


@given(
    st.integers(1, 3).flatmap(
        lambda seeds: st.dictionaries(
            st.text(), st.lists(HISTORIES, min_size=seeds, max_size=seeds), min_size=1, max_size=8
        )
    ),
    st.integers(2, 4),
)
def test_halving_never_trains_more_nor_finds_better(scores: dict[str, list[list[float]]], factor: int) -> None:
    outcome = replay(scores, 9, factor)
    assert outcome.trained <= outcome.total == 9 * sum(map(len, scores.values()))
    assert outcome.best <= outcome.best_of_all == max(fmean(map(max, seeds)) for seeds in scores.values())


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
    assert [[points.index(point) for point in cell] for cell in by_cell(points).values()] == [[0, 1], [2], [3]]


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
    stage = resolve(run.stages, "student", "fp32")
    return GridPoint(("student",), Path("unused"), stage.key, {}, run, stage)


def test_a_stage_that_points_share_is_looked_for_once(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    first, asked = point(compose("method=rkd")), list[str]()
    points = [replace(first, overrides=(f"{number}",)) for number in range(4)]
    monkeypatch.setattr(Store, "has", lambda _store, spec: asked.append(key_of(spec)))
    (missing,) = missing_stages(points)
    assert missing.stage.name == "teacher"
    assert missing.users == points
    assert asked == [missing.stage.key]


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
    run_grid(grid, launch, 1, retry_failed=False, halving=None)
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
    run_grid(grid, launch, 1, retry_failed=False, halving=None)
    assert [each.result()["status"] for each in points] == [recorded] * 2


def test_targets_that_points_share_are_computed_before_them(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)

    def made(*overrides: str) -> GridPoint:
        return replace(point(compose(*overrides, f"store.dir={tmp_path}")), overrides=overrides)

    def jobs(points: list[GridPoint], workers: int | None) -> list[Sequence[str]]:
        launched: list[Sequence[str]] = []

        def launch(overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
            launched.extend(overrides)
            return []

        grid = Grid(lambda overrides: GridPoint(tuple(overrides), tmp_path / "run", "", {}), points)
        run_grid(grid, launch, workers, retry_failed=False, halving=None)
        return launched[: -len(points)]

    two = "runtime.threads=2"
    points = [made("method=rkd", two), *(made("method=alp", f"loss.temperature={value}", two) for value in (3, 4))]
    live = [made("method=alp", f"loss.temperature={value}", "runtime.targets=live") for value in (5, 6)]
    stages = [each.stage for each in points if each.stage is not None]
    assert [list(missing_caches(stage, store)) for stage in stages] == [[], [], []]  # there is no teacher yet
    assert stages[0].teacher is not None
    store.get(stages[0].teacher.spec, lambda folder: None)
    monkeypatch.setattr("distill_runner.sweeping.sweep.available_cpus", lambda: 64)

    # One that a single point reads, or that nobody would wait for, is that point's own affair.
    filler = ["method=alp", "loss.temperature=3", two, "runtime.targets_only=true"]
    assert jobs([*points, *live], 3) == [[*filler, "runtime.threads=6"]]
    assert jobs([*points, *live], 1) == []
    # A job of a cluster has its own threads.
    assert jobs([*points, *live], None) == [filler]
    # Two at once share the threads; by default a worker has its part of the cores.
    assert [job[-1] for job in jobs([*points, made("method=rkd", "loss.temperature=3")], 5)] == [
        "runtime.threads=4"
    ] * 2
    by_default = [made("method=rkd", f"loss.temperature={value}") for value in (7, 8)]
    assert [job[-1] for job in jobs(by_default, 4)] == ["runtime.threads=64"]

    with pytest.raises(UserError, match="targets_only=true: caches outputs without training"):
        jobs([made("method=rkd", "runtime.targets_only=true")], 3)

    # Those that a phase before the student reads count too, and are of no use to one that is built.
    annealing = made("method=annealing").stage
    assert annealing is not None
    ((phase, [spec]),) = missing_caches(annealing, store)
    assert (phase.name, spec) == ("phase1", targets_spec(phase, None))
    store.get(phase.spec, lambda folder: None)
    assert list(missing_caches(annealing, store)) == []

    for stage in stages:
        store.get(targets_spec(stage, None), lambda folder: None)
    assert jobs([*points, *live], 3) == []


@pytest.fixture
def fixed_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update takes no time, a prediction a second, and a model 1000 bytes."""
    speed = plan._Speed(0.0, 1.0, 1000)
    monkeypatch.setattr(plan.Estimator, "_speed", lambda self, stage: speed)


def cost(run: RunConfig, stage: str = "student") -> plan.Cost:
    found = plan.Estimator(Pipeline(Store(run.store.dir), run.runtime)).cost(resolve(run.stages, stage, "fp32"))
    return plan.Cost(found.seconds - plan.START_SECONDS, found.bytes)


@pytest.mark.usefixtures("fixed_speed")
def test_the_cost_of_a_student_that_follows_checkpoints(compose: Compose) -> None:
    """Each of 2 epochs judges 40 examples; a cache has 2 logits of 4 bytes for each of 64 examples."""
    assert cost(compose("method=vanilla")) == plan.Cost(2 * 40 + 64, 1000 + 64 * 8)
    assert cost(compose("method=rco")) == plan.Cost(2 * 40 + 2 * 64, 1000 + 2 * 64 * 8)
    # Targets are cached for the share that is trained on, and the teacher leaves a model for each epoch.
    assert cost(compose("method=vanilla", "stages.student.share=0.5")) == plan.Cost(2 * 40 + 32, 1000 + 32 * 8)
    assert [cost(compose(f"method={name}"), "teacher").bytes for name in ("vanilla", "rco")] == [1000, 2000]


@pytest.mark.usefixtures("fixed_speed")
def test_targets_that_students_share_cost_once(compose: Compose) -> None:
    runs = [compose("method=vanilla", f"seed={seed}") for seed in (1, 2)]
    estimator = plan.Estimator(Pipeline(Store(runs[0].store.dir), runs[0].runtime))
    costs = [estimator.cost(resolve(run.stages, "student", "fp32")) for run in runs]
    assert [cost.seconds - plan.START_SECONDS for cost in costs] == [2 * 40 + 64, 2 * 40]
    assert [cost.bytes for cost in costs] == [1000 + 64 * 8, 1000]


def test_methods_that_differ_in_what_they_compute_are_measured_apart(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Stage] = []

    def measure(_self: object, stage: Stage) -> plan._Speed:
        measured.append(stage)
        return plan._Speed(0.0, 0.0, 0)

    monkeypatch.setattr(plan.Estimator, "_measure", measure)
    store = f"store.dir={tmp_path}"
    estimator = plan.Estimator(Pipeline(Store(tmp_path), compose("method=rkd", store).runtime))

    def count(stage: str, *overrides: str) -> int:
        estimator._speed(resolve(compose(*overrides, store).stages, stage, "fp32"))
        return len(measured)

    text = ("corpus=embedded", "corpus.max_length=48")
    relations = ("method=minilmv2", *text, "student.num_layers=2", "relations.heads=4")
    assert count("distil", *relations) == 1
    assert count("distil", *relations, "stages.distil.optim.lr=1e-3") == 1
    assert count("distil", *relations[:-1], "relations.heads=8") == 2
    assert count("distil", *relations, "relations.pairs=[QQ]") == 3
    assert count("student", "method=rkd", "loss.temperature=1.0", "loss.eta=0.2") == 4
    assert count("student", "method=rkd", "loss.temperature=5.0", "loss.eta=0.5") == 4
    draws = ("method=pkd", "mapping=random")
    assert count("student", *draws, "mapping.seed=1") == 5
    assert count("student", *draws, "mapping.seed=2") == 5


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
    assert again.code == 1
    assert again.out == ended.out
    assert before == {file: file.stat().st_mtime_ns for file in before}
    (tmp_path / "faults.py").write_text(FAULTS.replace("raise ValueError", "return super().forward(*_)  #"))
    mended = run(*grid, "sweep.retry_failed=true")
    assert mended.code == 1
    assert {name: len(errors) for name, errors in statuses(tmp_path).items()} == {"failed": 2, "done": 2}


@pytest.mark.slow
def test_a_point_outlives_its_server(tmp_path: Path, sweep: Sweep) -> None:
    ended = sweep("method=nkd", "seed=1,2", "method.terms.ce.term=faults.KillsServer", "optim.epochs=2")
    assert ended.code == 0, ended.err
    assert {name: len(errors) for name, errors in statuses(tmp_path).items()} == {"done": 2}


@pytest.mark.parametrize(("failures", "raised"), [(2, False), (isolation.STARTS, True)])
def test_a_server_that_ends_is_replaced(
    failures: int, raised: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As under Slurm, which asks all processes of a job to end before it queues the job again."""
    left = iter([True] * failures + [False])

    class Process(SimpleNamespace):
        def start(self) -> None:
            if next(left):
                raise EOFError("unexpected EOF")

    monkeypatch.setattr("multiprocessing.Process", Process)
    monkeypatch.setattr(isolation, "POLL_SECONDS", 0)
    with pytest.raises(EOFError) if raised else nullcontext():
        isolation._started()
    assert len(caplog.messages) == failures - raised


@pytest.fixture
def of_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a point that this process runs, or whose process is made up."""
    hydra = SimpleNamespace(runtime=SimpleNamespace(output_dir=tmp_path), verbose=False)
    config: Any = OmegaConf.create({"hydra": {"job_logging": {}}})
    told = SimpleNamespace(get=lambda: hydra, instance=lambda: SimpleNamespace(cfg=config))
    monkeypatch.setattr(isolation, "HydraConfig", told)
    for name in ("configure_log", "end_with_parent"):
        monkeypatch.setattr(isolation, name, lambda *_: None)
    for name in ("set_start_method", "set_forkserver_preload"):
        monkeypatch.setattr(f"multiprocessing.{name}", lambda *_, **__: None)
    return tmp_path


@pytest.mark.parametrize(
    ("before", "exitcode", "after"),
    [
        ("paused", isolation.COMPLETED, "paused"),
        ("done", isolation.COMPLETED, "done"),
        ("paused", -signal.SIGKILL, "failed"),
        ("failed", -signal.SIGKILL, "failed"),
        ("interrupted", 17, "failed"),
        ("paused", isolation.FAILED, "failed"),
        ("running", isolation.FAILED, "failed"),
        (None, isolation.FAILED, "failed"),
        ("done", -signal.SIGKILL, "done"),
        ("paused", isolation.SERVER_GONE, "paused"),
        ("running", isolation.SERVER_GONE, "failed"),
    ],
)
def test_how_a_point_ended_is_recorded(
    before: str | None, exitcode: int, after: str, of_point: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it was killed before it could replace the status of an earlier attempt."""
    if before:
        status.write_status(of_point, before, {"seed": 1}, "of an earlier attempt" if before == "failed" else None)
    process = SimpleNamespace(exitcode=exitcode, join=lambda: None)
    monkeypatch.setattr(isolation, "_started", lambda *_: process)
    ended = isolation.run_isolated(lambda _: {}, OmegaConf.create({}), "distill_runner.running")
    assert (ended["status"], ended.get("seed")) == (after, 1 if before else None)
    assert ended["error"] == (exit_cause(exitcode) if after == "failed" else None)


def test_a_finished_point_whose_repetition_fails_stays_finished(of_point: Path) -> None:
    """Its score left the table, and the store counted its artifacts as unused."""
    status.write_status(of_point, "done", {"seed": 1})

    def broken(_: Any) -> Any:
        raise UserError("task.test.final", "tset", "no such split")

    with pytest.raises(SystemExit) as ended:
        isolation._run_point(broken, OmegaConf.create({}), OmegaConf.create({"hydra": {"job_logging": {}}}))
    assert ended.value.code == isolation.FAILED
    GridPoint((), of_point, "0a1b", {"key": "0a1b"}).fail("no such folder")
    assert (status.read_run(of_point) or {})["status"] == "done"


def test_a_point_that_fails_anew_tells_its_new_error(of_point: Path) -> None:
    status.write_status(of_point, "failed", {"seed": 1}, "ValueError: of an earlier attempt")

    def broken(_: Any) -> Any:
        raise UserError("task.dataset", "data", "does not exist")

    with pytest.raises(SystemExit) as ended:
        isolation._run_point(broken, OmegaConf.create({}), OmegaConf.create({"hydra": {"job_logging": {}}}))
    assert ended.value.code == isolation.FAILED
    found = status.read_run(of_point) or {}
    assert (found["status"], found["seed"]) == ("failed", 1)
    assert found["error"].startswith("UserError: task.dataset=data: does not exist")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_what_points_share_is_built_first_and_once(tmp_path: Path, sweep: Sweep, apart: Sweep, launcher: str) -> None:
    if launcher != "basic":
        pytest.importorskip(f"hydra_plugins.hydra_{launcher}_launcher")
    run = sweep if launcher == "basic" else apart
    more = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    grid = ["method=rkd,alp", "seed=1,2", f"hydra/launcher={launcher}", *more]
    ended = run(*grid)
    assert ended.code == 0, ended.err
    assert built(tmp_path, "teacher") == ["teacher"]
    begun = built(tmp_path, "student")
    assert begun == ["student"] * 4
    logs = [file.read_text() for file in tmp_path.glob("outputs/runs/*/distill-run.log")]
    # Two workers would wait for targets, which a first job computes before them; those of ALP serve RKD as well.
    filled = [-1 < text.find("teacher targets cached") < text.find("stage student: building") for text in logs]
    assert sum(filled) in ((1, 2) if more else (0,))
    again = run(*grid)
    assert again.code == 0
    assert again.out
    assert ended.out.endswith(again.out) if launcher == "joblib" else again.out == ended.out
    assert built(tmp_path, "student") == begun


@pytest.mark.slow
def test_a_teacher_that_some_points_follow_is_trained_once(tmp_path: Path, sweep: Sweep) -> None:
    ended = sweep("method=vanilla,prokd", "optim.epochs=1")
    assert ended.code == 0, ended.err
    assert built(tmp_path, "teacher") == ["teacher"]


@pytest.mark.slow
def test_a_teacher_that_fails_is_not_tried_by_each_point(tmp_path: Path, sweep: Sweep) -> None:
    ended = sweep("method=rkd", "seed=1,2", "stages.teacher.method.terms.ce.term=faults.Raises")
    assert ended.code == 1
    assert built(tmp_path, "teacher") == ["teacher"]
    assert [error[:44] for error in statuses(tmp_path)["failed"]] == [
        "its teacher failed: ValueError: this term is"
    ] * 2


@pytest.mark.slow
def test_points_that_mean_the_same_are_run_once(tmp_path: Path, sweep: Sweep) -> None:
    grid = ["method=nkd,rkd", "loss.eta=0.2,0.7", "loss.lambda=0.2,0.7", "sweep.where=['loss.eta + loss.lambda <= 1']"]
    planned = sweep(*grid, "plan=true")
    assert planned.code == 0, planned.err
    # eta 0.7 with lambda 0.7 is dropped; of the three that remain NKD reads neither, RKD eta alone.
    assert planned.out.startswith("3 points (3 merged with an equal point; 2 dropped by sweep.where)")
    assert re.search(r"^time: \d+ s with one worker", planned.out, re.MULTILINE)
    assert not list(tmp_path.glob("outputs/runs/*"))
    assert sweep(*grid, "optim.epochs=1").code == 0
    assert {name: len(errors) for name, errors in statuses(tmp_path).items()} == {"done": 3}
    shutil.rmtree(tmp_path / "outputs" / "runs")
    again = sweep(*grid, "optim.epochs=1", "plan=true").out
    assert "student  0 points; 3 more are in the store" in again
    assert "time: 0 s with one worker" in again


@pytest.mark.slow
def test_a_plan_tells_which_points_cannot_run(sweep: Sweep) -> None:
    planned = sweep("method=nkd", "student.num_layers=2,9", "plan=true")
    assert planned.code == 0, planned.err
    listed = planned.out.splitlines()
    assert listed[1] == "  not run  student.num_layers=2"
    assert listed[2:4] == ["cannot run, the others can:", "  student.num_layers=9"]
    assert "must be between 1 and" in listed[4]


@pytest.mark.slow
def test_halving_resumes_the_survivors_exactly(tmp_path: Path, sweep: Sweep) -> None:
    grid = ["method=nkd", "optim.lr=1e-4,1e-3,3e-3,6e-3", "task.metrics=[auc,accuracy]"]  # accuracies tie at chance
    halved = sweep(*grid, "sweep.halving=2")
    assert halved.code == 0, halved.err
    assert {name: len(errors) for name, errors in statuses(tmp_path).items()} == {"done": 1, "paused": 3}
    assert re.search(r"halving by 2, nkd on tiny_task0: 8 of 16 epochs trained \(50 % saved\)", halved.out)
    scores = {file.parent.name: json.loads(file.read_text())["history"] for file in tmp_path.rglob("result.json")}
    full = sweep(*grid, "store.dir=elsewhere", "hydra.sweep.dir=full/runs")
    assert full.code == 0
    for name, history in scores.items():
        assert json.loads((tmp_path / "full" / "runs" / name / "result.json").read_text())["history"] == history
    rest = sweep(*grid)
    assert {name: len(errors) for name, errors in statuses(tmp_path).items()} == {"done": 4}
    table = (tmp_path / "full" / "sweeps").glob("*/table.txt")
    assert rest.out.endswith(next(table).read_text())
    replayed = sweep(*grid, "sweep.halving=2")
    assert re.search(r"halving by 2, nkd on tiny_task0: 8 of 16 epochs \(50 % saved\), best \d", replayed.out)


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
