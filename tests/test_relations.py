"""Relations of attention as a term of a method, and the features that it reads: packed and padded."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, EuroBertConfig, PreTrainedModel

from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.batches import Batch
from distill_runner.datasets.splits import TokenSplit
from distill_runner.methods.attention import AttentionRelationLoss
from distill_runner.methods.base import LossTerm, Method, Progress
from distill_runner.methods.hidden_states import HiddenStateLoss
from distill_runner.methods.layer_mapping import LayerMapping
from distill_runner.methods.outputs import Classes
from distill_runner.models.extract import extract
from distill_runner.models.families import PROJECTIONS, Projection
from distill_runner.models.features import EncoderShape, FeatureRequest
from distill_runner.models.padded import extract_padded
from distill_runner.running import run_stage
from distill_runner.training.devices import Device
from distill_runner.training.teachers import LiveTargets
from helpers.families import config_of, make

Compose = Callable[..., RunConfig]
CPU = Device.from_name("cpu", "fp32")
PROGRESS = Progress(epoch=0, step=0, num_epochs=1, num_steps=1)
TOP = LayerMapping(rule="group_top", supervise_last=True)


def bert(num_layers: int, heads: int = 4, width: int = 32, seed: int = 1) -> PreTrainedModel:
    torch.manual_seed(seed)
    config: Any = BertConfig
    sizes = {"num_hidden_layers": num_layers, "hidden_size": width, "num_attention_heads": heads}
    built = config(vocab_size=100, intermediate_size=64, max_position_embeddings=64, initializer_range=0.3, **sizes)
    return BertForSequenceClassification(built).double().eval()


def bound(term: LossTerm, student: PreTrainedModel, teacher: PreTrainedModel) -> Any:
    term.bind(EncoderShape.from_config(student.config), EncoderShape.from_config(teacher.config), Classes())
    return term


def value(term: LossTerm, student: PreTrainedModel, teacher: PreTrainedModel, batch: Batch) -> Tensor:
    taught, learnt = extract(teacher, batch, term.teacher_needs), extract(student, batch, term.student_needs)
    found: Tensor = term(learnt, taught, batch, PROGRESS)
    return found


def probabilities(model: PreTrainedModel, batch: Batch, example: int) -> list[Tensor]:
    """Attention of every layer as transformers itself gives it, of one example without padding: (heads, L, L)."""
    bounds = [*batch.starts.tolist(), len(batch.input_ids)]
    ids, segments = (part[None, bounds[example] : bounds[example + 1]] for part in (batch.input_ids, batch.segments))
    model.set_attn_implementation("eager")
    attentions = model(ids, token_type_ids=segments, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return [attention[0] for attention in attentions]


def test_kl_is_that_of_the_attention_probabilities(tokens: TokenSplit) -> None:
    student, teacher, batch = bert(2), bert(4, seed=2), tokens.batch(range(9))
    expected = {"mean": 0.0, "sum": 0.0}
    with torch.no_grad():
        for example in range(9):
            taught, learnt = probabilities(teacher, batch, example), probabilities(student, batch, example)
            matched = [(taught[1], learnt[0]), (taught[3], learnt[1])]
            by_layer = [(ours * (ours / theirs).log()).sum(-1).mean().item() for ours, theirs in matched]
            expected["sum"] += sum(by_layer) / 9
            expected["mean"] += sum(by_layer) / 2 / 9
        for over_layers, number in expected.items():
            term = bound(AttentionRelationLoss(TOP, ["QK"], over_layers=over_layers), student, teacher)  # type: ignore[arg-type]
            assert value(term, student, teacher, batch).item() == pytest.approx(number, rel=1e-9)
    assert expected["mean"] > 0.01


def test_minilmv2_for_unequal_widths_and_heads(tokens: TokenSplit) -> None:
    """A student of 18 with 3 heads and a teacher of 24 with 4, in 6 relation heads, against rows written out."""
    student, teacher, batch = bert(2, heads=3, width=18), bert(4, heads=4, width=24, seed=2), tokens.batch(range(7))
    pairs, last = ["QQ", "KK", "VV", "QK"], LayerMapping(rule="top", layer=3)
    term = bound(AttentionRelationLoss(last, pairs, heads=6), student, teacher)  # type: ignore[arg-type]
    assert term.student_needs == FeatureRequest(projections=frozenset((name, 2) for name in PROJECTIONS))
    assert term.teacher_needs == FeatureRequest(projections=frozenset((name, 3) for name in PROJECTIONS))
    names: dict[str, Projection] = {"Q": "query", "K": "key", "V": "value"}
    expected, bounds = 0.0, [*batch.starts.tolist(), len(batch.input_ids)]
    with torch.no_grad():
        taught, learnt = extract(teacher, batch, term.teacher_needs), extract(student, batch, term.student_needs)
        for first, second in map(tuple, pairs):
            for start, stop in itertools.pairwise(bounds):
                for head in range(6):
                    relation = {}
                    for name, features, layer, d in (("T", taught, 3, 4), ("S", learnt, 2, 3)):
                        x, y = (
                            features.projections[names[letter], layer][start:stop, head * d : (head + 1) * d].numpy()
                            for letter in (first, second)
                        )
                        powers = np.exp(x @ y.T / math.sqrt(d))
                        relation[name] = powers / powers.sum(1, keepdims=True)
                    divergence = (relation["T"] * np.log(relation["T"] / relation["S"])).sum(1)
                    expected += divergence.mean() / 6 / 7
        assert value(term, student, teacher, batch).item() == pytest.approx(expected, rel=1e-9)


# Features.

EVERY = frozenset(itertools.product(PROJECTIONS, (1, 2, 3)))
ALL = FeatureRequest(logits=True, cls=frozenset({1, 3}), projections=EVERY)


@pytest.mark.parametrize(
    "needs",
    [
        ALL,
        FeatureRequest(projections=frozenset({("query", 3), ("key", 3)})),
        FeatureRequest(cls=frozenset({2}), projections=frozenset({("query", 2), ("value", 1)})),
        FeatureRequest(cls=frozenset({1}), projections=frozenset({("key", 3)})),
    ],
)
@pytest.mark.parametrize("length_multiple", [16, None])
def test_packed_projections_are_the_padded_ones(
    tokens: TokenSplit, needs: FeatureRequest, length_multiple: int | None
) -> None:
    model, batch = bert(3), tokens.batch(range(20), length_multiple)
    results = []
    for read in (extract, extract_padded):
        features = read(model, batch, needs)
        assert features.projections.keys() == needs.projections
        states = [*(features.projections[place] for place in sorted(needs.projections))]
        states += [features.cls[layer] for layer in sorted(needs.cls)]
        model.zero_grad()
        torch.stack([(state * torch.arange(32)).sin().sum() for state in states]).sum().backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        results.append([*states, *gradients])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-8, atol=1e-8)


def test_other_families_give_their_projections_too(tokens: TokenSplit) -> None:
    model = make("mobilebert", dtype=torch.float64)
    batch = tokens.batch(range(12))
    seen: dict[str, Tensor] = {}
    linear: Any = model.get_submodule("mobilebert.encoder.layer.1.attention.self.key")
    handle = linear.register_forward_hook(lambda _module, _inputs, output: seen.update(key=output))
    with torch.no_grad():
        before = extract(model, batch, FeatureRequest(logits=True))
        features = extract(model, batch, FeatureRequest(logits=True, projections=frozenset({("key", 2)})))
    handle.remove()
    _, _, mask = batch.to_padded()
    torch.testing.assert_close(features.projections["key", 2], seen["key"][mask.bool()])
    torch.testing.assert_close(features.logits, before.logits)


def test_a_family_without_them_is_refused_before_training() -> None:
    shape = replace(EncoderShape.from_config(config_of("bert")), model_type="rembert")
    method = Method({"kl": AttentionRelationLoss(LayerMapping(rule="top"), ["QK"])}, {"kl": 1.0})
    with pytest.raises(UserError, match="a student of type rembert does not expose its queries"):
        method.bind(shape, EncoderShape.from_config(config_of("bert")), Classes())
    with pytest.raises(UserError, match="a teacher of type rembert does not"):
        method.bind(EncoderShape.from_config(config_of("albert")), shape, Classes())


def test_heads_that_share_keys_are_refused_before_training() -> None:
    shape = EncoderShape.from_config(EuroBertConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2))
    method = Method({"kl": AttentionRelationLoss(LayerMapping(rule="top"), ["KK"])}, {"kl": 1.0})
    with pytest.raises(UserError, match="several heads of a teacher of type eurobert share their keys and values"):
        method.bind(EncoderShape.from_config(config_of("bert")), shape, Classes())
    each_its_own = EuroBertConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=4)
    method.bind(EncoderShape.from_config(config_of("bert")), EncoderShape.from_config(each_its_own), Classes())


def test_a_model_stops_at_what_is_read_of_its_last_layer(tokens: TokenSplit) -> None:
    model, ran = bert(4), []
    for name, module in model.named_modules():
        if name.endswith(".intermediate"):
            module.register_forward_hook(lambda *_args, name=name: ran.append(name))
    features = extract(
        model, tokens.batch(range(4)), FeatureRequest(projections=frozenset({("query", 2), ("value", 2)}))
    )
    assert ran == ["bert.encoder.layer.0.intermediate"]
    torch.stack([states.sin().sum() for states in features.projections.values()]).sum().backward()
    layer: Any = model.get_submodule("bert.encoder.layer.1")
    read = {name.split(".")[2] for name, parameter in layer.named_parameters() if parameter.grad is not None}
    assert read == {"query", "value"}


def test_a_live_teacher_gives_projections_in_the_order_of_the_batch(tokens: TokenSplit) -> None:
    teacher, needs = bert(3), FeatureRequest(projections=frozenset({("query", 2)}), cls=frozenset({3}))
    live, batch = LiveTargets(teacher, tokens, needs, CPU), tokens.batch([7, 3, 39, 12, 0])
    with torch.no_grad():
        expected = extract(teacher, batch, needs)
    found = live(batch, PROGRESS, needs)
    torch.testing.assert_close(found.projections["query", 2], expected.projections["query", 2], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.cls[3], expected.cls[3], rtol=1e-10, atol=1e-10)
    assert live(batch, PROGRESS, FeatureRequest(cls=frozenset({1}))).projections == {}


# Refusals.


def refusal(term: LossTerm, student: EncoderShape, teacher: EncoderShape | None) -> str:
    with pytest.raises(UserError) as caught:
        term.bind(student, teacher, Classes())
    return str(caught.value).splitlines()[0]


def test_impossible_pairs_are_refused() -> None:
    student, teacher = EncoderShape(2, 30, 3, 2, 9, "bert"), EncoderShape(4, 32, 4, 2, 9, "bert")
    kl, cos = AttentionRelationLoss(TOP, ["QK"]), HiddenStateLoss(TOP, "select", "cosine")
    assert (
        refusal(kl, student, teacher)
        == "student: it has 3 attention heads, the teacher 4; heads are compared one to one"
    )
    assert refusal(cos, student, teacher).startswith("student: its states have 30 features, the teacher's 32")
    assert refusal(kl, student, None) == "teacher: an intermediate loss needs a teacher"
    divisor = "heads=4: must divide the width of the student, 30"
    assert refusal(AttentionRelationLoss(TOP, ["QQ"], heads=4), student, teacher) == divisor
    several = AttentionRelationLoss(LayerMapping(rule="all"), ["QQ"], heads=2)
    assert "compares student layer 1 with one teacher layer, not with 4" in refusal(several, student, teacher)
    assert refusal(
        AttentionRelationLoss(LayerMapping(rule="top", layer=5), ["QQ"], heads=2), student, teacher
    ).startswith("mapping.layer=5: there is no teacher layer 5")
    AttentionRelationLoss(TOP, ["QQ"], heads=2).bind(student, teacher, Classes())
    for pairs in ([], ["QQ", "QQ"], ["QX"]):
        with pytest.raises(UserError, match="pairs"):
            AttentionRelationLoss(TOP, pairs)  # type: ignore[arg-type]


# On plain text.

TEXT = ["method=minilmv2", "corpus=embedded", "corpus.max_length=32", "relations.heads=8"]
TEXT += ["student.width=32", "student.heads=2", "student.num_layers=2"]


def test_a_student_with_nothing_to_judge_it_is_refused(compose: Compose, tmp_path: Path) -> None:
    run = compose(*TEXT)
    run.stages["student"] = run.stages["distil"]
    with pytest.raises(UserError, match="from plain text alone has no score"):
        run_stage(run, tmp_path, {})
