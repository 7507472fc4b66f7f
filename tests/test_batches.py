"""Packing: where each token of a batch lies, attention groups, padding; tokenising and reading back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from distill_runner.datasets.splits import TokenSplit
from distill_runner.datasets.tokenization import Examples
from distill_runner.training.data import bucketed_order, epoch_order

LENGTHS = [*range(1, 71), 16, 16, 32, 5]
"""Of the ragged examples below: all up to 70, and some twice."""


def numbers(texts: list[str], second: str | None = None, **_options: Any) -> dict[str, Any]:
    """Stands for a tokenizer: a text is its token ids, and a pair of texts has segments 0 and 1."""
    if second is not None:
        return {"token_type_ids": [0, 1]}
    ids = [[int(word) for word in text.split()] for text in texts]
    return {"input_ids": ids, "token_type_ids": [[number % 2 for number in row] for row in ids]}


def write(folder: Path, lengths: list[int], labels: np.ndarray | None = None) -> TokenSplit:
    """Examples of these lengths, all token ids different and above 0."""
    ends = np.cumsum(lengths)
    texts = [" ".join(map(str, range(end - length + 1, end + 1))) for end, length in zip(ends, lengths, strict=True)]
    TokenSplit.write(folder, Examples([texts], labels), numbers, max_length=100)
    return TokenSplit(folder)


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> TokenSplit:
    return write(tmp_path_factory.mktemp("ragged"), LENGTHS, np.arange(len(LENGTHS)) % 3)


def ids(tokens: TokenSplit, example: int) -> list[int]:
    return tokens.ids[tokens.offsets[example] : tokens.offsets[example + 1]].tolist()


@given(
    index=st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=40),
    length_multiple=st.sampled_from([None, 1, 4, 16, 100]),
)
def test_groups_cover_any_batch_once(ragged: TokenSplit, index: list[int], length_multiple: int | None) -> None:
    batch = ragged.batch(index, length_multiple)
    # Repeated examples too, shortest first; equally long ones stay in the order asked for.
    assert batch.index.tolist() == sorted(index, key=LENGTHS.__getitem__)
    lengths = [LENGTHS[example] for example in batch.index.tolist()]
    assert batch.starts.tolist() == [sum(lengths[:number]) for number in range(len(lengths))]
    assert batch.positions.tolist() == [position for length in lengths for position in range(length)]
    assert batch.gold.tolist() == [example % 3 for example in batch.index.tolist()]
    sequence, token = 0, 0
    for group in batch.groups:
        assert (group.sequences.start, group.tokens.start) == (sequence, token)
        sequence, token = group.sequences.stop, group.tokens.stop
        examples = batch.index[group.sequences].tolist()
        attended = batch.input_ids[group.tokens][group.gather]
        assert [row[real].tolist() for row, real in zip(attended, group.is_token, strict=True)] == [
            ids(ragged, example) for example in examples
        ]
        # What a sequence is padded to is its own affair, unless all are one group.
        longest = max(LENGTHS[example] for example in index)
        padded = longest if length_multiple is None else -(-LENGTHS[examples[0]] // length_multiple) * length_multiple
        assert attended.shape == (len(examples), padded)
        assert group.is_token.any(1).all()
    assert (sequence, token) == (batch.size, len(batch.input_ids))
    assert length_multiple is not None or len(batch.groups) == 1


@given(index=st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=400))
def test_rounded_is_the_same_sequences_and_tokens_of_none(ragged: TokenSplit, index: list[int]) -> None:
    batch = ragged.batch(index)
    rounded, size = batch.round_up(), len(batch.input_ids)
    added = len(rounded.input_ids) - size
    assert 0 <= added < max(16, size / 31)
    assert len(rounded.input_ids) % 16 == 0
    for name in ("input_ids", "segments", "positions"):
        assert getattr(rounded, name).tolist() == [*getattr(batch, name).tolist(), *[0] * added]
    assert rounded.groups is batch.groups
    assert rounded.starts is batch.starts


@given(index=st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=40))
def test_padded_is_the_same_tokens_with_zeros_behind(ragged: TokenSplit, index: list[int]) -> None:
    batch = ragged.batch(index)
    input_ids, segments, mask = batch.to_padded()
    length = max(LENGTHS[example] for example in index)
    for row, example in enumerate(batch.index.tolist()):
        real, padding = ids(ragged, example), [0] * (length - LENGTHS[example])
        assert input_ids[row].tolist() == real + padding
        assert segments[row].tolist() == [number % 2 for number in real] + padding
        assert mask[row].tolist() == [1] * len(real) + padding


@given(size=st.integers(1, 300), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 100))
def test_the_order_of_an_epoch_is_a_permutation_of_its_own(size: int, seed: int, epoch: int) -> None:
    order = epoch_order(size, seed, epoch)
    assert sorted(order.tolist()) == list(range(size))
    np.random.seed(0)  # the global generator is neither read nor moved
    assert np.array_equal(order, epoch_order(size, seed, epoch))
    assert np.random.random() == pytest.approx(0.5488135)
    if size > 50:
        assert not np.array_equal(order, epoch_order(size, seed, epoch + 1))
        assert not np.array_equal(order, epoch_order(size, seed ^ 1, epoch))


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=400),
    batch_size=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_batches_of_buckets_do_not_overlap_in_length(lengths: list[int], batch_size: int, seed: int) -> None:
    """Up to 50 batches are sorted together, but for the first example, which may have been put there to begin with the
    longest of all. Every example comes up once."""
    known = np.array(lengths)
    order = bucketed_order(known, batch_size, seed, 3)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert np.array_equal(order, bucketed_order(known, batch_size, seed, 3))
    pool = batch_size * max(1, min(50, len(lengths) // batch_size // 4))
    for start in range(0, len(order), pool):
        assert (np.diff(known[order[start + 1 : start + pool]]) <= 0).all()


def test_buckets_have_similar_lengths_and_differ_by_epoch_and_seed() -> None:
    lengths = np.random.default_rng(0).integers(1, 129, 1000)
    orders = [bucketed_order(lengths, 10, seed, epoch).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert len(set(map(tuple, orders))) == 3
    spreads = [
        np.mean([np.ptp(lengths[order[start : start + 10]]) for start in range(0, 1000, 10)])
        for order in (bucketed_order(lengths, 10, 0, 0), epoch_order(1000, 0, 0))
    ]
    assert 10 * spreads[0] < spreads[1]


def test_tokens_read_back_what_the_tokenizer_gave(
    tiny_bert_folder: Path, tiny_examples: dict[str, Examples], tmp_path: Path
) -> None:
    tokenizer, examples = AutoTokenizer.from_pretrained(tiny_bert_folder), tiny_examples["train"]
    TokenSplit.write(tmp_path, examples, tokenizer, max_length=48)
    tokens = TokenSplit(tmp_path)
    assert len(tokens) == len(examples) == 64
    assert isinstance(tokens.ids, np.memmap)
    assert tokens.labels is not None
    assert examples.labels is not None
    assert np.array_equal(tokens.labels, examples.labels)
    lengths = np.diff(tokens.offsets)
    assert lengths.max() == 48  # some are cut, most are not
    assert 2 < (lengths == 48).sum() < 32
    for number in range(64):
        expected = tokenizer(*(column[number] for column in examples.texts), truncation=True, max_length=48)
        batch = tokens.batch([number])
        assert batch.input_ids.tolist() == expected["input_ids"]
        assert batch.segments.tolist() == expected["token_type_ids"]
