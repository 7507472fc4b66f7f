"""A trimmed vocabulary: the same tokens and outputs for the texts that it was trimmed to, and tokens for all others."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AddedToken, AutoTokenizer

from distill_runner.common.errors import UserError
from distill_runner.models.vocabulary import trim_embeddings, trim_tokenizer
from helpers import families, tiny_tokenizers

NUM_TEXTS = 15
"""Texts that the vocabularies are trimmed to."""


@pytest.fixture(scope="module", params=tiny_tokenizers.TYPES)
def trimmed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, np.ndarray]:
    """The full tokenizer, the trimmed one, and the old ids of its tokens."""
    full, folder = tiny_tokenizers.make(request.param), tmp_path_factory.mktemp("trimmed")
    used = np.unique(np.concatenate(full(tiny_tokenizers.texts()[:NUM_TEXTS])["input_ids"]))
    remaining = trim_tokenizer(full, used, folder)
    return full, AutoTokenizer.from_pretrained(folder), remaining


def test_texts_keep_their_tokens(trimmed: tuple[Any, Any, np.ndarray]) -> None:
    full, small, remaining = trimmed
    assert len(small) == len(remaining) < 0.9 * len(full)
    texts = tiny_tokenizers.texts()[:NUM_TEXTS]
    for pair in (None, texts[::-1]):
        old, new = full(texts, pair)["input_ids"], small(texts, pair)["input_ids"]
        assert [remaining[ids].tolist() for ids in new] == old
    assert full.convert_ids_to_tokens(remaining.tolist()) == small.convert_ids_to_tokens(range(len(small)))


@pytest.mark.parametrize("trimmed", ["xlm-roberta"], indirect=True)
def test_an_unknown_character_costs_the_same(trimmed: tuple[Any, Any, np.ndarray]) -> None:
    models = [json.loads(tokenizer.backend_tokenizer.to_str())["model"] for tokenizer in trimmed[:2]]
    least, remaining = (min(score for _, score in model["vocab"]) for model in models)
    assert least == remaining


def test_special_tokens_without_a_role_remain(tmp_path: Path) -> None:
    tiny_tokenizers.make("bert").save_pretrained(tmp_path / "full")
    full = AutoTokenizer.from_pretrained(tmp_path / "full")
    full.add_tokens([AddedToken("<mark>", special=True)])
    trim_tokenizer(full, np.array(full("a")["input_ids"]), tmp_path)
    assert "<mark>" in AutoTokenizer.from_pretrained(tmp_path).get_vocab()


def test_other_texts_still_have_tokens(trimmed: tuple[Any, Any, np.ndarray]) -> None:
    full, small, _ = trimmed
    others = tiny_tokenizers.texts()[NUM_TEXTS:]
    pairs = list(zip(full(others)["input_ids"], small(others)["input_ids"], strict=True))
    assert any(len(new) > len(old) for old, new in pairs)
    unknown = [
        sum(row.count(tokenizer.unk_token_id) for row in tokenizer(others)["input_ids"]) for tokenizer in trimmed[:2]
    ]
    assert unknown[0] == unknown[1] or full.backend_tokenizer.model.__class__.__name__ in ("WordPiece", "Unigram")
    characters = {character for text in tiny_tokenizers.texts()[:NUM_TEXTS] for character in text}
    for text in others:
        if set(text) <= characters:
            assert small.unk_token_id not in small(text)["input_ids"]


@settings(max_examples=20, deadline=None)
@given(numbers=st.sets(st.integers(0, 399), min_size=1, max_size=12), kind=st.sampled_from(tiny_tokenizers.TYPES))
def test_any_texts_keep_their_tokens(numbers: set[int], kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    texts = [tiny_tokenizers.texts()[number] for number in sorted(numbers)]
    full, folder = tiny_tokenizers.make(kind), tmp_path_factory.mktemp("any")
    old = full(texts)["input_ids"]
    remaining = trim_tokenizer(full, np.unique(np.concatenate(old)), folder)
    new = AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]
    assert [remaining[ids].tolist() for ids in new] == old


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("masked_lm", [False, True])
def test_outputs_stay_the_same(family: str, masked_lm: bool) -> None:
    full, model = (families.make(family, masked_lm, torch.float64) for _ in range(2))
    state = torch.get_rng_state()
    remaining = np.array(sorted({0, 1, 2, 3, 4, *range(10, 100, 3)}))
    trim_embeddings(model, remaining)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.vocab_size == len(remaining) == model.get_input_embeddings().num_embeddings
    ids = torch.randint(3, len(remaining), (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        old, new = full(torch.as_tensor(remaining)[ids]).logits, model(ids).logits
    torch.testing.assert_close(new, old[..., remaining] if masked_lm else old, rtol=1e-12, atol=1e-12)


def test_a_moved_padding_token(tmp_path: Path) -> None:
    model = families.make("modernbert", pad_token_id=99, cls_token_id=98)
    trim_embeddings(model, np.array([5, 7, 98, 99]))
    assert (model.config.pad_token_id, model.config.cls_token_id) == (3, 2)
    assert model.get_input_embeddings().padding_idx == 3
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    weights: list[Any] = [one.get_input_embeddings().weight for one in (again, model)]
    assert torch.equal(*weights)
    with pytest.raises(UserError, match="counts positions from its padding token"):
        trim_embeddings(families.make("roberta"), np.array([0, 3, 4]))


def test_tokenizers_that_cannot_be_trimmed(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(UserError, match="WordLevel, not WordPiece"):
        trim_tokenizer(words, np.array([0]), tmp_path)
    parts = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [], end_of_word_suffix="</w>")))
    with pytest.raises(UserError, match="the tokenizer is BPE, not WordPiece, Unigram or plain byte pair encoding"):
        trim_tokenizer(parts, np.array([0]), tmp_path)
