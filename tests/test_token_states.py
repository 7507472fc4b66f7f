"""TinyBERT's and DistilBERT's terms against sums written out in float64, from the models' own forward."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill_runner.common.errors import UserError
from distill_runner.datasets.batches import Batch
from distill_runner.datasets.splits import TokenSplit
from distill_runner.methods.attention import AttentionScoreLoss
from distill_runner.methods.base import LossTerm, Progress
from distill_runner.methods.config import TermConfig
from distill_runner.methods.hidden_states import EmbeddingLoss, TokenStateLoss
from distill_runner.methods.layer_mapping import LayerMapping
from distill_runner.methods.outputs import Classes
from distill_runner.models.extract import extract
from distill_runner.models.features import EncoderShape, FeatureRequest
from distill_runner.training.devices import Device
from distill_runner.training.teachers import LiveTargets
from helpers.families import config_of, make

CPU = Device.from_name("cpu", "fp32")
PROGRESS = Progress(epoch=0, step=0, num_epochs=1, num_steps=1)
TOP = LayerMapping(rule="group_top", supervise_last=True)


def shape(model: PreTrainedModel) -> EncoderShape:
    return EncoderShape.from_config(model.config)


def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A student of 2 layers of 24 and a teacher of 4 layers of 32, with 4 heads each."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 24}
    return make("bert", dtype=torch.float64, **sizes), make("bert", dtype=torch.float64, seed=2, num_hidden_layers=4)


def value(term: LossTerm, student: PreTrainedModel, teacher: PreTrainedModel, batch: Batch) -> Tensor:
    taught = extract(teacher, batch, term.teacher_needs)
    found: Tensor = term(extract(student, batch, term.student_needs), taught, batch, PROGRESS)
    return found


def own_forward(model: Any, batch: Batch, **asked: bool) -> list[Any]:
    """Through transformers, each example by itself."""
    pieces = zip(*(row.tensor_split(batch.starts[1:]) for row in (batch.input_ids, batch.segments)), strict=True)
    model.set_attn_implementation("eager")
    outputs = [model(input_ids=i[None], token_type_ids=s[None], **asked) for i, s in pieces]
    model.set_attn_implementation("sdpa")
    return outputs


def test_hidden_states_and_embeddings_are_those_of_tinybert(tokens: TokenSplit) -> None:
    (student, teacher), batch = pair(), tokens.batch(range(7))
    torch.manual_seed(0)
    hidden, embeddings = TokenStateLoss(TOP).double(), EmbeddingLoss().double()
    hidden.bind(shape(student), shape(teacher), Classes())
    embeddings.bind(shape(student), shape(teacher), Classes())
    hidden.double(), embeddings.double()
    with torch.no_grad():
        mine = own_forward(student, batch, output_hidden_states=True)
        theirs = own_forward(teacher, batch, output_hidden_states=True)
        for term, places in ((hidden, [(1, 2), (2, 4)]), (embeddings, [(0, 0)])):
            weight, bias = (parameter.numpy() for parameter in term.project.parameters())
            expected = 0.0
            for j, k in places:
                total, count = 0.0, 0
                for one, other in zip(mine, theirs, strict=True):
                    projected = one.hidden_states[j][0].numpy() @ weight.T + bias
                    total += ((projected - other.hidden_states[k][0].numpy()) ** 2).sum()
                    count += projected.size
                expected += total / count
            assert value(term, student, teacher, batch).item() == pytest.approx(expected, rel=1e-9)
            assert expected > 0.1


def test_the_cosine_is_that_of_distilbert(tokens: TokenSplit) -> None:
    student, teacher = make("distilbert", dtype=torch.float64), make("bert", dtype=torch.float64, num_hidden_layers=4)
    batch = tokens.batch(range(6))
    term = TokenStateLoss(LayerMapping(rule="top"), "cosine", project=False)
    term.bind(shape(student), shape(teacher), Classes())
    assert term.student_needs == FeatureRequest(states=frozenset({3}))
    assert term.teacher_needs == FeatureRequest(states=frozenset({4}))
    assert not list(term.parameters())
    with torch.no_grad():
        ids, segments, mask = batch.to_padded()
        one = student.base_model(ids, attention_mask=mask).last_hidden_state[mask.bool()].numpy()
        other = teacher.base_model(ids, mask, segments).last_hidden_state[mask.bool()].numpy()
        cosines = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
        assert value(term, student, teacher, batch).item() == pytest.approx((1 - cosines).mean(), rel=1e-9)


def test_attention_scores_are_those_of_tinybert(tokens: TokenSplit) -> None:
    """Before the softmax, from the layers' own weights; their softmax is the attention that transformers gives."""
    (student, teacher), batch = pair(), tokens.batch(range(9))
    term = AttentionScoreLoss(TOP)
    term.bind(shape(student), shape(teacher), Classes())
    expected = 0.0
    with torch.no_grad():
        sides = []
        for model in (student, teacher):
            outputs = own_forward(model, batch, output_hidden_states=True, output_attentions=True)
            sides.append([_scores(model, output) for output in outputs])
        for one, other in zip(*sides, strict=True):
            for j, k in ((0, 1), (1, 3)):
                expected += float(((one[j] - other[k]) ** 2).mean()) / 9
    assert value(term, student, teacher, batch).item() == pytest.approx(expected, rel=1e-9)
    assert expected > 0.1


def _scores(model: Any, output: Any) -> list[np.ndarray]:
    scores = []
    for layer, states, attention in zip(
        model.bert.encoder.layer, output.hidden_states[:-1], output.attentions, strict=True
    ):
        this, size = layer.attention.self, states.shape[-1] // 4
        query, key = (part(states[0]).numpy().reshape(-1, 4, size) for part in (this.query, this.key))
        score = np.einsum("qhd,khd->hqk", query, key) / math.sqrt(size)
        powers = np.exp(score)
        np.testing.assert_allclose(powers / powers.sum(-1, keepdims=True), attention[0].numpy(), rtol=1e-9)
        scores.append(score)
    return scores


@pytest.mark.parametrize(
    "term", [AttentionScoreLoss(TOP), TokenStateLoss(TOP), EmbeddingLoss()], ids=lambda t: type(t).__name__
)
def test_gradients_are_those_of_finite_differences(tokens: TokenSplit, term: LossTerm) -> None:
    (student, teacher), batch = pair(), tokens.batch([3, 5])
    term.bind(shape(student), shape(teacher), Classes())
    term.double()
    with torch.no_grad():
        taught = extract(teacher, batch, term.teacher_needs)
        learnt = extract(student, batch, term.student_needs)
    places = [(learnt.projections, key) for key in learnt.projections] + [(learnt.states, key) for key in learnt.states]

    def loss(*states: Tensor) -> Tensor:
        for (store, key), value in zip(places, states, strict=True):
            store[key] = value  # type: ignore[index]
        found: Tensor = term(learnt, taught, batch, PROGRESS)
        return found

    given = [store[key][:].clone().requires_grad_() for store, key in places]  # type: ignore[index]
    assert torch.autograd.gradcheck(loss, given, fast_mode=True)


def test_a_live_teacher_gives_states_in_the_order_of_the_batch(tokens: TokenSplit) -> None:
    teacher, needs = make("bert"), FeatureRequest(states=frozenset({0, 2}))
    live, batch = LiveTargets(teacher, tokens, needs, CPU), tokens.batch([7, 3, 39, 12, 0])
    given = live(batch, PROGRESS, needs)
    with torch.no_grad():
        expected = extract(teacher, batch, needs)
    for layer in (0, 2):
        torch.testing.assert_close(given.states[layer], expected.states[layer], rtol=1e-5, atol=1e-5)


def test_impossible_pairs_are_refused() -> None:
    narrow, wide = (
        EncoderShape(2, 24, 3, 2, 9, "bert"),
        EncoderShape.from_config(config_of("bert", num_hidden_layers=4)),
    )
    with pytest.raises(UserError, match="it has 3 attention heads, the teacher 4"):
        AttentionScoreLoss(TOP).bind(narrow, wide, Classes())
    with pytest.raises(UserError, match="its states have 24 features, the teacher's 32"):
        TokenStateLoss(TOP, project=False).bind(narrow, wide, Classes())
    with pytest.raises(UserError, match="distance=l1: there is no such choice"):
        TermConfig.parse({"term": "embeddings", "distance": "l1"})
