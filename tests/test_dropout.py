"""Masks that belong to examples."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ElectraConfig,
    ElectraForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from distill_runner.datasets.batches import Batch, DropoutMasks, split_mix
from distill_runner.datasets.splits import TokenSplit
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest, Features

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
COMMON: dict[str, Any] = {"vocab_size": 100, "num_labels": 2, "max_position_embeddings": 80, "initializer_range": 0.3}
FAMILIES: dict[str, Callable[[], Any]] = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**SIZES, **COMMON)),  # type: ignore[arg-type]
    "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**SIZES, **COMMON, type_vocab_size=1)),  # type: ignore[arg-type]
    "electra": lambda: ElectraForSequenceClassification(ElectraConfig(**SIZES, **COMMON, embedding_size=16)),  # type: ignore[arg-type]
}
NEEDS = FeatureRequest(logits=True, cls=frozenset({1, 2}))


def batch_of(tokens: TokenSplit, index: list[int], noise: int = 1, length_multiple: int | None = 16) -> Batch:
    return replace(tokens.batch(index, length_multiple), dropout_seed=noise)


def by_example(features: Features, batch: Batch) -> dict[int, Tensor]:
    """All that was read of each example."""
    read = torch.cat([features.logits_OC, *(features.cls[layer] for layer in sorted(features.cls))], -1)
    return dict(zip(batch.index.tolist(), read, strict=True))


def test_the_generator_is_splitmix64() -> None:
    """The first numbers of the published generator from state 1234567."""
    states = [(1234567 + k * 0x9E3779B97F4A7C15) % 2**64 for k in (1, 2, 3)]
    signed = torch.tensor([state - 2**64 if state >= 2**63 else state for state in states])
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [value % 2**64 for value in split_mix(signed).tolist()] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_an_example_meets_the_same_zeros_in_any_batch(family: str, tokens: TokenSplit) -> None:
    torch.manual_seed(0)
    model = FAMILIES[family]().double().train()
    together = batch_of(tokens, list(range(12)))
    expected = by_example(extract(model, together, NEEDS), together)
    for index in ([3, 1, 7], [11], list(range(11, -1, -1))):
        for length_multiple in (16, None):
            batch = batch_of(tokens, index, length_multiple=length_multiple)
            for example, read in by_example(extract(model, batch, NEEDS), batch).items():
                torch.testing.assert_close(read, expected[example], rtol=1e-10, atol=1e-10)
    other = batch_of(tokens, list(range(12)), noise=2)
    assert not torch.allclose(by_example(extract(model, other, NEEDS), other)[3], expected[3])


def test_rows_that_are_read_have_the_zeros_of_the_whole(tokens: TokenSplit) -> None:
    """A token-wise head makes the last layer compute every token."""
    torch.manual_seed(0)
    model = FAMILIES["bert"]().double().train()
    batch = batch_of(tokens, list(range(8)))
    whole = replace(batch, head_tokens=batch.starts)
    torch.testing.assert_close(extract(model, batch, NEEDS).cls[2], extract(model, whole, NEEDS).cls[2])


def test_padding_behind_the_tokens_changes_no_zero(tokens: TokenSplit) -> None:
    """A head of questions reads all real tokens of a pack that bf16 rounds up."""
    batch = batch_of(tokens, list(range(3)))
    padded, ones = batch.round_up(), torch.ones(batch.num_tokens, 8)
    assert padded.num_tokens > batch.num_tokens
    assert torch.equal(
        DropoutMasks(1, padded).drop_features(ones, 0.5, 0), DropoutMasks(1, batch).drop_features(ones, 0.5, 0)
    )


@settings(max_examples=20)
@given(p=st.floats(0.01, 0.9), seed=st.integers(0, 2**63 - 1), site=st.integers(0, 100))
def test_zeros_are_as_many_as_asked_and_the_mean_stays(p: float, seed: int, site: int) -> None:
    starts, positions = torch.arange(0, 4001, 40)[:-1], torch.arange(4000) % 40
    zeros = torch.zeros(4000, dtype=torch.long)
    batch = Batch(zeros, zeros, positions, starts, torch.arange(100), ())
    dropped = DropoutMasks(seed, batch).drop_features(torch.ones(4000, 50, dtype=torch.float64), p, site)
    assert dropped.unique().tolist() == pytest.approx([0, 1 / (1 - p)], rel=1e-4 / (1 - p))
    deviation = (p * (1 - p) / 200_000) ** 0.5
    assert abs(float((dropped == 0).double().mean()) - p) < 5 * deviation + 2**-16
    lag = np.corrcoef((dropped == 0).numpy()[:, :-1].ravel(), (dropped == 0).numpy()[:, 1:].ravel())[0, 1]
    assert abs(lag) < 6 / 200_000**0.5


def test_dropout_in_attention_is_that_of_the_formula(tokens: TokenSplit) -> None:
    """One layer's context against softmax, mask and sum written out, one sequence and head at a time."""
    torch.manual_seed(0)
    from distill_runner.models.attention import PackedAttention

    batch = batch_of(tokens, [5, 9, 2, 14])
    states = torch.randn(len(batch.positions), 3 * 8, dtype=torch.float64, requires_grad=True)
    noise = DropoutMasks(3, batch)
    context = PackedAttention(batch, 2, noise).attend(states, 0.25, 4)
    expected = torch.zeros_like(context)
    for group in batch.groups:
        n, length = group.gather.shape
        masks = noise.drop_attention(torch.ones(n, 2, length, length, dtype=torch.float64), group, 0.25, 4)
        for row, sequence in enumerate(range(group.sequences.start, group.sequences.stop)):
            size = int(group.is_token[row].sum())
            tokens_of = slice(int(batch.starts[sequence]), int(batch.starts[sequence]) + size)
            q, k, v = states[tokens_of].chunk(3, -1)
            for head in range(2):
                part = slice(4 * head, 4 * head + 4)
                probabilities = (q[:, part] @ k[:, part].T / 2).softmax(-1) * masks[row, head, :size, :size]
                expected[tokens_of, part] = probabilities @ v[:, part]
    torch.testing.assert_close(context, expected)
    weights = torch.randn_like(context)
    (ours,) = torch.autograd.grad((context * weights).sum(), states)
    (reference,) = torch.autograd.grad((expected * weights).sum(), states)
    torch.testing.assert_close(ours, reference)


def test_no_keys_of_a_long_text_share_their_zeros(tokens: TokenSplit) -> None:
    batch = batch_of(tokens, [0])
    masks = DropoutMasks(1, batch).drop_attention(torch.ones(1, 2, 1, 12_288), batch.groups[0], 0.5, 0)
    assert len(masks.view(6, 4096).unique(dim=0)) == 6


def of(layer: torch.nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.weight, layer.bias


def test_first_tokens_attend_as_if_all_did(tokens: TokenSplit) -> None:
    """Without keys and values of all tokens: the same contexts and gradients, by the same masks."""
    from distill_runner.models.attention import PackedAttention

    torch.manual_seed(0)
    batch = batch_of(tokens, [5, 9, 2, 14])
    query, key, value = (torch.nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))
    states = torch.randn(len(batch.positions), 8, dtype=torch.float64, requires_grad=True)
    for noise, p in ((DropoutMasks(3, batch), 0.25), (DropoutMasks(3, batch), 0.0), (None, 0.0)):
        heads = PackedAttention(batch, 2, noise)
        contexts = [
            heads.attend(torch.cat([layer(states) for layer in (query, key, value)], 1), p, 4)[batch.starts],
            heads.attend_first(states, query(states[batch.starts]), of(key), of(value), p, 4),
        ]
        torch.testing.assert_close(contexts[1], contexts[0])
        weights = torch.randn_like(contexts[0])
        # The keys' bias has no say.
        parameters = [states, query.weight, query.bias, key.weight, value.weight, value.bias]
        expected, ours = (torch.autograd.grad((context * weights).sum(), parameters) for context in contexts)
        torch.testing.assert_close(ours, expected)
