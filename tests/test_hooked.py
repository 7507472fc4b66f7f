"""Queries, keys and values of DeBERTa and MPNet, against products written out in float64."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from distill_runner.datasets.splits import TokenSplit
from distill_runner.methods.attention import AttentionRelationLoss
from distill_runner.methods.base import Progress
from distill_runner.methods.layer_mapping import LayerMapping
from distill_runner.methods.outputs import Classes
from distill_runner.models.extract import extract
from distill_runner.models.families import HOOKED
from distill_runner.models.features import EncoderShape, FeatureRequest
from helpers.families import make

PLACES = {
    "deberta": ("deberta.encoder.layer.{}.attention.self", ()),
    "deberta-v2": ("deberta.encoder.layer.{}.attention.self", ("query_proj", "key_proj", "value_proj")),
    "mpnet": ("mpnet.encoder.layer.{}.attention.attn", ("q", "k", "v")),
}
HEADS, SIZE = 4, 8
NAMES = ("query", "key", "value")


def projections(model: Any, family: str, layer: int, h: np.ndarray) -> dict[str, np.ndarray]:
    """Queries, keys and values (L, H) of one text, from the input (L, H) of a layer, counted from 1."""
    place, names = PLACES[family]
    attention = model.get_submodule(place.format(layer - 1))
    if names:
        linear = [getattr(attention, name) for name in names]
        return {
            name: h @ one.weight.detach().numpy().T + one.bias.detach().numpy()
            for name, one in zip(NAMES, linear, strict=True)
        }
    weight, found = attention.in_proj.weight.detach().numpy(), {name: np.zeros_like(h) for name in NAMES}
    biases = {"query": attention.q_bias.detach().numpy(), "value": attention.v_bias.detach().numpy()}
    for head, (number, name) in itertools.product(range(HEADS), enumerate(NAMES)):
        first, own = (3 * head + number) * SIZE, slice(head * SIZE, (head + 1) * SIZE)
        found[name][:, own] = h @ weight[first : first + SIZE].T + biases.get(name, np.zeros(HEADS * SIZE))[own]
    return found


def alone(model: Any, family: str, layer: int, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """The same of one text from its ids, through the model's own forward pass without padding."""
    with torch.no_grad():
        states = model(input_ids=ids[None], output_hidden_states=True).hidden_states[layer - 1][0]
    return projections(model, family, layer, states.numpy())


def random_biases(model: Any, family: str) -> Any:
    """DeBERTa's own start at zero, where an error would not show."""
    place, names = PLACES[family]
    for layer in range(3):
        attention = model.get_submodule(place.format(layer))
        for one in [getattr(attention, name).bias for name in names] or [attention.q_bias, attention.v_bias]:
            torch.nn.init.normal_(one.data)
    return model


@pytest.mark.parametrize("family", HOOKED)
def test_projections_are_the_products_of_each_text_alone(tokens: TokenSplit, family: str) -> None:
    model, batch = random_biases(make(family, dtype=torch.float64), family), tokens.batch(range(5))
    needs = FeatureRequest(logits=True, projections=frozenset((name, layer) for name in NAMES for layer in (1, 3)))  # type: ignore[misc]
    with torch.no_grad():
        plain, features = extract(model, batch, FeatureRequest(logits=True)), extract(model, batch, needs)
    torch.testing.assert_close(features.logits, plain.logits)
    bounds = [*batch.starts.tolist(), len(batch.input_ids)]
    for (start, stop), layer in itertools.product(itertools.pairwise(bounds), (1, 3)):
        expected = alone(model, family, layer, batch.input_ids[start:stop])
        for name in NAMES:
            ours = features.projections[name, layer][start:stop].numpy()  # type: ignore[index]
            np.testing.assert_allclose(ours, expected[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("family", HOOKED)
def test_relations_are_those_written_out(tokens: TokenSplit, family: str) -> None:
    """MiniLMv2 of a family with itself: the mean of the divergences of QQ, KK and VV over heads and tokens."""
    student, teacher = (random_biases(make(family, dtype=torch.float64, seed=seed), family) for seed in (1, 2))
    batch, layer = tokens.batch(range(4)), 3
    term = AttentionRelationLoss(LayerMapping(rule="top", layer=layer), ["QQ", "KK", "VV"])
    shapes = [EncoderShape.from_config(model.config) for model in (student, teacher)]
    term.bind(shapes[0], shapes[1], Classes())
    with torch.no_grad():
        sides = extract(student, batch, term.student_needs), extract(teacher, batch, term.teacher_needs)
        found = term(*sides, batch, Progress(epoch=0, step=0, num_epochs=1, num_steps=1)).item()
    expected, bounds = 0.0, [*batch.starts.tolist(), len(batch.input_ids)]
    for start, stop in itertools.pairwise(bounds):
        own, other = (alone(model, family, layer, batch.input_ids[start:stop]) for model in (student, teacher))
        for name, head in itertools.product(NAMES, range(HEADS)):
            columns = slice(head * SIZE, (head + 1) * SIZE)
            powers = [np.exp(x[:, columns] @ x[:, columns].T / math.sqrt(SIZE)) for x in (own[name], other[name])]
            s, t = (power / power.sum(1, keepdims=True) for power in powers)
            expected += float((t * np.log(t / s)).sum(1).mean()) / HEADS / 4
    assert found == pytest.approx(expected, rel=1e-8)
    assert expected > 0.01
