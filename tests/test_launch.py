"""Processes that torchrun or srun start: what their environment says, what they agree on, and a run on two machines."""

import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from distill_runner import hydra_app
from distill_runner.common.errors import UserError
from distill_runner.common.launch import Launch, first_host
from distill_runner.models.vocabulary import row_table
from distill_runner.running import _launched_runtime, num_threads
from distill_runner.training import launched
from distill_runner.training.config import Runtime
from distill_runner.training.devices import Device
from distill_runner.training.launched import Peers, admit_others, enter_attempt
from distill_runner.training.processes import (
    SINGLE_PROCESS,
    ProcessGroup,
    UnequalStart,
    WorkerLost,
    join_group,
    take_part,
)
from distill_runner.training.train import Training
from distill_runner.training.workers import _Worker, spawn_group
from helpers.training_runs import METHODS
from test_distributed import Case, parts, tokens  # noqa: F401 (a fixture)

CPU = torch.device("cpu")
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_the_environment_of_a_launcher() -> None:
    assert Launch.from_environment({}) is None
    assert Launch.from_environment(TORCHRUN | {"MASTER_PORT": "1"}) == Launch(3, 4, 1, 2)
    assert Launch.from_environment(SRUN) == Launch(3, 4, 1, 2, ("gpu07", 20084))  # 20000 + 7 * job + step
    chosen = SRUN | {"MASTER_ADDR": "b", "MASTER_PORT": "7"}
    assert Launch.from_environment(chosen) == Launch(3, 4, 1, 2, ("b", 7))
    assert Launch.from_environment(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) is None, "a point of a sweep"
    assert Launch.from_environment(TORCHRUN | {"MASTER_PORT": "1", "WORLD_SIZE": "1"}) is None
    assert Launch.from_environment(TORCHRUN) is None, "without a port, nobody has started this process with others"
    with pytest.raises(UserError, match="LOCAL_RANK=x: is not a number"):
        Launch.from_environment(TORCHRUN | {"MASTER_PORT": "1", "LOCAL_RANK": "x"})
    for port, problem in (("tcp", "is not a number"), ("99999", "must be between 1 and 65535")):
        with pytest.raises(UserError, match=f"MASTER_PORT={port}: {problem}"):
            Launch.from_environment(SRUN | {"MASTER_PORT": port})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[3,7-9]", "n3"),
        ("n[003-010],m", "n003"),
        ("r1n[2-3]x,b", "r1n2x"),
        ("", "localhost"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@given(marks=st.lists(st.booleans(), min_size=1, max_size=40))
def test_one_process_agrees_with_itself(marks: list[bool]) -> None:
    SINGLE_PROCESS.require_equal(lambda: pytest.fail("a checksum of all weights takes time"))
    padded = torch.tensor([*marks, *[False] * (-len(marks) % 8)]).to(torch.uint8)
    counts, flags, ids = SINGLE_PROCESS.agree(torch.tensor([3, 4]), [True, False], padded)
    assert (counts.tolist(), flags) == ([3, 4], [True, False])
    assert ids is not None
    assert ids.tolist() == [number for number, mark in enumerate(marks) if mark]


def test_processes_meet_those_of_their_own_attempt(server: Any) -> None:
    """torchrun keeps one store for all attempts; a process may come before the main one of its attempt does."""

    def enter(rank: int) -> int:
        time.sleep(0.2 * (rank != 1))
        store = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)  # type: ignore[attr-defined]
        return (enter_attempt if rank else admit_others)(Launch(rank, 3, 0, 1), store)

    for attempt in (1, 2, 3):
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(enter, range(3))) == [attempt] * 3


@pytest.fixture
def server() -> Any:
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]


def join_peers(server: Any, rank: int) -> Peers:
    store = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)  # type: ignore[attr-defined]
    return Peers(Launch(rank, 2, rank, 2), dist.PrefixStore("attempt/1", store))  # type: ignore[attr-defined]


def fail(*_: Any) -> None:
    raise RuntimeError("invalid device ordinal")


def test_a_process_without_a_gpu_ends_the_job_before_anyone_waits(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers would wait for it in a call that cannot be interrupted."""
    monkeypatch.setattr(torch.cuda, "set_device", fail)
    main, other = join_peers(server, 0), join_peers(server, 1)
    job = main.start(Votes(), "cuda")  # type: ignore[arg-type]
    other._run(0)
    assert main.store.add("ready/0", 0) == 0
    with pytest.raises(WorkerLost, match="did not start"):
        job.join()
    assert str(job.cause()) == "invalid device ordinal"
    for peers in (other, main):
        peers.store.add("gone", 1)
        peers.finish(0)


def test_a_worker_without_a_gpu_ends_the_job_before_anyone_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", fail)
    worker = _Worker.__new__(_Worker)
    worker.connection, worker_end = Pipe(duplex=False)
    unused: Any = None

    def join() -> ProcessGroup:
        return join_group(1, 2, torch.device("cuda", 1), unused, lambda: worker_end.send(None))

    take_part(join, unused, worker_end.send)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        worker.wait_until_ready()


def test_the_main_process_prints_the_error_that_it_is_stuck_with(
    server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launched, "SILENCE_SECONDS", -1.0)
    monkeypatch.setattr(launched, "BEAT_SECONDS", 0.01)
    main = join_peers(server, 0)
    monkeypatch.setattr(launched, "end_process", lambda code: main._has_ended.set())
    main.num_jobs = 1
    main.store.set("error/0/1", pickle.dumps(ValueError("no labels")))  # type: ignore[arg-type]
    main.in_job = True
    main._watcher.join(10)
    assert "is stuck without it: ValueError: no labels" in caplog.text


def test_a_process_ends_without_a_traceback_when_the_store_does(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    other = join_peers(server, 1)
    other._has_ended.set()
    other._watcher.join(10)
    other.store = SimpleNamespace(check=fail)  # type: ignore[assignment]
    assert other.follow() == 1
    assert "process 1 of 2 ends with process 0" in caplog.text


def test_what_the_options_of_a_launched_run_may_say() -> None:
    launch = Launch(0, 4, 0, 2)
    runtime = _launched_runtime(Runtime(), launch)
    assert (runtime.num_processes, runtime.threads) == (4, num_threads(None, 2))
    assert _launched_runtime(Runtime(num_processes=4, threads=3), launch).threads == 3
    with pytest.raises(UserError, match=r"runtime.num_processes=2: the launcher has started 4 processes"):
        _launched_runtime(Runtime(num_processes=2), launch)
    assert Device.of_launched_process("cpu", "fp32", torch.device).torch == CPU
    with pytest.raises(UserError, match=r"runtime.device=cuda:1: is one device, but each process of torchrun or srun"):
        Device.of_launched_process("cuda:1", "fp32", torch.device)


def test_a_sweep_is_no_job_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="a sweep trains many models, but the launcher has started 4 processes"):
        hydra_app._run_point(OmegaConf.create())


class Votes:
    """What two processes say, and what both hear."""

    def __call__(self, group: ProcessGroup) -> list[Any]:
        marks = torch.zeros(16, dtype=torch.uint8)
        marks[[1, 9] if group.rank else [1, 15]] = 1
        counts, flags, ids = group.agree(torch.tensor([10**12 + group.rank, 1]), [group.is_main, False], marks)
        assert ids is not None
        heard = [counts.tolist(), flags, ids.tolist()]
        group.require_equal(lambda: "the same")
        with pytest.raises(UnequalStart, match=r"process 1 on .* starts from step 1, process 0 from step 0"):
            group.require_equal(lambda: f"step {group.rank}")
        return heard


@pytest.mark.slow
def test_two_processes_agree_in_one_call() -> None:
    with spawn_group([CPU, CPU], Votes()) as group:  # type: ignore[arg-type]
        assert Votes()(group) == [[2 * 10**12 + 1, 2], [True, False], [1, 9, 15]]


@dataclass(frozen=True)
class ByRows(Case):
    """The gradients of the embedding are added by rows, however small it is."""

    def make(self, group: ProcessGroup, report: Any) -> Training:
        training = super().make(group, report)
        training.table = row_table(training.model, 1)
        assert training.table is not None
        return training


@pytest.mark.slow
def test_gradients_of_an_embedding_are_added_by_rows(tokens: Path, tmp_path: Path) -> None:  # noqa: F811
    optim = {"epochs": 1, "batch_size": 12}
    dense, _ = Case(tokens, tmp_path / "dense", METHODS["nkd"], optim).train(2)
    by_rows, _ = ByRows(tokens, tmp_path / "rows", METHODS["nkd"], optim).train(2)
    for name, tensor in parts(dense).items():
        assert torch.equal(parts(by_rows)[name], tensor), name


def test_an_output_layer_reads_all_rows() -> None:
    from transformers import BertForMaskedLM, BertModel

    from helpers.training_runs import bert

    assert row_table(BertForMaskedLM(bert(1)), 1) is None
    model: Any = BertModel(bert(1))
    table = row_table(model, 1)
    assert table is model.get_input_embeddings()
    assert row_table(model) is None, "this one is small"


@pytest.mark.slow
def test_a_run_of_torchrun_survives_a_killed_process(
    tmp_path: Path, tiny_task_folder: Path, tiny_bert_folder: Path
) -> None:
    """Two agents of torchrun, as on two machines; the second one's process is killed in training, and all resume."""
    run = ["task=custom", f"task.dataset={tiny_task_folder}", "task.columns=[sentence1,sentence2]"]
    run += ["task.max_length=48", "teacher=base", f"teacher.source={tiny_bert_folder}", "method=rkd"]
    run += ["teacher.optim.epochs=1", "student.num_layers=2", "optim.epochs=2", "optim.batch_size=16"]
    run += ["runtime.device=cpu", "runtime.checkpoint_steps=1"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    (tmp_path / "sitecustomize.py").write_text(_KILLER)

    def start(name: str, prefix: list[str], *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", *prefix, "distill_runner", *run, *more]
        folders = [f"store.dir={tmp_path / name}", f"hydra.run.dir={tmp_path / name / 'run'}"]
        return subprocess.Popen(
            [*command, *folders], env={**environment, "KILLED": str(tmp_path / "killed")}, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    endpoint = f"localhost:{_free_port()}"
    torchrun = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "1", "-m"]
    agents = [start("two", torchrun) for _ in range(2)]
    output = [agent.communicate(timeout=900)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], output
    assert (tmp_path / "killed").exists()
    assert "resuming after step" in "".join(output)
    alone = start("one", [], "runtime.num_processes=2", "runtime.threads=1")
    assert alone.wait(900) == 0, alone.communicate()[0]
    models = {file.parent.parent.name: file for file in (tmp_path / "one").glob("stage/*/model/model.safetensors")}
    assert len(models) == 2
    for key, file in models.items():
        assert (tmp_path / "two" / "stage" / key / "model" / "model.safetensors").read_bytes() == file.read_bytes()


_KILLER = """
import os
from pathlib import Path

flag = Path(os.environ["KILLED"])
if os.environ.get("RANK") == "1" and not flag.exists():
    import distill_runner.training.train as train
    step = train.Training.step

    def killed(self, *args):
        step(self, *args)
        if self.history.step == 3 and self.teacher.__class__.__name__ != "NoTeacher":
            flag.touch()
            os.kill(os.getpid(), 9)

    train.Training.step = killed
"""
"""Loaded by every Python process: the process of rank 1 kills itself after three updates of the student, once."""


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
        return port
