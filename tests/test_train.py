"""The loop: resuming to the bit, what is logged, what is kept, what is updated and how."""

import itertools
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call

from distill_runner.common.errors import UserError
from distill_runner.common.process import deferred_interrupts
from distill_runner.common.seeds import seed_all
from distill_runner.datasets.batches import Batch
from distill_runner.datasets.splits import TokenSplit
from distill_runner.datasets.tokenization import Examples
from distill_runner.methods.base import LossTerm, Method, Progress
from distill_runner.methods.config import parse_method
from distill_runner.methods.outputs import Classes, Outputs
from distill_runner.methods.predictions import HardLabels
from distill_runner.models.extract import Extraction, extract
from distill_runner.models.features import EncoderShape, FeatureRequest, Features
from distill_runner.training.config import Optim, Runtime
from distill_runner.training.data import Data, Evaluation, TaskData
from distill_runner.training.devices import Device
from distill_runner.training.history import Log, TrainingDiverged
from distill_runner.training.processes import SINGLE_PROCESS, ProcessGroup
from distill_runner.training.teachers import LiveTargets, NoTeacher
from distill_runner.training.train import Training, fit, learning_rate, make_optimizer
from helpers.small_runs import few_fast
from helpers.training_runs import (
    CE,
    CKD,
    CPU,
    METHODS,
    NO_DROPOUT,
    TASK,
    Double,
    Logged,
    bert,
    log_into,
    same,
    told,
    weights,
)


@pytest.fixture(scope="module")
def splits(
    tiny_bert_folder: Path, tiny_examples: dict[str, Examples], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, TokenSplit]:
    tokenizer, folder = transformers.AutoTokenizer.from_pretrained(tiny_bert_folder), tmp_path_factory.mktemp("tokens")
    for split, examples in tiny_examples.items():
        (folder / split).mkdir()
        TokenSplit.write(folder / split, examples, tokenizer, max_length=48)
    return {split: TokenSplit(folder / split) for split in tiny_examples}


@pytest.fixture(scope="module")
def data(splits: dict[str, TokenSplit]) -> TaskData:
    return TaskData(TASK, splits["train"], {"validation": splits["validation"]}, CPU)


@pytest.fixture(scope="module")
def live(splits: dict[str, TokenSplit]) -> LiveTargets:
    torch.manual_seed(11)
    teacher = transformers.BertForSequenceClassification(bert(4, initializer_range=0.2))
    return LiveTargets(teacher, splits["train"], FeatureRequest(logits=True, cls=frozenset({1, 2, 3, 4})), CPU)


Make = Callable[..., Training]


@pytest.fixture(autouse=True)
def _each_epoch_ends_with_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill_runner.training.train.SAVING_SHARE", math.inf)


@pytest.fixture(scope="module")
def make(data: TaskData, live: LiveTargets, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A training of a student of 2 layers: 4 updates of 16 examples an epoch, 3 epochs, dropout on."""

    def training(
        method: str | Method = "nkd",
        log_metrics: Log = lambda values, step, epoch: None,
        *,
        seed: int = 0,
        folder: Path | None = None,
        examples: Data = data,
        select_best: bool = False,
        device: Device = CPU,
        dtype: torch.dtype = torch.float32,
        config: Mapping[str, Any] | None = None,
        runtime: Mapping[str, Any] | None = None,
        **optim: Any,
    ) -> Training:
        seed_all(seed)
        model: Any = transformers.BertForSequenceClassification(bert(2, **config or {})).to(dtype)  # type: ignore[arg-type]
        if isinstance(method, str):
            method = parse_method(METHODS[method]).make()
        method.bind(EncoderShape.from_config(model.config), EncoderShape.from_config(live.model.config), Classes())
        reads_teacher = any(term.reads_teacher for term in method.named_terms().values())
        teacher = Double(live) if dtype == torch.float64 else live if reads_teacher else NoTeacher()
        return Training(
            model,
            method.to(dtype=dtype),
            examples,
            teacher,
            optim=Optim(**{"lr": 3e-3, "batch_size": 16, "epochs": 3} | optim),
            seed=5,
            device=device,
            runtime=Runtime(**{"log_every": 1} | dict(runtime or {})),
            folder=folder or tmp_path_factory.mktemp("training"),
            log_metrics=log_metrics,
            select_best=select_best,
        )

    return training


@pytest.fixture(scope="module")
def whole(make: Make) -> Callable[[str], Training]:
    """An uninterrupted training by each method, select=best."""

    @lru_cache
    def training(method: str) -> Training:
        trained = make(method, select_best=True)
        fit(trained)
        return trained

    return training


def result(training: Training) -> tuple[dict[str, Any], dict[str, Tensor], bytes, bytes]:
    """Everything that a finished training leaves."""
    parts = {f"model.{name}": tensor for name, tensor in weights(training.model).items()}
    parts |= {f"method.{name}": tensor for name, tensor in weights(training.method).items()}
    kept = [training.folder / "model" / "model.safetensors", *sorted(training.folder.glob("predictions-*.npy"))]
    return told(training.history), parts, kept[0].read_bytes(), b"".join(file.read_bytes() for file in kept[1:])


def assert_same_result(first: Training, second: Training) -> None:
    (history, parts, model, predictions), (history2, parts2, model2, predictions2) = result(first), result(second)
    assert history == history2
    assert same(parts, parts2)
    assert model == model2
    assert predictions == predictions2


@pytest.mark.parametrize("max_steps", [None, 3])
def test_few_updates_are_worth_a_warning_unless_they_were_asked_for(
    make: Make, caplog: pytest.LogCaptureFixture, max_steps: int | None
) -> None:
    fit(make(epochs=1, max_steps=max_steps))
    assert ("updates in total" in caplog.text) == (max_steps is None)


def test_a_checkpoint_by_steps_is_due_once_a_step(make: Make) -> None:
    training = make(runtime={"checkpoint_steps": 1})
    due = [training.checkpoint_due()]
    training.take_update(next(training.rest_of_epoch()))
    due.append(training.checkpoint_due())
    training.save()
    assert [*due, training.checkpoint_due()] == [False, True, False]


# Interruptions. A resumed training starts from other random numbers and other weights: the checkpoint has them all.


def stop_at(when: int, how: str) -> Log:
    def report(values: Mapping[str, Any], step: int, epoch: float) -> None:
        if step == when and ("loss" in values) == (how != "signal in evaluation"):
            if how == "crash":
                raise RuntimeError("out of memory, say")
            signal.raise_signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGINT)

    return report


@pytest.mark.parametrize(
    ("method", "how", "when"),
    few_fast(
        [
            ("nkd", "SIGINT", 1),
            ("nkd", "SIGINT", 4),  # the last update of an epoch
            ("nkd", "SIGINT", 12),  # the very last update
            ("nkd", "signal in evaluation", 8),
            ("nkd", "signal in evaluation", 12),
            ("nkd", "crash", 2),  # before the first checkpoint
            ("nkd", "crash", 7),
            ("ckd", "SIGINT", 6),
            ("ckd", "crash", 9),
            ("alp", "SIGTERM", 6),
        ],
        6,
    ),
)
def test_interrupted_and_resumed_is_uninterrupted(
    make: Make, whole: Callable[[str], Training], tmp_path: Path, method: str, how: str, when: int
) -> None:
    with pytest.raises(RuntimeError if how == "crash" else KeyboardInterrupt):
        fit(make(method, stop_at(when, how), folder=tmp_path, select_best=True))
    # Only where nothing had been saved the seed has to be that of the first call.
    seed = 0 if how == "crash" and when < 4 else 1
    resumed = make(method, seed=seed, folder=tmp_path, select_best=True)
    assert resumed.history.step == (when // 4 * 4 if how == "crash" else when)
    fit(resumed)
    assert len(resumed.history.epochs) == 3
    assert_same_result(whole(method), resumed)


@pytest.mark.parametrize(("seconds", "best", "is_written"), [(1e-9, 1, True), (3600, 1, False), (3600, 2, True)])
def test_short_epochs_write_no_checkpoints_that_take_longer(
    make: Make, monkeypatch: pytest.MonkeyPatch, seconds: float, best: int, is_written: bool
) -> None:
    """But for an epoch whose model replaces the best one before."""
    monkeypatch.setattr("distill_runner.training.train.SAVING_SHARE", 0.05)
    training = make(select_best=True)
    training.save_seconds, scores = seconds, {1: 0.5, best: 0.9}
    monkeypatch.setattr(training.data, "evaluate", lambda *_: ({"f1": scores.get(training.history.epoch + 1, 0)}, {}))
    fit(training)
    assert (training.folder / "checkpoint.pt").exists() == is_written


def test_any_number_of_interruptions_is_none(make: Make, tmp_path: Path) -> None:
    uninterrupted = make("ckd", max_steps=6, accumulation=2)
    fit(uninterrupted)
    for step in range(1, 7):
        with pytest.raises(KeyboardInterrupt):
            fit(make("ckd", stop_at(step, "SIGINT"), seed=step - 1, folder=tmp_path, max_steps=6, accumulation=2))
    last = make("ckd", seed=9, folder=tmp_path, max_steps=6, accumulation=2)
    fit(last)
    assert_same_result(uninterrupted, last)


def test_checkpoints_within_an_epoch_change_nothing(
    make: Make, whole: Callable[[str], Training], tmp_path: Path
) -> None:
    often = {"checkpoint_minutes": 1e-9}
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(make("nkd", stop_at(7, "crash"), folder=tmp_path, select_best=True, runtime=often))
    resumed = make(seed=1, folder=tmp_path, select_best=True, runtime=often)
    assert resumed.history.step == 6  # the seventh update was under way
    fit(resumed)
    assert_same_result(whole("nkd"), resumed)


def test_a_finished_training_is_not_trained_further(make: Make, whole: Callable[[str], Training]) -> None:
    again = make(seed=1, folder=whole("nkd").folder, select_best=True)
    fit(again)
    assert_same_result(whole("nkd"), again)


def test_a_second_signal_stops_at_once_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), deferred_interrupts() as received:  # noqa: PT012
        os.kill(os.getpid(), signal.SIGUSR1)
        assert received == [signal.SIGUSR1]
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")
    assert signal.getsignal(signal.SIGINT) is before


# What goes wrong.


class Bad(LossTerm):
    """Not a number at the fifth update."""

    reads_teacher = False

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        self.student_needs = FeatureRequest(logits=True)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        return student.logits_OC.mean() * (float("nan") if progress.step == 4 else 0.0)


@pytest.mark.parametrize(
    "runtime", [{"log_every": 1}, {"log_every": 100}, {"log_every": 3, "checkpoint_minutes": 1e-9}]
)
def test_training_stops_where_a_loss_is_no_number(make: Make, runtime: dict[str, Any], tmp_path: Path) -> None:
    method = Method({"ce": HardLabels(), "bad": Bad()}, {"ce": 1.0, "bad": 0.5})
    with pytest.raises(TrainingDiverged, match=r"^step 5: loss/bad is nan$"):
        fit(make(method, runtime=runtime, folder=tmp_path))
    # What lies there is from before.
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["history"]["step"] == 4
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


@pytest.mark.parametrize("returned", [None, 1.0, torch.ones(2)])
def test_a_term_that_returns_no_number_is_named(make: Make, monkeypatch: pytest.MonkeyPatch, returned: Any) -> None:
    """Instead of a traceback from the sum of the losses."""
    monkeypatch.setattr(Bad, "forward", lambda *_: returned)
    with pytest.raises(UserError, match=r"^method.terms.bad: forward does not return one number\n"):
        fit(make(Method({"bad": Bad()}, {"bad": 1.0})))


# What is updated, and how.


@pytest.mark.parametrize("accumulation", [2, 3, 16])
def test_accumulation_only_changes_how_much_is_computed_at_once(make: Make, accumulation: int) -> None:
    rows: dict[int, Logged] = {1: [], accumulation: []}
    trained = {}
    for parts in (1, accumulation):
        training = make("ckd", log_into(rows[parts]), dtype=torch.float64, accumulation=parts, epochs=1)
        fit(training)
        trained[parts] = weights(training.model) | weights(training.method)
    for name, tensor in trained[1].items():
        torch.testing.assert_close(trained[accumulation][name], tensor, rtol=1e-6, atol=1e-6, msg=name)
    losses = {parts: [values["loss/layers"] for values, _, _ in rows[parts] if "loss" in values] for parts in rows}
    assert losses[accumulation] == pytest.approx(losses[1], rel=1e-9)


def test_an_update_descends_by_adamw(make: Make) -> None:
    """The first step of AdamW by hand: lr * sign of the gradient, and decay of matrices alone."""
    training = make(config=NO_DROPOUT, dtype=torch.float64, clip=None, warmup=0.0, weight_decay=0.1, max_steps=1)
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    gradients: dict[str, Tensor] = {}

    def keep(*_arguments: Any) -> None:
        gradients.update({n: p.grad.clone() for n, p in training.model.named_parameters() if p.grad is not None})

    training.optimizer.register_step_pre_hook(keep)
    fit(training)
    (without,) = {name for name, _ in training.model.named_parameters()} - gradients.keys()
    assert without.endswith("attention.self.key.bias")  # of the last layer: it changes no output
    for name, parameter in training.model.named_parameters():
        gradient = gradients.get(name, torch.zeros(()))
        decay = 0.1 if parameter.ndim > 1 else 0.0
        expected = before[name] * (1 - 3e-3 * decay) - 3e-3 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-8, atol=1e-10, msg=name)


def test_tokens_that_never_occur_decay_by_the_rate_of_each_step(make: Make) -> None:
    training = make(warmup=0.0, weight_decay=0.1, max_steps=3)
    fit(training)
    rates = [3e-3, 2e-3, 1e-3]
    assert training.history.decay == pytest.approx(float(np.prod([1 - 0.1 * rate for rate in rates])), rel=1e-12)


@pytest.mark.parametrize("clip", [0.01, 1e3, None])
def test_the_gradient_is_clipped_over_model_and_method(make: Make, clip: float | None) -> None:
    training = make("ckd", clip=clip, max_steps=1)
    fit(training)
    moments = [state["exp_avg"] / (1 - training.optim.betas[0]) for state in training.optimizer.state.values()]
    norm = float(torch.stack([gradient.norm() for gradient in moments]).norm())  # of what AdamW took for the gradient
    assert norm == pytest.approx(0.01, rel=1e-3) if clip == 0.01 else 0.1 < norm < 100


def test_weights_rounded_together_are_those_that_autocast_rounds(splits: dict[str, TokenSplit]) -> None:
    device, batch = Device(torch.device("cpu"), "bf16"), splits["train"].batch(range(8), 16)
    model: Any = transformers.BertForSequenceClassification(
        bert(2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )
    model.bert.encoder.layer[0].output.dense.weight.requires_grad_(False)
    needs, found = FeatureRequest(states=frozenset({2})), []
    for rounds in (True, False):
        model.zero_grad()
        with device.autocast():
            named = device.rounded_weights(model) if rounds else {}
            assert len(named) == rounds * (2 * (2 * 6 + 2) - 1)  # of 6 products a layer, of the pooler and of the head
            weights_of_call = {f"model.{name}": weight for name, weight in named.items()}
            features = functional_call(Extraction(model), weights_of_call, (batch, needs))
        features.states[2].float().square().sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert "classifier.weight" not in gradients  # unused: an optimizer would take zeros for a gradient
        found.append({"states": features.states[2], **gradients})
    assert same(*found)
    assert "cls.predictions.decoder" not in device.product_layers(
        transformers.BertForMaskedLM(bert(1))
    )  # it has the embeddings' weights
    frozen: Any = LiveTargets(model, splits["train"], needs, device).model
    assert frozen.classifier.weight.dtype == torch.bfloat16 != frozen.bert.embeddings.word_embeddings.weight.dtype
    with device.autocast():
        assert extract(frozen, batch, needs).states[2].equal(found[0]["states"])


@pytest.mark.parametrize(("patience", "epochs"), [(1, 2), (2, 5), (None, 6)])
def test_training_stops_when_nothing_gets_better(
    make: Make, monkeypatch: pytest.MonkeyPatch, patience: int | None, epochs: int
) -> None:
    scores = iter([0.5, 0.4, 0.6, 0.6, 0.2, 0.9])
    monkeypatch.setattr(TaskData, "evaluate", lambda *_: ({"accuracy": next(scores)}, {}))
    history = fit(make(select_best=True, epochs=6, patience=patience))
    assert len(history.epochs) == epochs
    assert history.best == {1: 1, 2: 3, None: 6}[patience]


def rates(num_steps: int, warmup: float, schedule: str, **others: Any) -> list[float]:
    optim = Optim(lr=1.0, batch_size=1, epochs=1, warmup=warmup, schedule=schedule, **others)
    return [learning_rate(optim, step, num_steps) for step in range(num_steps)]


def test_schedules_by_hand() -> None:
    eighths = [1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    assert rates(10, 0.2, "linear") == pytest.approx([1 / 3, 2 / 3, *eighths])
    assert rates(10, 0.2, "constant") == pytest.approx([1 / 3, 2 / 3, *[1.0] * 8])
    assert rates(4, 0.0, "linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(4, 0.0, "constant") == [1.0] * 4
    assert rates(3, 1.0, "linear") == [0.25, 0.5, 0.75]
    half = math.sqrt(0.5)
    assert rates(4, 0.0, "cosine") == pytest.approx([1.0, (1 + half) / 2, 0.5, (1 - half) / 2])
    assert rates(6, 0.34, "cosine") == pytest.approx([1 / 3, 2 / 3, 1.0, (1 + half) / 2, 0.5, (1 - half) / 2])
    assert rates(8, 0.0, "steps") == pytest.approx([1.0] * 4 + [0.1] * 2 + [0.01] * 2)
    assert rates(5, 0.0, "steps", milestones=(0.5,), drop=0.2) == [1.0, 1.0, 1.0, 0.2, 0.2]
    assert rates(8, 0.25, "steps") == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_with_momentum_by_hand(make: Make, nesterov: bool) -> None:
    """Sutskever's form as torch has it, decay added to every gradient: v = m v + g, w -= lr (g + m v, or v)."""
    rates = {"lr": 0.1, "schedule": "steps", "warmup": 0.0, "clip": None}
    decayed = {"momentum": 0.8, "nesterov": nesterov, "weight_decay": 0.5, "decay": "all"}
    training = make(name="sgd", max_steps=4, dtype=torch.float64, **decayed, **rates)
    weights = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    averages = {name: torch.zeros_like(p) for name, p in weights.items()}
    steps = iter(range(4))

    def follow(*_arguments: Any) -> None:
        rate = [0.1, 0.1, 0.01, 0.001][next(steps)]
        for name, parameter in training.model.named_parameters():
            if parameter.grad is None:  # a head's part that the method does not read
                continue
            gradient = parameter.grad + 0.5 * weights[name]
            averages[name] = 0.8 * averages[name] + gradient
            weights[name] -= rate * (gradient + 0.8 * averages[name] if nesterov else averages[name])

    training.optimizer.register_step_pre_hook(follow)
    fit(training)
    for name, parameter in training.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name], rtol=1e-9, atol=1e-12)


def test_sgd_forgets_an_update_that_overflowed() -> None:
    """As in fp16: the scaler skips the update, and the next one is the first."""
    model = torch.nn.Linear(4, 4, bias=False)
    before = model.weight.detach().clone()
    optim = Optim(name="sgd", lr=0.1, batch_size=1, epochs=1, weight_decay=0.0)
    optimizer, scaler = make_optimizer(model, torch.nn.Module(), optim), torch.amp.GradScaler("cpu")
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        for gradient in (math.inf, 1.0, 1.0):
            model.weight.grad = torch.full((4, 4), gradient) * scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * (1 + 1.9))


@pytest.mark.parametrize("schedule", ["linear", "constant", "cosine", "steps"])
def test_max_steps_ends_training_and_the_schedule_spans_it(make: Make, schedule: str) -> None:
    rows: Logged = []
    history = fit(make("nkd", log_into(rows), max_steps=6, schedule=schedule, warmup=0.4, lr=0.01))
    assert (history.step, history.epoch, len(history.epochs)) == (6, 2, 2)  # the cut epoch is evaluated too
    assert history.examples == 96
    logged = [values["lr"] for values, _, _ in rows if "loss" in values]
    assert logged == pytest.approx([0.01 * rate for rate in rates(6, 0.4, schedule)])
    assert [(step, epoch) for _, step, epoch in rows] == [
        *((step, step / 4) for step in (1, 2, 3, 4)),
        (4, 1.0),
        *((step, step / 4) for step in (5, 6)),
        (6, 1.5),
    ]


class Watching(LossTerm):
    """Sees every example and the progress, and has nothing to say."""

    reads_teacher = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Progress, list[int]]] = []

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        self.student_needs = FeatureRequest(logits=True)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        self.seen.append((progress, batch.index.tolist()))
        return student.logits_OC.sum() * 0


def test_each_epoch_sees_each_example_once_in_a_new_order(make: Make) -> None:
    watching = Watching()
    fit(make(Method({"watching": watching}, {"watching": 1.0}), batch_size=24))
    assert [progress for progress, _ in watching.seen] == [Progress(step // 3, step, 3, 9) for step in range(9)]
    epochs = [watching.seen[start : start + 3] for start in (0, 3, 6)]
    orders = [[sorted(index) for _, index in epoch] for epoch in epochs]
    for order in orders:
        assert [len(index) for index in order] == [24, 24, 16]
        assert sorted(itertools.chain(*order)) == list(range(64))
    assert orders[0] != orders[1] != orders[2]


# What is logged.


def test_the_logged_loss_is_the_sum_of_its_terms(make: Make) -> None:
    rows: Logged = []
    fit(make("ckd", log_into(rows), epochs=1))
    for values, _, _ in rows[:4]:
        assert {name for name in values if name.startswith("loss/")} == {"loss/ce", "loss/kd", "loss/layers"}
        assert values["loss"] == pytest.approx(values["loss/ce"] + values["loss/kd"] + values["loss/layers"], rel=1e-12)
        assert values["loss"] > 0
    assert rows[4][0] == {"validation/accuracy": pytest.approx(rows[4][0]["validation/accuracy"])}


def test_a_logged_loss_is_weighted_and_the_mean_since_the_last(make: Make) -> None:
    single: Logged = []
    double: Logged = []
    fit(make("alp", log_into(single), epochs=1))
    fit(make("alp", log_into(double), epochs=1, runtime={"log_every": 3}))
    assert [step for values, step, _ in double if "loss" in values] == [3, 4]  # the rest at the end of the epoch
    for name in ("loss", "loss/ce", "loss/layers", "layers/alpha_entropy_1"):
        each = [values[name] for values, _, _ in single if "loss" in values]
        assert double[0][0][name] == pytest.approx(np.mean(each[:3]), rel=1e-6)
        assert double[1][0][name] == pytest.approx(each[3], rel=1e-6)
    # Near log 2 before it has learnt anything, times its weight.
    assert single[0][0]["loss/ce"] == pytest.approx(0.5 * np.log(2), rel=0.1)


# What is kept.


class Scripted:
    """Data whose scores are given."""

    def __init__(self, data: Data, scores: list[float]) -> None:
        self.data, self.scores, self.seen = data, iter(scores), list[dict[str, Tensor]]()
        self.token_ids = None

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, index: np.ndarray, epoch: int) -> Batch:
        return self.data.batch(index, epoch)

    def evaluate(self, model: transformers.PreTrainedModel, group: ProcessGroup = SINGLE_PROCESS) -> Evaluation:
        self.seen.append(weights(model))
        score = next(self.scores)
        return {"accuracy": score, "other": 1 - score}, {"validation": np.array([score])}


@pytest.mark.parametrize(
    ("scores", "select_best", "kept"),
    [
        ([0.5, 0.9, 0.7], True, 2),
        ([0.5, 0.9, 0.7], False, 3),
        ([0.7, 0.7, 0.7], True, 1),  # the first of equals
        ([-0.2, -0.1, -0.3], True, 2),  # a correlation may be negative
    ],
)
def test_the_best_or_the_last_epoch_is_kept(
    make: Make, data: TaskData, tmp_path: Path, scores: list[float], select_best: bool, kept: int
) -> None:
    scripted = Scripted(data, scores)
    history = fit(make(examples=scripted, select_best=select_best, folder=tmp_path))
    assert history.best == kept
    assert history.best_score == scores[kept - 1]
    assert history.epochs == [{"accuracy": score, "other": 1 - score} for score in scores]
    assert same(load_file(tmp_path / "model" / "model.safetensors"), scripted.seen[kept - 1])
    assert np.load(tmp_path / "predictions-validation.npy").tolist() == [scores[kept - 1]]


def test_a_methods_parameters_are_trained_and_stay_with_it(make: Make, tmp_path: Path) -> None:
    training = make("ckd", folder=tmp_path)
    before = weights(training.method)
    assert before
    fit(training)
    assert not any(torch.equal(before[name], tensor) for name, tensor in weights(training.method).items())
    saved = load_file(tmp_path / "model" / "model.safetensors")
    with training.full_model() as model:
        assert same(saved, weights(model))
    loaded: Any
    loaded, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same(weights(loaded), saved)


def test_a_term_of_weight_0_is_not_built() -> None:
    unused = {"term": "soft_labels", "temperature": 2.0}
    node: dict[str, Any] = {"terms": {"ce": CE, "kd": unused, "layers": CKD}}
    config = parse_method(node | {"weights": {"ce": 1, "kd": 0, "layers": 0.0}})
    method = config.build(EncoderShape.from_config(bert(2)), None, Classes())
    assert list(method.terms) == ["ce"]
    assert not list(method.parameters())
    assert not config.reads_teacher
    assert (method.student_needs, method.teacher_needs) == (FeatureRequest(logits=True), FeatureRequest())
    # Its options are checked all the same: a typing error would only be found when somebody turns it on.
    unused["temperature"] = -1.0
    with pytest.raises(UserError, match="must be greater than 0"):
        parse_method(node | {"weights": {"ce": 1, "kd": 0, "layers": 0.0}})


def test_a_description_is_of_the_method_and_draws_nothing() -> None:
    """Planning describes each stage's method; a number drawn there would change the weights of every later run."""
    config = parse_method(METHODS["alp"])
    shapes = EncoderShape.from_config(bert(2)), EncoderShape.from_config(bert(4))
    state = torch.get_rng_state()
    description = config.describe(*shapes, Classes())
    assert torch.equal(torch.get_rng_state(), state)
    method = config.build(*shapes, Classes())
    assert (description.student_needs, description.teacher_needs) == (method.student_needs, method.teacher_needs)
    assert description.supervised_layers() == method.supervised_layers()


def test_no_epochs_judge_the_model_as_it_is(make: Make, tmp_path: Path) -> None:
    training = make(epochs=0, select_best=True, folder=tmp_path)
    with training.full_model() as model:
        before = weights(model)
    history = fit(training)
    assert (history.step, history.best, len(history.epochs)) == (0, 1, 1)
    assert same(load_file(tmp_path / "model" / "model.safetensors"), before)
    assert history.best_score == history.epochs[0]["accuracy"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_computed_twice_give_the_same_numbers(make: Make, precision: Any) -> None:
    device, losses = Device(torch.device("cpu"), precision), []
    for twice in (True, False):
        rows: Logged = []
        training = make("alp", log_into(rows), device=device, runtime={"gradient_checkpointing": twice}, max_steps=4)
        layer: Any = training.model.base_model.get_submodule("encoder.layer.0")
        computed: list[int] = []
        layer.intermediate.register_forward_hook(lambda *_, t=training, c=computed: c.append(t.history.step))
        fit(training)
        assert computed.count(2) == 1 + twice, "forward and backward of one update"
        losses.append([values["loss"] for values, _, _ in rows if "loss" in values])
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=0 if precision == "fp32" else 1e-3)


def test_training_learns_and_scores_what_it_predicts(make: Make, splits: dict[str, TokenSplit], tmp_path: Path) -> None:
    rows: Logged = []
    history = fit(make("nkd", log_into(rows), epochs=8, select_best=True, config=NO_DROPOUT, folder=tmp_path))
    losses = [values["loss"] for values, _, _ in rows if "loss" in values]
    assert np.mean(losses[-4:]) < 0.7 * np.mean(losses[:4])
    predictions = np.load(tmp_path / "predictions-validation.npy")
    assert predictions.shape == (40, 2)
    assert history.best_score == pytest.approx((predictions.argmax(1) == splits["validation"].labels).mean())
    assert history.best_score > 0.7


def test_bf16_trains_with_weights_in_float32(make: Make, tmp_path: Path) -> None:
    rows: dict[str, Logged] = {"fp32": [], "bf16": []}
    for precision in ("fp32", "bf16"):
        device, folder = Device.from_name("cpu", precision), tmp_path / precision
        folder.mkdir()
        training = make("ckd", log_into(rows[precision]), device=device, folder=folder, config=NO_DROPOUT, max_steps=4)
        head: Any = training.model.get_submodule("classifier")
        kinds = set[torch.dtype]()
        head.register_forward_pre_hook(lambda one, _, seen=kinds: seen.add(one.weight.dtype) if one.training else None)
        fit(training)
        assert kinds == {{"fp32": torch.float32, "bf16": torch.bfloat16}[precision]}  # rounded with all others
    saved = load_file(tmp_path / "bf16" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert all(tensor.isfinite().all() for tensor in saved.values())
    full, half = ([values["loss"] for values, _, _ in rows[name] if "loss" in values] for name in rows)
    assert full != half
    assert half == pytest.approx(full, rel=0.05)


def test_denormals_are_zero_on_all_threads() -> None:
    """In a process of its own, whose threads are started after that."""
    script = """
import torch
from distill_runner.common.library_switches import computation_mode
torch.set_num_threads(2)
with computation_mode():
    denormals = torch.full((4_000_000,), 1 << 16, dtype=torch.int32).view(torch.float32)
    print((denormals * 0.5).view(torch.int32).count_nonzero().item(), torch.get_num_threads())
    torch.set_num_threads(1)
print(torch.get_num_threads())
"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["0", "2", "2"]
