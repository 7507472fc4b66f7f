import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_runner.common.errors import UserError
from distill_runner.datasets import corpora, embedded
from distill_runner.datasets.corpora import pretraining
from distill_runner.datasets.embedded import SPLITS
from distill_runner.datasets.tokenization import Examples


@pytest.fixture(scope="module")
def tasks() -> dict[str, dict[str, Examples]]:
    return {name: {split: embedded.demo_examples(name, split) for split in SPLITS} for name in ("pairs", "sentences")}


def test_the_corpus_is_english_prose_and_large_enough() -> None:
    sentences = [text for texts in embedded.embedded_sentences().values() for text in texts]
    assert len(sentences) > 1500
    assert sum(len(text.split()) for text in sentences) > 25_000
    for mark in ("::=", ">>>", "***", '"', "_", "  ", "\n"):
        assert not any(mark in text for text in sentences), mark
    joined = " ".join(sentences).lower().split()
    assert joined.count("the") / len(joined) > 0.04


def test_plain_takes_markup_off_and_joins_lines() -> None:
    block = '* The *module* "__main__" (see\n  "exec()") is post-\n  mortem [3], isn’t it ?'
    assert embedded._plain_text(block) == "The module main (see exec) is post-mortem, isn't it?"


def test_passages_hold_the_sentences_in_order() -> None:
    sentences = embedded.embedded_sentences()
    passages = embedded.embedded_passages()
    assert passages.keys() == sentences.keys()
    for topic, texts in passages.items():
        assert " ".join(texts) == " ".join(sentences[topic])
        assert all(len(text.split()) >= 16 for text in texts[:-1])


def test_every_split_has_several_topics_and_no_topic_is_most_of_it() -> None:
    sizes = {
        split: {
            topic: len(texts)
            for topic, texts in embedded.embedded_passages().items()
            if embedded.topic_split(topic) == split
        }
        for split in SPLITS
    }
    total = sum(sum(topics.values()) for topics in sizes.values())
    for split, topics in sizes.items():
        assert len(topics) >= 5, split
        assert max(topics.values()) < 0.5 * sum(topics.values()), split
        assert sum(topics.values()) > (0.5 if split == "train" else 0.08) * total, split


@pytest.mark.parametrize(
    ("topic", "split"),
    [
        ("debugger", "train"),
        ("types", "train"),
        ("import", "validation"),
        ("function", "validation"),
        ("naming", "test"),
        ("typesseq", "test"),
    ],
)
def test_the_split_of_a_topic_is_fixed(topic: str, split: str) -> None:
    assert embedded.topic_split(topic) == split


@pytest.mark.parametrize("name", ["pairs", "sentences"])
def test_no_text_occurs_in_two_splits(name: str, tasks: dict[str, dict[str, Examples]]) -> None:
    texts = {
        split: {embedded.normalize(text) for column in examples.texts for text in column}
        for split, examples in tasks[name].items()
    }
    for split in SPLITS:  # sentences and passages also count where the task shows the other kind
        texts[split] |= {embedded.normalize(text) for text in embedded.embedded_text(split)}
        for topic, sentences in embedded.embedded_sentences().items():
            if embedded.topic_split(topic) == split:
                texts[split] |= {embedded.normalize(text) for text in sentences}
    assert not texts["train"] & texts["validation"]
    assert not texts["train"] & texts["test"]
    assert not texts["validation"] & texts["test"]


@pytest.mark.parametrize("name", ["pairs", "sentences"])
def test_labels_are_balanced_and_mixed(name: str, tasks: dict[str, dict[str, Examples]]) -> None:
    assert list(tasks[name]) == list(SPLITS)
    for split, examples in tasks[name].items():
        assert examples.labels is not None
        assert examples.labels.dtype == np.int64
        assert Counter(examples.labels.tolist()) == {0: len(examples) // 2, 1: len(examples) // 2}
        assert len(examples) > (5000 if split == "train" else 500)
        assert 0.3 < examples.labels[:100].mean() < 0.7


def test_pairs_are_labelled_by_topic_and_no_column_tells_the_label(
    tasks: dict[str, dict[str, Examples]],
) -> None:
    topic_of = {text: topic for topic, texts in embedded.embedded_passages().items() for text in texts}
    for split, examples in tasks["pairs"].items():
        first, second = examples.texts
        assert examples.labels is not None
        for a, b, label in zip(first, second, examples.labels, strict=True):
            assert (topic_of[a] == topic_of[b]) == bool(label)
            assert embedded.topic_split(topic_of[a]) == embedded.topic_split(topic_of[b]) == split
            assert a != b
        for column in (first, second):
            kinds = Counter(zip(column, examples.labels.tolist(), strict=True))
            assert all(kinds[text, 0] == kinds[text, 1] for text in column)


def test_each_sentence_has_a_corrupted_copy_in_its_split(tasks: dict[str, dict[str, Examples]]) -> None:
    """As long as the original, made of training words, and never equal to an original."""
    pool = set(embedded._replacement_words())
    for examples in tasks["sentences"].values():
        assert examples.labels is not None
        by_label: list[list[str]] = [[], []]
        for text, label in zip(examples.texts[0], examples.labels, strict=True):
            by_label[label].append(text)
        corrupted, original = by_label
        assert Counter(len(text.split()) for text in original) == Counter(len(text.split()) for text in corrupted)
        assert not {embedded.normalize(text) for text in corrupted} & {embedded.normalize(t) for t in original}
        words = {word for text in original for word in text.split()}
        assert {word for text in corrupted for word in text.split()} <= words | pool


@given(st.lists(st.sampled_from(["alpha", "beta", "Gamma", "x1", "end."]), min_size=6, max_size=30), st.integers())
def test_corrupt_replaces_three_lower_case_words_in_ten(words: list[str], seed: int) -> None:
    words = ["beta", *words]
    changed = embedded.corrupt(" ".join(words), ["alpha", "beta", "delta"], random.Random(seed)).split()
    moved = [(a, b) for a, b in zip(words, changed, strict=True) if a != b]
    lower = sum(word in ("alpha", "beta") for word in words)
    assert len(moved) == min(max(1, round(0.3 * len(words))), lower)
    assert all(a in ("alpha", "beta") and b in ("alpha", "beta", "delta") for a, b in moved)


def test_examples_do_not_depend_on_global_random_state(tasks: dict[str, dict[str, Examples]]) -> None:
    random.seed(1)
    for split in SPLITS:
        again = embedded.demo_examples("pairs", split)
        assert again.texts == tasks["pairs"][split].texts
        assert np.array_equal(again.labels, tasks["pairs"][split].labels)  # type: ignore[arg-type]


@pytest.mark.slow
def test_another_process_makes_the_same_examples_and_vocabulary(
    tmp_path: Path, tasks: dict[str, dict[str, Examples]]
) -> None:
    """There the sets of Python and the hash maps of `tokenizers` are in another order."""
    script = (
        "import sys; from distill_runner.datasets import corpora, embedded\n"
        "corpora.train_wordpiece(embedded.embedded_text('train'), 1000, sys.argv[1])\n"
        "print(embedded.text_fingerprint(), embedded.demo_examples('sentences', 'test').texts[0][:3])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    there = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "there")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert there == f"{embedded.text_fingerprint()} {tasks['sentences']['test'].texts[0][:3]}"
    corpora.train_wordpiece(embedded.embedded_text("train"), 1000, tmp_path / "here")
    vocabularies = [
        json.loads((tmp_path / place / "tokenizer.json").read_text())["model"]["vocab"] for place in ("here", "there")
    ]
    assert vocabularies[0] == vocabularies[1]


def test_the_tokenizer_folder_loads_and_knows_english(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    corpora.train_wordpiece(embedded.embedded_text("train"), 1200, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.is_fast
    assert len(tokenizer) == tokenizer.vocab_size == 1200
    assert tokenizer.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]
    assert sorted(tokenizer.all_special_tokens) == sorted(pretraining.SPECIAL_TOKENS)
    assert tokenizer.tokenize("The Statement") == ["the", "statement"]
    unseen = "jazzy quixotic zebras, e.g. (a+b)*c == {42}; 3.14~x?"
    decoded = str(tokenizer.decode(tokenizer(unseen, add_special_tokens=False)["input_ids"]))
    assert decoded.replace(" ", "") == unseen.replace(" ", "")
    held_out = tokenizer(embedded.embedded_text("test"))["input_ids"]
    assert sum(ids.count(tokenizer.unk_token_id) for ids in held_out) < 0.001 * sum(map(len, held_out))
    pair = tokenizer("the one", "the other")
    assert pair["input_ids"][0] == 2
    assert pair["token_type_ids"][-1] == 1


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="embedded:triples"):
        corpora.CorpusPart(dataset="embedded:triples", columns=["text"])


def test_a_python_without_its_documentation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    embedded.embedded_sentences.cache_clear()
    with pytest.raises(UserError, match="complete installation"):
        embedded.embedded_passages()


def test_pieces_of_words_have_their_places_before_counting(tmp_path: Path) -> None:
    """Signs that are neither letters nor punctuation, too: counting numbers them in another order each time."""
    corpora.train_wordpiece(["15° 3¢ x−y भाि"] * 4, 300, tmp_path)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    pieces = {piece: place for piece, place in vocabulary.items() if piece.startswith("##") and len(piece) == 3}
    assert {"##°", "##¢", "##−", "##a", "##ि"} <= pieces.keys()
    assert sorted(pieces.values()) == list(range(5, 5 + len(pieces)))
