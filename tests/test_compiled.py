"""``runtime.compile``: compiled layers give the same results, and a line says where a model stays uncompiled."""

from dataclasses import replace
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
from helpers.families import make

NEEDS = FeatureRequest(logits=True, cls=frozenset({1, 2, 3}), projections=frozenset({("value", 2)}))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def learned(model: Any, batch: Batch) -> list[Tensor]:
    """The loss and its gradients; the state of torch's own generator is the same at each call."""
    torch.manual_seed(7)
    model.zero_grad()
    features = extract(model, batch, NEEDS)
    read = (features.logits_OC, *features.cls.values(), *features.projections.values())
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
