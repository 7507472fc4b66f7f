"""RAIL-KD: its loss against float64 NumPy, and which teacher layers each epoch reads."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import Method, Progress
from distill_runner.methods.config import parse_method
from distill_runner.methods.hidden_states import PooledStateLoss
from distill_runner.methods.outputs import Classes
from distill_runner.models.features import EncoderShape, FeatureRequest, Features

STUDENT, TEACHER = EncoderShape(3, 6, 2, 2, 9, "bert"), EncoderShape(6, 8, 2, 2, 9, "bert")
LENGTHS = [2, 3, 5]
RAIL = {"rule": "random", "seed": 1, "sort": True, "every_epoch": True}


def batch() -> Batch:
    tokens, starts = torch.zeros(sum(LENGTHS), dtype=torch.long), torch.tensor([0, *np.cumsum(LENGTHS)[:-1]])
    return Batch(tokens, tokens, tokens, starts, torch.arange(len(LENGTHS)), ())


def states(seed: int, width: int, layers: range) -> dict[int, Tensor]:
    generator = np.random.default_rng(seed)
    return {layer: torch.from_numpy(generator.normal(size=(sum(LENGTHS), width))) for layer in layers}


def at(epoch: int) -> Progress:
    return Progress(epoch, epoch * 5, 10, 50)


def rail(term: str = "pooled_states", **options: Any) -> Method:
    terms = {"layers": {"term": term, "mapping": RAIL} | options}
    method = parse_method({"terms": terms, "weights": {"layers": 1.0}}).make()
    return method.bind(STUDENT, TEACHER, Classes()).double()


def test_means_by_hand() -> None:
    column = torch.tensor([1.0, 3.0, 2.0, 2.0, 5.0, 1.0, 1.0, 1.0, 1.0, 6.0])[:, None]
    assert batch().means(column).tolist() == [[2.0], [3.0], [2.0]]


@pytest.mark.parametrize("compare", ["layers", "concatenation"])
@pytest.mark.parametrize("width", [None, 4])
def test_equals_the_float64_reference(compare: str, width: int | None) -> None:
    method = rail(compare=compare, width=width)
    term = method.named_terms()["layers"]
    assert isinstance(term, PooledStateLoss)
    assert term.student_maps["1"].out_features == (width or STUDENT.width)
    method.begin_epoch(at(0))
    student, teacher = states(0, 6, range(1, 4)), states(1, 8, range(1, 7))
    value = method(Features(states=student), Features(states=teacher), batch(), at(0))["layers"]

    def side(features: dict[int, Tensor], maps: Any, layers: list[int]) -> list[np.ndarray]:
        """The mapped layers. A concatenation goes through one matrix, whose parts are the layers' own."""
        edges = np.cumsum([0, *LENGTHS])
        means = [np.stack([features[layer].numpy()[a:b].mean(0) for a, b in pairwise(edges)]) for layer in layers]
        linear = [maps[str(j)] for j in (1, 2)]
        weights = [one.weight.detach().numpy() for one in linear]
        biases = [one.bias.detach().numpy() for one in linear]
        if compare == "concatenation":
            return [np.concatenate(means, axis=1) @ np.concatenate(weights, axis=1).T + sum(biases)]
        return [mean @ weight.T + bias for mean, weight, bias in zip(means, weights, biases, strict=True)]

    pairs = zip(
        side(student, term.student_maps, [1, 2]),
        side(teacher, term.teacher_maps, [k for (k,) in term.layers.values()]),
        strict=True,
    )
    cosines = [(x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1) for x, y in pairs]
    assert value.item() == pytest.approx(sum((2 - 2 * cosine).mean() for cosine in cosines), rel=1e-12)


@pytest.mark.parametrize("compare", ["layers", "concatenation"])
def test_gradient(compare: str) -> None:
    method = rail(compare=compare)
    method.begin_epoch(at(0))
    teacher = Features(states=states(1, 8, range(1, 7)))

    def loss(one: Tensor, two: Tensor) -> Tensor:
        result: Tensor = method(Features(states={1: one, 2: two}), teacher, batch(), at(0))["layers"]
        return result

    leaves = tuple(value.requires_grad_() for value in states(0, 6, range(1, 3)).values())
    assert torch.autograd.gradcheck(loss, leaves)


def test_each_epoch_reads_its_own_layers() -> None:
    method = rail()
    every = frozenset(range(1, 7))
    assert method.student_needs == FeatureRequest(states=frozenset({1, 2}))
    assert method.teacher_needs == FeatureRequest(states=every), "for a cache"
    drawn = []
    for epoch in range(10):
        method.begin_epoch(at(epoch))
        needs = sorted(method.teacher_needs.states)
        assert len(needs) == 2
        drawn.append(needs)
        resumed = rail()
        resumed.begin_epoch(at(epoch))
        assert resumed.teacher_needs == method.teacher_needs, "a run that resumes in this epoch reads the same layers"
    assert {layer for needs in drawn for layer in needs} == every
    # mapping.seed=1, drawn once and written down.
    assert drawn[:4] == [[2, 6], [1, 6], [1, 4], [5, 6]]


@pytest.mark.parametrize(
    ("term", "options"),
    [("hidden_states", {"combine": "concatenate", "distance": "mse"}), ("token_states", {}), ("attention_scores", {})],
)
def test_any_term_takes_drawn_layers(term: str, options: dict[str, Any]) -> None:
    method = rail(term, **options)
    layers = set()
    for epoch in range(3):
        method.begin_epoch(at(epoch))
        layers.add(str(method.teacher_needs))
    assert len(layers) == 3
