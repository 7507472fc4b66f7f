"""Several processes: what they share out, that they train as one does, and how they end together."""

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer, BertForPreTraining, BertForSequenceClassification

from distill_runner.common.errors import UserError
from distill_runner.common.seeds import seed_all
from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.splits import CorpusSplit, TokenSplit
from distill_runner.datasets.tokenization import Examples
from distill_runner.methods.base import Method
from distill_runner.methods.config import parse_method
from distill_runner.methods.outputs import Classes
from distill_runner.models.features import EncoderShape, FeatureRequest
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve
from distill_runner.pipeline.store import Store
from distill_runner.training import devices
from distill_runner.training.config import Optim, Runtime
from distill_runner.training.data import CorpusData, Data, TaskData, epoch_updates
from distill_runner.training.devices import Device
from distill_runner.training.processes import ProcessGroup, WorkerLost
from distill_runner.training.teachers import LiveTargets, NoTeacher, TeacherTargets
from distill_runner.training.train import Training, fit
from distill_runner.training.workers import spawn_group
from helpers.training_runs import ALP, CE, METHODS, TASK, TEXT, Double, Logged, bert, log_into, same, told, weights

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


def test_runs_of_several_gpus_take_them_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_CLAIMS", [])
    assert devices.claim_gpus(["a", "b", "c"], 2, tmp_path) == [0, 1]
    assert devices.claim_gpu(["a", "b", "c"], 1, tmp_path) == 2


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Device.for_processes("cpu", "fp32", 1, 3) == [CPU] * 3
    for name, count, key in (("auto", 3, "runtime.num_processes"), ("cuda:1", 2, "runtime.device")):
        with pytest.raises(UserError) as caught:
            Device.for_processes(name, "fp32", 1, count)
        assert caught.value.key == key


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
            runtime=Runtime(log_every=1),
            group=group,
            folder=self.folder,
            report=report,
            select_best=True,
        )

    def take_part(self, group: ProcessGroup) -> None:
        fit(self.make(group, self._befall))

    def _befall(self, values: Mapping[str, Any], step: int, epoch: float) -> None:
        if step == 6 and "loss" in values:
            if self.fault == "error":
                raise ValueError("this process is broken")
            if self.fault:
                os.kill(os.getpid(), signal.Signals[self.fault])

    def train(self, processes: int) -> tuple[Training, Logged]:
        rows: Logged = []
        self.folder.mkdir(exist_ok=True)
        with spawn_group([CPU.torch] * processes, self.take_part) as group:
            training = self.make(group, log_into(rows))
            fit(training)
        return training, rows


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


def parts(training: Training) -> dict[str, torch.Tensor]:
    return weights(training.model) | {f"method.{name}": p.detach() for name, p in training.method.named_parameters()}


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
    alone, rows = Case(tokens, tmp_path / "one", method, optim).train(1)
    two, rows_of_two = Case(tokens, tmp_path / "two", method, optim).train(2)
    assert [(step, epoch) for _, step, epoch in rows_of_two] == [(step, epoch) for _, step, epoch in rows]
    for (values, _, _), (others, _, _) in zip(rows, rows_of_two, strict=True):
        assert values.keys() == others.keys()
        for name in values.keys() - {"examples_per_second"}:
            assert others[name] == pytest.approx(values[name], rel=1e-7), name
    assert two.history.examples == alone.history.examples == 3 * 64
    for name, tensor in parts(alone).items():
        torch.testing.assert_close(parts(two)[name], tensor, rtol=1e-7, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("processes", "accumulation"),
    [(1, 2), (1, 5), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(2, 3, marks=pytest.mark.slow)],
)
def test_means_over_masked_words_are_those_of_the_whole_update(
    tokens: Path, tmp_path: Path, processes: int, accumulation: int
) -> None:
    optim = {"batch_size": 13, "epochs": 1}
    alone, rows = Pretraining(tokens, tmp_path / "one", optim=optim).train(1)
    parted = Pretraining(tokens, tmp_path / "parts", optim=optim | {"accumulation": accumulation})
    several, rows_of_several = parted.train(processes)
    for (values, _, _), (others, _, _) in zip(rows, rows_of_several, strict=True):
        for name in values.keys() - {"examples_per_second"}:
            assert others[name] == pytest.approx(values[name], rel=1e-12), (name, values, others)
    for name, tensor in parts(alone).items():
        torch.testing.assert_close(parts(several)[name], tensor, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.slow
def test_an_interrupt_of_one_stops_all_and_resuming_changes_nothing(tokens: Path, tmp_path: Path) -> None:
    whole, _ = Case(tokens, tmp_path / "whole", METHODS["ckd"]).train(2)
    with pytest.raises(KeyboardInterrupt):
        Case(tokens, tmp_path / "parts", METHODS["ckd"], fault="SIGTERM").train(2)
    resumed, rows = Case(tokens, tmp_path / "parts", METHODS["ckd"]).train(2)
    assert rows[0][1] == 7
    assert told(resumed.history) == told(whole.history)
    assert same(parts(resumed), parts(whole))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [("error", ValueError, "^this process is broken"), ("SIGKILL", WorkerLost, "was ended by SIGKILL: out of memory")],
)
def test_a_fault_of_one_ends_all(tokens: Path, tmp_path: Path, fault: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Case(tokens, tmp_path / "broken", METHODS["nkd"], fault=fault).train(2)
    resumed, rows = Case(tokens, tmp_path / "broken", METHODS["nkd"]).train(2)
    assert rows[0][1] == 5  # the epoch before was saved
    assert len(resumed.history.epochs) == 3


@pytest.mark.slow
def test_a_run_of_two_processes(compose: Callable[..., RunConfig], tmp_path: Path) -> None:
    short = ("method=ckd", "teacher.optim.epochs=1", "optim.epochs=1")
    run = compose(*short, "runtime.num_processes=2")
    pipeline = Pipeline(Store(tmp_path), run.runtime, lambda name: lambda values, step, epoch: None)
    stage = resolve(run.stages, "student", "fp32")
    assert stage.key == resolve(compose(*short).stages, "student", "fp32").key
    folder = pipeline.build(stage)
    assert {"model", "metrics.json", "predictions-validation.npy"} <= {file.name for file in folder.iterdir()}
