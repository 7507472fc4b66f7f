"""``runtime.compile``: compiled layers give the same results, and a line says where a model stays uncompiled."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from distill_runner.datasets.batches import Batch
from distill_runner.datasets.splits import TokenSplit
from distill_runner.models import extract as extracting
from distill_runner.models.extract import extract
from distill_runner.models.families import PACKED
from distill_runner.models.features import FeatureRequest
from helpers.command import distill_run
from helpers.families import make

NEEDS = FeatureRequest(logits=True, cls=frozenset({1, 2, 3}), projections=frozenset({("value", 2)}))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    extracting._can_compile.cache_clear()
    extracting._warn_not_compiled.cache_clear()


def learned(model: Any, batch: Batch) -> list[Tensor]:
    """The loss and its gradients; the state of torch's own generator is the same at each call."""
    torch.manual_seed(7)
    model.zero_grad()
    features = extract(model, batch, NEEDS)
    assert features.logits is not None
    read = (features.logits, *features.cls.values(), *features.projections.values())
    loss = torch.stack([one.square().mean() for one in read]).sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "graphs", "noise"),
    [
        pytest.param("bert", 2, 3, id="bert, own dropout"),
        pytest.param("bert", 2, None, id="bert, torch's dropout"),
        pytest.param("modernbert", 3, 3, id="modernbert, own dropout"),
    ],
)
def test_a_compiled_layer_is_one_graph_of_the_same_results(
    family: str, graphs: int, noise: int | None, tokens: TokenSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, for batches of other sizes and lengths; all layers of a kind share a graph."""
    once = torch.compile(extracting._layer, dynamic=True, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(extracting, "_compiled_layer", lambda: once)
    model = make(family, dtype=torch.float64).train()
    ranges = (range(20), range(7, 23), range(40, 51))
    batches = [replace(tokens.batch(one, None), dropout_seed=noise) for one in ranges]
    expected = [learned(model, batch) for batch in batches]
    for layer in PACKED[family].layers(model.base_model):
        layer.module.is_compiled = True
    for batch, values in zip(batches, expected, strict=True):
        torch.testing.assert_close(learned(model, batch), values, rtol=1e-10, atol=1e-10)
    assert counters["stats"]["unique_graphs"] == graphs


def losses(folder: Path) -> list[float]:
    (file,) = folder.glob("outputs/runs/**/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
def test_a_compiled_run_ends_as_an_uncompiled_one(
    tiny_task_folder: Path, tiny_bert_folder: Path, tmp_path: Path
) -> None:
    """By the console script, with dropout; paused and resumed it gives the same bits."""
    data = ("task=custom", f"task.dataset={tiny_task_folder}", "task.columns=[sentence1,sentence2]")
    model = ("teacher=base", f"teacher.source={tiny_bert_folder}", "teacher.name=tiny", "student.num_layers=2")
    small = (
        "method=nkd",
        "task.max_length=48",
        "optim.batch_size=16",
        "optim.epochs=2",
        "runtime.log_every=1",
        "runtime.device=cpu",
    )

    def run(name: str, *options: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        ended = distill_run(folder, *data, *model, *small, *options)
        assert ended.code == 0, ended.err
        assert "not compiled" not in ended.err
        return folder

    plain, whole = run("plain"), run("whole", "runtime.compile=true")
    assert counters["stats"]["unique_graphs"] >= 4, "a layer and the last layer, in training and in evaluation"
    assert not counters["graph_break"]
    assert len(losses(plain)) == 8
    assert losses(whole) == pytest.approx(losses(plain), rel=1e-4)
    run("resumed", "runtime.compile=true", "runtime.pause_after=1")
    resumed = run("resumed", "runtime.compile=true")
    files = [next(folder.glob("outputs/store/**/model/model.safetensors")) for folder in (whole, resumed)]
    assert files[0].read_bytes() == files[1].read_bytes()


def left_out(model: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.WARNING):
        extracting.compile_layers(model, CPU)
        extracting.compile_layers(model, CPU)
    assert not any(getattr(module, "is_compiled", False) for module in model.modules())
    return [message for message in caplog.messages if "runtime.compile" in message]  # torch has lines of its own


def test_without_a_compiler_a_line_names_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", (None, "no-such-compiler"))
    monkeypatch.setattr(config, "force_disable_caches", True)
    (line,) = left_out(make("bert"), caplog)
    assert line.startswith("runtime.compile=true: not compiled (")
    assert "No working C++ compiler" in line


def test_a_family_that_runs_padded_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    reason = "models of type mpnet do not run layer by layer"
    assert left_out(make("mpnet"), caplog) == [f"runtime.compile=true: not compiled ({reason})"]
