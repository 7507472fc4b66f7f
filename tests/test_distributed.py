"""Several processes: what they share out, that they train as one does, and how they end together."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from transformers import AutoTokenizer, BertForPreTraining, BertForSequenceClassification

from distill_runner import cli, hydra_app
from distill_runner.common.errors import UserError
from distill_runner.common.process import num_launched
from distill_runner.common.seeds import seed_all
from distill_runner.datasets.splits import CorpusSplit, TokenSplit
from distill_runner.datasets.tokenization import Examples
from distill_runner.methods.base import Method
from distill_runner.methods.config import parse_method
from distill_runner.methods.outputs import Classes
from distill_runner.models.features import EncoderShape, FeatureRequest
from distill_runner.training.config import Optim, Runtime
from distill_runner.training.data import CorpusData, Data, TaskData, epoch_updates
from distill_runner.training.devices import Device
from distill_runner.training.history import History, load_checkpoint, save_checkpoint
from distill_runner.training.processes import SINGLE_PROCESS, ProcessGroup
from distill_runner.training.teachers import LiveTargets, NoTeacher, TeacherTargets
from distill_runner.training.train import Training, fit
from helpers.torchrun import in_processes
from helpers.training_runs import ALP, CE, METHODS, TASK, TEXT, Double, Logged, bert, log_into

CPU = Device.from_name("cpu", "fp32")
SCHEDULED: dict[str, Any] = {
    "terms": {"ce": CE, "cos": ALP | {"distance": "cosine"}},
    "weights": {"ce": 0.5, "cos": 0.5},
    "schedule": {"rule": "pid", "limits": 5, "thresholds": 2.0},  # below it after one epoch
}
MLM_NSP: dict[str, Any] = {
    "terms": {"masked_lm": CE, "next_sentence": {"term": "next_sentence"}},
    "weights": {"masked_lm": 1.0, "next_sentence": 0.7},
}
Trained = dict[str, Any]
"""Weights of the model and of the method by name, as arrays."""
TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}

# What is shared out.


class Numbers:
    """Data whose batches are their examples' numbers."""

    def __init__(self, size: int) -> None:
        self.size, self.lengths = size, np.arange(size)[::-1] // 3

    def __len__(self) -> int:
        return self.size

    def batch(self, index: np.ndarray, epoch: int) -> Any:
        return index.tolist()


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 20),
    accumulation=st.integers(1, 5),
    processes=st.integers(1, 4),
    bucketing=st.booleans(),
)
@example(size=3, batch_size=3, accumulation=4, processes=2, bucketing=False)
def test_processes_share_out_every_update(
    size: int, batch_size: int, accumulation: int, processes: int, bucketing: bool
) -> None:
    optim = Optim(lr=1, epochs=1, batch_size=batch_size, accumulation=accumulation, bucketing=bucketing)

    def updates(rank: int, of: int, first: int = 0) -> list[Any]:
        return list(epoch_updates(Numbers(size), optim, 3, 0, first, ProcessGroup(rank, of)))  # type: ignore[arg-type]

    alone = updates(0, 1)
    assert updates(0, 1, first=1) == alone[1:]
    each = [updates(rank, processes) for rank in range(processes)]
    for whole, *parts in zip(alone, *each, strict=True):
        assert len({len(part.batches) for part in parts}) == 1, "a forward pass may wait for all processes"
        assert all(part.batches for part in parts)
        assert {part.num_examples for part in parts} == {whole.num_examples}
        assert sum(share for part in parts for share in part.shares) == pytest.approx(1)
        taken = [
            (batch, share)
            for part in parts
            for batch, share in zip(part.batches, part.shares, strict=True)
            if share  # one without weight stands in
        ]
        assert sorted(chain.from_iterable(batch for batch, _ in taken)) == sorted(chain.from_iterable(whole.batches))
        assert [share for _, share in taken] == pytest.approx([len(batch) / whole.num_examples for batch, _ in taken])
        if accumulation % processes == 0:
            assert sorted(batch for batch, _ in taken) == sorted(whole.batches)


def test_one_process_agrees_with_itself() -> None:
    flags, counts = SINGLE_PROCESS.agree([True, False], torch.tensor([3, 4]))
    assert counts is not None
    assert (flags, counts.tolist()) == ([True, False], [3, 4])


def votes(group: ProcessGroup, folder: Path) -> list[Any]:
    flags, counts = group.agree([group.is_main, False], torch.tensor([10**12 + group.rank, 1]))
    assert counts is not None
    torch.manual_seed(group.rank)
    layer = torch.nn.Linear(1, 1)
    history = load_checkpoint(folder / f"{group.rank}.pt", {"model": layer}, group)  # only the main one's is read
    assert not (folder / "1.pt").exists()
    return [flags, counts.tolist(), history.step, layer.weight.item()]


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 3])
def test_two_processes_agree_in_one_call_and_start_alike(step: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(1, 1)
    if step:
        save_checkpoint(tmp_path / "0.pt", History(step=step), {"model": layer})
    weight = layer.weight.item()
    assert in_processes(2, partial(votes, folder=tmp_path)) == [[[True, False], [2 * 10**12 + 1, 2], step, weight]] * 2


# Trainings. Every process makes the same one for itself.


@dataclass(frozen=True)
class Case:
    """A student of 2 layers, 3 epochs of 64 examples; ``fault`` befalls further processes at the sixth step."""

    tokens: Path
    folder: Path
    method: Mapping[str, Any]
    optim: Mapping[str, Any] = field(default_factory=dict)
    fault: str | None = None

    def make(self, group: ProcessGroup, report: Callable[..., None]) -> Training:
        torch.manual_seed(11)
        train, validation = self.splits()
        teacher: Any = BertForSequenceClassification(bert(4, initializer_range=0.2))
        live = LiveTargets(teacher, train, FeatureRequest(logits=True, cls=frozenset({1, 2, 3, 4})), CPU)
        seed_all(0)
        model: Any = BertForSequenceClassification(bert(2))
        method = (
            parse_method(self.method)
            .make()
            .bind(EncoderShape.from_config(model.config), EncoderShape.from_config(teacher.config), Classes())
        )
        data = TaskData(TASK, train, {"validation": validation}, CPU)
        return self.training(model, method, data, Double(live), group, report)

    def splits(self) -> list[TokenSplit]:
        return [TokenSplit(self.tokens / split) for split in ("train", "validation")]

    def training(
        self,
        model: Any,
        method: Method,
        data: Data,
        teacher: TeacherTargets,
        group: ProcessGroup,
        report: Callable[..., None],
    ) -> Training:
        return Training(
            model.double(),
            method.double(),
            data,
            teacher,
            optim=Optim(**{"lr": 3e-3, "batch_size": 16, "epochs": 3} | dict(self.optim)),
            seed=5,
            device=CPU,
            runtime=Runtime(log_every=1, checkpoint_steps=4),
            group=group,
            folder=self.folder,
            log_metrics=report,
            select_best=True,
        )

    def _befall(self, values: Mapping[str, Any], step: int, epoch: float) -> None:
        if step == 6 and "loss" in values:
            if self.fault == "error":
                raise ValueError("this process is broken")
            if self.fault:
                os.kill(os.getpid(), signal.Signals[self.fault])

    def __call__(self, group: ProcessGroup) -> tuple[Trained, Logged] | str:
        rows: Logged = []
        training = self.make(group, log_into(rows) if group.is_main else self._befall)
        try:
            fit(training)
        except KeyboardInterrupt:
            return "interrupted"
        weights = training.model.state_dict() | {f"method.{name}": p for name, p in training.method.named_parameters()}
        return {name: value.detach().numpy() for name, value in weights.items()}, rows

    def train(self, processes: int) -> tuple[Trained, Logged]:
        self.folder.mkdir(exist_ok=True)
        trained: Any = in_processes(processes, self)[0]
        return trained


@pytest.fixture(scope="module")
def tokens(
    tiny_bert_folder: Path, tiny_examples: dict[str, Examples], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    tokenizer, folder = AutoTokenizer.from_pretrained(tiny_bert_folder), tmp_path_factory.mktemp("tokens")
    tokenizer.save_pretrained(folder)
    for split, examples in tiny_examples.items():
        (folder / split).mkdir()
        TokenSplit.write(folder / split, examples, tokenizer, max_length=48)
    return folder


@dataclass(frozen=True)
class Pretraining(Case):
    """Masked words, of which examples have unequally many, and pairs of sentences."""

    method: Mapping[str, Any] = field(default_factory=lambda: MLM_NSP)

    def make(self, group: ProcessGroup, report: Callable[..., None]) -> Training:
        seed_all(0)
        model: Any = BertForPreTraining(bert(2))
        method = parse_method(self.method).make().bind(EncoderShape.from_config(model.config), None, Classes())
        train, validation = (CorpusSplit(self.tokens / split) for split in ("train", "validation"))
        data = CorpusData(TEXT, train, validation, AutoTokenizer.from_pretrained(self.tokens), 3, CPU)
        return self.training(model, method, data, NoTeacher(), group, report)


def require_close(first: tuple[Trained, Logged], second: tuple[Trained, Logged], tolerance: float) -> None:
    """Weights, and all that is logged of each step, are the same up to rounding."""
    assert [row[1:] for row in first[1]] == [row[1:] for row in second[1]]
    for (values, _, _), (others, _, _) in zip(first[1], second[1], strict=True):
        assert values.keys() == others.keys()
        for name in values.keys() - {"examples_per_second"}:
            assert others[name] == pytest.approx(values[name], rel=tolerance), name
    for name, tensor in first[0].items():
        np.testing.assert_allclose(second[0][name], tensor, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "optim"),
    [
        (METHODS["nkd"], {"batch_size": 21}),  # the last update of an epoch has one example
        (METHODS["ckd"], {"batch_size": 24, "accumulation": 2}),
        (SCHEDULED, {"accumulation": 3}),
    ],
)
def test_two_processes_train_as_one(
    tokens: Path, tmp_path: Path, method: Mapping[str, Any], optim: Mapping[str, Any]
) -> None:
    alone, two = (Case(tokens, tmp_path / str(count), method, optim).train(count) for count in (1, 2))
    require_close(alone, two, 1e-7)


@pytest.mark.parametrize(
    ("processes", "accumulation"),
    [(1, 2), (1, 5), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(2, 3, marks=pytest.mark.slow)],
)
def test_means_over_masked_words_are_those_of_the_whole_update(
    tokens: Path, tmp_path: Path, processes: int, accumulation: int
) -> None:
    optim = {"batch_size": 13, "epochs": 1}
    alone = Pretraining(tokens, tmp_path / "one", optim=optim).train(1)
    parted = Pretraining(tokens, tmp_path / "parts", optim=optim | {"accumulation": accumulation})
    require_close(alone, parted.train(processes), 1e-12)


@pytest.mark.slow
def test_an_interrupt_of_one_stops_all_and_resuming_changes_nothing(tokens: Path, tmp_path: Path) -> None:
    undisturbed, _ = Case(tokens, tmp_path / "undisturbed", METHODS["ckd"]).train(2)
    case = Case(tokens, tmp_path / "parts", METHODS["ckd"])
    case.folder.mkdir()
    assert in_processes(2, replace(case, fault="SIGTERM")) == ["interrupted"] * 2
    resumed, rows = case.train(2)
    assert rows[0][1] == 7
    assert all(np.array_equal(resumed[name], values) for name, values in undisturbed.items())


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["error", "SIGKILL"])
def test_a_fault_of_one_ends_all(tokens: Path, tmp_path: Path, fault: str) -> None:
    with pytest.raises(ChildFailedError):
        Case(tokens, tmp_path / "broken", METHODS["nkd"], fault=fault).train(2)
    _, rows = Case(tokens, tmp_path / "broken", METHODS["nkd"]).train(2)
    assert (rows[0][1], rows[-1][1]) == (5, 12)  # the epoch before was saved


# The command.


@pytest.mark.parametrize(("variables", "count"), [({}, 1), ({"WORLD_SIZE": "4"}, 1), (TORCHRUN, 4)])
def test_what_torchrun_has_started(
    variables: dict[str, str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # as the command sets it
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(UserError, match="srun: has started 2 tasks"):
        cli._start_launched([])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert num_launched() == count
    assert Device.from_name("cpu", "fp32") == CPU
    if count > 1:
        with pytest.raises(UserError, match="a sweep trains many models, but torchrun has started 4 processes"):
            hydra_app.compose_and_run(["-m", "experiment=demo", "seed=1"])
        with pytest.raises(UserError, match="cuda:1: is one device, but each process of torchrun takes"):
            Device.from_name("cuda:1", "fp32")


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
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    (tmp_path / "sitecustomize.py").write_text(_KILLER)

    def start(name: str, *options: str, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "distill_runner", *run]
        folders = [f"store.dir={tmp_path / name}", f"hydra.run.dir={tmp_path / name / 'run'}"]
        return subprocess.Popen(
            [*command, *folders], env=environment | variables, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "1"]
    agents = [start("two", *options, KILLED=str(tmp_path / "killed")) for _ in range(2)]
    output = [agent.communicate(timeout=900)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], output
    assert (tmp_path / "killed").exists()
    assert "resuming after step" in "".join(output)
    undisturbed = start("one", "--standalone", "--nproc-per-node", "2")
    output = [undisturbed.communicate(timeout=900)[0]]
    assert undisturbed.returncode == 0, output
    for file in (tmp_path / "one").glob("stage/*/metrics.json"):
        assert json.loads(file.read_text())["conditions"]["num_processes"] == 2
    models = {file.parent.parent.name: file for file in (tmp_path / "one").glob("stage/*/model/model.safetensors")}
    assert len(models) == 2
    for key, file in models.items():
        assert (tmp_path / "two" / "stage" / key / "model" / "model.safetensors").read_bytes() == file.read_bytes()


_KILLER = """
import os
from pathlib import Path

if os.environ.get("RANK") == "1" and "KILLED" in os.environ and not (flag := Path(os.environ["KILLED"])).exists():
    import distill_runner.training.train as train
    step = train.Training.take_update

    def killed(self, *args):
        step(self, *args)
        if self.history.step == 3 and self.teacher.__class__.__name__ != "NoTeacher":
            flag.touch()
            os.kill(os.getpid(), 9)

    train.Training.take_update = killed
"""
"""Loaded by every Python process: the process of rank 1 kills itself after three updates of the student, once."""
