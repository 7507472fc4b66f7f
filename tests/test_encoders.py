"""Features of a packed batch against the model's own forward, example by example and padded."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.modernbert import modeling_modernbert

from distill_runner.datasets.batches import Batch
from distill_runner.datasets.splits import TokenSplit
from distill_runner.models.extract import extract
from distill_runner.models.families import PROJECTIONS
from distill_runner.models.features import FeatureRequest, Features
from distill_runner.models.padded import extract_padded
from helpers.families import PACKED_FAMILIES, make

ALL = FeatureRequest(logits=True, cls=frozenset({1, 2, 3}))
PACKED_MODELS = [*PACKED_FAMILIES, "modernbert, head of means"]
OPTIONS: dict[str, dict[str, Any]] = {"modernbert, head of means": {"classifier_pooling": "mean"}}
ROTARY = ["modernbert", "modernbert, head of means"]


def made(family: str, **how: Any) -> PreTrainedModel:
    return make(family.partition(",")[0], **OPTIONS.get(family, {}), **how)


@pytest.fixture(autouse=True)
def rotate_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """ModernBERT's own forward turns queries and keys in float32 even in a model of float64; here it does not."""
    monkeypatch.setattr(modeling_modernbert, "apply_rotary_pos_emb", apply_rotary_pos_emb)


def inputs(model: PreTrainedModel, input_ids: Tensor, segments: Tensor) -> dict[str, Tensor]:
    has_segments = getattr(model.config, "type_vocab_size", 0) > 1
    return {"input_ids": input_ids} | ({"token_type_ids": segments} if has_segments else {})


def alone(model: PreTrainedModel, batch: Batch) -> Features:
    """Each example by itself through the model's own forward: no packing and no padding."""
    pieces = zip(*(row.tensor_split(batch.starts[1:]) for row in (batch.input_ids, batch.segments)), strict=True)
    outputs = [model(**inputs(model, i[None], s[None]), output_hidden_states=True) for i, s in pieces]
    cls = {layer: torch.cat([output.hidden_states[layer][:, 0] for output in outputs]) for layer in ALL.cls}
    return Features(torch.cat([output.logits for output in outputs]), cls)


def padded(model: PreTrainedModel, batch: Batch) -> Features:
    """The batch padded with the model's own padding index, through the model's own forward."""
    input_ids, segments, mask = batch.to_padded()
    input_ids = input_ids.masked_fill(mask == 0, model.config.pad_token_id)
    output = model(**inputs(model, input_ids, segments), attention_mask=mask, output_hidden_states=True)
    return Features(output.logits, {layer: output.hidden_states[layer][:, 0] for layer in ALL.cls})


def assert_close(ours: Features, reference: Features, tolerance: float) -> None:
    assert ours.cls.keys() == reference.cls.keys()
    pairs = [(ours.logits_OC, reference.logits_OC), *((ours.cls[layer], reference.cls[layer]) for layer in ours.cls)]
    for mine, theirs in pairs:
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", [*PACKED_MODELS, "mpnet"])
@pytest.mark.parametrize("length_multiple", [16, None])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.float64, 1e-10)])
def test_packed_equals_padded_and_alone(
    tokens: TokenSplit, family: str, length_multiple: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    model, batch = made(family, dtype=dtype), tokens.batch(range(20), length_multiple)
    with torch.inference_mode():
        ours = extract(model, batch, ALL)
        assert_close(ours, padded(model, batch), tolerance)
        assert_close(ours, alone(model, batch), tolerance)
    assert ours.logits_OC.std(0).min() > 0.01  # examples differ, so that a mix-up of rows could not pass


@pytest.mark.parametrize("family", PACKED_MODELS)
@pytest.mark.parametrize("needs", [ALL, FeatureRequest(logits=True), FeatureRequest(cls=frozenset({2}))])
def test_gradients_equal_those_of_padding(tokens: TokenSplit, family: str, needs: FeatureRequest) -> None:
    model = made(family, dtype=torch.float64)
    batch = tokens.batch(range(20))
    weights = torch.randn(3, 20, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def gradients(features: Features) -> dict[str, Tensor]:
        """Of a function that every output has its own part in."""
        parts = [(features.cls[layer] * weights[layer - 1]).sum() for layer in sorted(needs.cls)]
        if needs.logits:
            parts.append((features.logits_OC * weights[0, :, :3]).sum())
        model.zero_grad()
        torch.stack(parts).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    ours, reference = gradients(extract(model, batch, needs)), gradients(padded(model, batch))
    # Softmax takes away what the keys' bias adds; where only first tokens go through a layer, it is left out.
    deepest = 3 if needs.logits else max(needs.cls)
    for bias in reference.keys() - ours.keys():
        assert family not in ROTARY
        assert bias.endswith(
            (f"layer.{deepest - 1}.attention.self.key.bias", f"layer.{deepest - 1}.attention.k_lin.bias")
        )
        assert float(reference.pop(bias).abs().max()) < 1e-12
    assert ours.keys() == reference.keys()
    assert len(ours) > 10
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, reference[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    "needs", [ALL, FeatureRequest(cls=frozenset({2}), projections=frozenset({("key", 1), ("query", 3)}))]
)
def test_tokens_of_no_sequence_change_nothing(
    tokens: TokenSplit, needs: FeatureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In low precision a batch is rounded up to few numbers of tokens; here in float64, with dropout."""
    batch = replace(tokens.batch(range(20)), dropout_seed=1)
    assert len(batch.round_up().input_ids) > len(batch.input_ids)

    def read() -> tuple[list[Tensor], dict[str, Tensor]]:
        model = make("bert", dtype=torch.float64).train()
        features = extract(model, batch, needs)
        logits = [] if features.logits is None else [features.logits]
        parts = [*logits, *features.cls.values(), *features.projections.values()]
        torch.stack([part.square().sum() for part in parts]).sum().backward()
        return parts, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, plain_gradients = read()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _device: True)
    rounded, gradients = read()
    assert len(plain) == len(needs.cls) + len(needs.projections) + needs.logits
    for mine, other in zip(rounded, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    assert gradients.keys() == plain_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain_gradients[name], rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("family", [*PACKED_FAMILIES, "mpnet"])
def test_a_token_wise_head_reads_the_given_rows(tokens: TokenSplit, family: str) -> None:
    model, batch = make(family, masked_lm=True, dtype=torch.float64), tokens.batch(range(20))
    rows = torch.randperm(len(batch.input_ids), generator=torch.Generator().manual_seed(0))[:50].sort().values
    with torch.inference_mode():
        ours = extract(model, Batch(**vars(batch) | {"head_tokens": rows}), ALL)
        input_ids, segments, mask = batch.to_padded()
        output = model(**inputs(model, input_ids, segments), attention_mask=mask, output_hidden_states=True)
    reference = {layer: output.hidden_states[layer][:, 0] for layer in ALL.cls}
    assert_close(ours, Features(output.logits[mask.bool()][rows], reference), 1e-10)
    assert ours.logits_OC.shape == (50, 100)


@pytest.fixture(scope="module", params=["bert", "roberta"])
def model_and_all(request: pytest.FixtureRequest, tokens: TokenSplit) -> tuple[PreTrainedModel, Features]:
    """A model in float32, and its features of all 64 examples at once, in the order of their index."""
    model = make(request.param)
    batch = tokens.batch(range(64))
    with torch.inference_mode():
        features = extract(model, batch, ALL)
    return model, features.full(batch.index.argsort())


@settings(max_examples=20)
@given(data=st.data(), count=st.sampled_from([16, 32, 48]))
def test_an_example_does_not_feel_its_batch(
    tokens: TokenSplit, model_and_all: tuple[PreTrainedModel, Features], data: st.DataObject, count: int
) -> None:
    model, reference = model_and_all
    batch = tokens.batch(data.draw(st.lists(st.integers(0, 63), min_size=count, max_size=count)))
    with torch.inference_mode():
        features = extract(model, batch, ALL)
    expected = reference.full(batch.index)
    assert torch.equal(features.logits_OC, expected.logits_OC)
    assert all(torch.equal(features.cls[layer], expected.cls[layer]) for layer in ALL.cls)


def record(model: nn.Module) -> dict[str, list[int]]:
    """What runs from now on: rows of the input of each layer's feed-forward and of the classifier, by their names."""
    seen: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        if name.endswith((".intermediate", "classifier")):

            def hook(_module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                seen.setdefault(name.removeprefix("bert.encoder.layer."), []).append(len(args[0]))

            module.register_forward_pre_hook(hook)
    return seen


def test_nothing_runs_that_nobody_reads(tokens: TokenSplit) -> None:
    batch = tokens.batch(range(20))
    total = len(batch.input_ids)

    def runs(needs: FeatureRequest, **changes: Any) -> dict[str, list[int]]:
        model = make("bert", num_hidden_layers=4)
        seen = record(model)
        extract(model, Batch(**vars(batch) | changes), needs)
        return {name.removesuffix(".intermediate"): rows for name, rows in seen.items()}

    # The last layer that is read works on the [CLS] rows alone; above it nothing happens, nor in the head.
    assert runs(FeatureRequest(cls=frozenset({2}))) == {"0": [total], "1": [20]}
    assert runs(FeatureRequest(cls=frozenset({1, 3}))) == {"0": [total], "1": [total], "2": [20]}
    whole = {"0": [total], "1": [total], "2": [total], "3": [20], "classifier": [20]}
    assert runs(FeatureRequest(logits=True)) == whole
    assert runs(FeatureRequest(logits=True, cls=frozenset({4}))) == whole
    # A token-wise head reads the other rows as well.
    assert runs(FeatureRequest(cls=frozenset({2})), head_tokens=torch.tensor([1, 5])) == {"0": [total], "1": [total]}


@pytest.mark.parametrize("width", [256, 768])
def test_outputs_are_the_same_on_any_number_of_threads(tokens: TokenSplit, width: int) -> None:
    """A sweep computes what its points share on more threads than a point has."""
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 64}
    model, read = make("bert", **sizes), []
    batches = [tokens.batch(range(count)) for count in (16, 64)]
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with torch.inference_mode():
            features = [extract(model, batch, ALL) for batch in batches]
        read.append([part for each in features for part in (each.logits, *each.cls.values()) if part is not None])
    torch.set_num_threads(before)
    assert len(read[0]) == 2 * (1 + len(ALL.cls))
    assert all(torch.equal(one, two) for one, two in zip(*read, strict=True))


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("place", ["attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout"])
def test_dropout_is_that_of_the_configuration(tokens: TokenSplit, family: str, place: str) -> None:
    none: dict[str, Any] = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "classifier_dropout": 0.0}
    batch, needs = tokens.batch(range(8)), FeatureRequest(logits=True)
    still, moving = make(family, **none), make(family, **none | {place: 0.5})
    reference = extract(still, batch, needs).logits
    assert reference is not None
    with torch.no_grad():
        assert torch.equal(reference, extract(still.train(), batch, needs).logits)  # type: ignore[arg-type]
        assert torch.equal(reference, extract(moving, batch, needs).logits)  # type: ignore[arg-type]
        first, second = (extract(moving.train(), batch, needs).logits for _ in range(2))
    assert first is not None
    assert second is not None
    assert (first - reference).abs().min() > 0
    assert (first - second).abs().min() > 0


@pytest.mark.parametrize("family", PACKED_MODELS)
def test_what_is_read_of_every_token_is_that_of_the_padded_way(tokens: TokenSplit, family: str) -> None:
    """Hidden states, embeddings among them, and projections: queries and keys turned where positions are rotary."""
    model, batch = made(family, dtype=torch.float64), tokens.batch(range(20))
    places = frozenset((name, layer) for name in PROJECTIONS for layer in (1, 2, 3))
    for needs in (
        FeatureRequest(states=frozenset({0, 2, 3}), projections=places),
        FeatureRequest(projections=frozenset({("value", 1), ("query", 2)})),
        FeatureRequest(states=frozenset({0})),
    ):
        with torch.inference_mode():
            ours, reference = extract(model, batch, needs), extract_padded(model, batch, needs)
        assert ours.states.keys() == needs.states
        assert ours.projections.keys() == needs.projections
        for layer, states in ours.states.items():
            torch.testing.assert_close(states, reference.states[layer], rtol=1e-10, atol=1e-10)
        for place, states in ours.projections.items():
            torch.testing.assert_close(states, reference.projections[place], rtol=1e-10, atol=1e-10)


def test_local_attention_is_local(tokens: TokenSplit) -> None:
    """A far token does not move what a layer with a window gives, and does move that of one without."""
    model = make("modernbert", dtype=torch.float64, local_attention=4, layer_types=["sliding_attention"] * 3)
    whole = make("modernbert", dtype=torch.float64, local_attention=4, layer_types=["full_attention"] * 3)
    batch = tokens.batch([int(tokens.lengths.argmax())])
    other = replace(batch, input_ids=batch.input_ids.clone())
    other.input_ids[40] = 7
    needs = FeatureRequest(states=frozenset({2}))
    with torch.inference_mode():
        for read, moved in ((model, [36, 44]), (whole, [0, len(batch.positions) - 1])):
            change = (extract(read, batch, needs).states[2] - extract(read, other, needs).states[2]).abs().amax(1)
            places = torch.nonzero(change > 1e-12).squeeze(1)
            assert [int(places.min()), int(places.max())] == moved


@pytest.mark.parametrize("family", ["modernbert", "distilbert"])
def test_dropout_of_examples_is_their_own(tokens: TokenSplit, family: str) -> None:
    """Alone or beside others, an example meets the same zeros, also in the families of today."""
    rates: dict[str, Any] = dict.fromkeys(
        (
            "attention_dropout",
            "mlp_dropout",
            "embedding_dropout",
            "dropout",
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
        ),
        0.3,
    )
    model = make(family, **rates).train()
    together = replace(tokens.batch(range(8)), dropout_seed=5)
    needs = FeatureRequest(logits=True, cls=frozenset({1, 3}))
    with torch.no_grad():
        ours = extract(model, together, needs).full(together.index.argsort())
        still = extract(model.eval(), together, needs).full(together.index.argsort())
        model.train()
        assert (ours.cls[3] - still.cls[3]).abs().mean() > 0.01
        for number in range(8):
            alone = extract(model, replace(tokens.batch([number]), dropout_seed=5), needs)
            torch.testing.assert_close(ours.cls[3][number], alone.cls[3][0], rtol=1e-4, atol=1e-4)
