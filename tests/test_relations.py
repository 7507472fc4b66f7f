"""Relations of attention as a term of a method, and the features that it reads: packed and padded."""

import itertools
import json
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
from distill_runner.models.features import EncoderShape, FeatureRequest, Features
from distill_runner.models.padded import extract_padded
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve
from distill_runner.pipeline.store import Store
from distill_runner.pipeline.targets import uncacheable_reason
from distill_runner.running import run_stage
from distill_runner.sweeping.plan import START_SECONDS, Estimator
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


@pytest.mark.parametrize("pairs", [["QK"], ["QQ", "KK", "VV"]])
def test_equal_models_are_at_no_distance(tokens: TokenSplit, pairs: Any) -> None:
    model, batch = bert(3), tokens.batch(range(20))
    identity = LayerMapping(rule="explicit", layers=[[1], [2], [3]])
    for term in (
        AttentionRelationLoss(identity, pairs),
        HiddenStateLoss(identity, "select", "cosine"),
    ):
        found = value(bound(term, model, model), model, model, batch)
        found.backward()
        assert found.item() == pytest.approx(0, abs=1e-12)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients
        assert max(gradient.abs().max().item() for gradient in gradients) < 1e-10
        model.zero_grad()


def test_cosine_by_hand() -> None:
    # Angles of 60 and 90 degrees in layer 1, 0 and 180 in layer 2: (1/2 + 1) / 2 + (0 + 2) / 2.
    root = math.sqrt(3) / 2
    student = Features(cls={1: torch.tensor([[2.0, 0.0], [0.0, 1.0]]), 2: torch.tensor([[1.0, 1.0], [3.0, 0.0]])})
    teacher = Features(cls={2: torch.tensor([[0.5, root], [4.0, 0.0]]), 4: torch.tensor([[5.0, 5.0], [-1.0, 0.0]])})
    term = HiddenStateLoss(TOP, "select", "cosine")
    term.bind(EncoderShape(2, 2, 1, 2, 9, "bert"), EncoderShape(4, 2, 1, 2, 9, "bert"), Classes())
    nothing = torch.zeros(0)
    found = term(student, teacher, Batch(nothing, nothing, nothing, nothing, nothing, groups=()), PROGRESS)
    assert found.item() == pytest.approx(0.75 + 1.0)


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


def test_projections_are_never_cached() -> None:
    needs = FeatureRequest(logits=True, projections=frozenset({("query", 1)}))
    assert uncacheable_reason(FeatureRequest(logits=True), corpus=False) is None
    assert (uncacheable_reason(needs, corpus=False) or "").startswith("queries, keys and values are not cached")


# On plain text.

TEXT = ["method=minilmv2", "corpus=embedded", "corpus.max_length=32", "relations.heads=8"]
TEXT += ["student.width=32", "student.heads=2", "student.num_layers=2"]


def test_one_distillation_serves_all_tasks_and_seeds(compose: Compose) -> None:
    keys, others = set(), set()
    for change in ("seed=1", "task.max_length=16", "optim.lr=1e-3", "transfer=imdb", "corpus.mask_probability=0.5"):
        student = resolve(compose(*TEXT, change).stages, "student", "fp32")
        assert student.source is not None
        keys.add(student.source.key)
    for change in ("corpus.max_length=16", "corpus.examples=passages", "mapping.layer=2", "relations.heads=4"):
        others.add(resolve(compose(*TEXT, change).stages, "distil", "fp32").key)
    assert len(keys) == 1
    assert len(keys | others) == 5


def test_text_is_read_as_it_is_and_nothing_judges_it(compose: Compose) -> None:
    steps = ("stages.distil.optim.max_steps=8", "stages.distil.optim.lr=3e-3", "optim.max_steps=2")
    run = compose(*TEXT, *steps, "runtime.log_every=1")
    rows: list[tuple[str, dict[str, Any]]] = []
    store = Store(run.store.dir)
    pipeline = Pipeline(store, run.runtime, lambda name: lambda values, step, epoch: rows.append((name, dict(values))))
    stage = resolve(run.stages, "distil", "fp32")
    read = pipeline.inputs.data(stage).batch(np.array([4, 0, 2]), epoch=0)
    tokens = pipeline.inputs.split(stage, "train")
    assert read.labels is None
    assert read.input_ids.tolist() == tokens.batch([4, 0, 2]).input_ids.tolist()
    assert tokens.lengths[:-1].min() == 32, "documents lie end to end"
    metrics = json.loads((pipeline.build(stage) / "metrics.json").read_text())
    assert (metrics["metrics"], metrics["step"]) == ({}, 8)
    losses = [values["loss/relations"] for name, values in rows if name == "distil" and "loss/relations" in values]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    pipeline.build(resolve(run.stages, "student", "fp32"))
    assert [name for name, values in rows if "validation/accuracy" in values] == ["student"]


@pytest.mark.parametrize("method", ["alp", "internal", "prokd", "vanilla"])
def test_other_methods_go_on_from_the_distilled_student(method: str, compose: Compose, tmp_path: Path) -> None:
    few = [f"store.dir={tmp_path}", "optim.max_steps=1", "teacher.optim.epochs=1"]
    run = compose(*TEXT, "student.heads=4", "stages.distil.optim.max_steps=1", *few)
    pipeline = Pipeline(Store(tmp_path), run.runtime)
    distilled = pipeline.build(resolve(run.stages, "distil", "fp32")) / "model"
    follow = ["route.epochs=1", "route.warmup=0"] if method == "prokd" else []
    goes_on = compose(f"method={method}", "student=pretrained", f"student.init.source={distilled}", *few, *follow)
    stage = resolve(goes_on.stages, "student", "fp32")
    assert (stage.shape.num_layers, stage.shape.width, stage.shape.num_heads) == (2, 32, 4)
    first = next(stage for stage in (stage.source, stage) if stage)
    assert first.config.model.source == str(distilled)
    metrics = json.loads((pipeline.build(stage) / "metrics.json").read_text())
    assert "accuracy" in metrics["metrics"]


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ("hard_labels", "the teacher would read different tokens"),
        ("soft_labels", "its predictions are for a task's examples"),
    ],
)
def test_no_teacher_is_asked_about_masked_text_or_for_predictions(term: str, message: str, compose: Compose) -> None:
    method = "stages.distil.method"
    added = [f"+{method}.terms.more.term={term}", f"+{method}.weights.more=1"]
    added += [f"+{method}.terms.more.temperature=1.0"] if term == "soft_labels" else []
    with pytest.raises(UserError, match=message):
        resolve(compose(*TEXT, *added).stages, "distil", "fp32")


def test_a_plan_counts_stages_that_are_not_trained(compose: Compose) -> None:
    run = compose(*TEXT)
    estimator = Estimator(Pipeline(Store(run.store.dir), run.runtime))
    cost = estimator.cost(resolve(run.stages, "encoder", "fp32"))
    assert cost.seconds == START_SECONDS
    assert cost.bytes > 0


def test_the_student_goes_on_from_the_distilled_layers_however_those_began(compose: Compose) -> None:
    run = compose(*TEXT[:4], "student=truncated", "student.num_layers=2", "student.init.layers=random")
    student = resolve(run.stages, "student", "fp32")
    assert student.config.model.layers == "first"
    assert student.source is not None
    assert student.source.config.model.layers == "random"


def test_a_student_with_nothing_to_judge_it_is_refused(compose: Compose, tmp_path: Path) -> None:
    run = compose(*TEXT)
    run.stages["student"] = run.stages["distil"]
    with pytest.raises(UserError, match="from plain text alone has no score"):
        run_stage(run, tmp_path, {})


def test_layers_of_text_are_not_cached() -> None:
    assert "nothing is cached for a corpus" in str(uncacheable_reason(FeatureRequest(cls=frozenset({1})), corpus=True))


@pytest.mark.parametrize(("n", "m", "layers"), [(12, 6, [2, 4, 6, 8, 10, 12]), (12, 5, [2, 4, 7, 9, 12]), (4, 1, [4])])
def test_group_top(n: int, m: int, layers: list[int]) -> None:
    from distill_runner.methods.layer_mapping import LayerMapping

    assert LayerMapping(rule="group_top", supervise_last=True).teacher_layers(m, n) == [[layer] for layer in layers]
    assert LayerMapping(rule="group_top").teacher_layers(m, n) == [*([layer] for layer in layers[:-1]), []]
    assert LayerMapping(rule="top").teacher_layers(m, n) == [*([] for _ in range(m - 1)), [n]]
    assert LayerMapping(rule="top", layer=3).teacher_layers(12, n) == [*([] for _ in range(11)), [3]]
