"""Embedded texts and the tasks made from them, and vocabularies of WordPiece."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from distill_runner.common.errors import UserError
from distill_runner.datasets import corpora, embedded, pretraining
from distill_runner.datasets.embedded import SPLITS, embedded_columns

Columns = dict[str, list[Any]]
HASHES = {
    "pairs": "be4dc8f7257d 51d29c64e748 9747e11dd87e",
    "sentences": "145d1c5456ed 2940d65ac6a3 530ce99bcdf0",
    "questions": "164862a8184a 116cc1ad9eae ef0c9651b215",
    "words": "c58dd9c9f0d0 3eba2d0ef53c 0037a2ede293",
}
"""Beginnings of the hashes of train, validation and test, whose scores the documentation prints."""


@pytest.fixture(scope="module")
def tasks() -> dict[str, dict[str, Columns]]:
    return {name: {split: embedded_columns(name, split)[0] for split in SPLITS} for name in ("pairs", "sentences")}


def normalized(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def test_the_corpus_is_english_prose_and_large_enough() -> None:
    sentences = [text for split in SPLITS for texts in embedded.embedded_sentences(split).values() for text in texts]
    assert len(sentences) > 1500
    assert sum(len(text.split()) for text in sentences) > 25_000
    assert not any(mark in text for text in sentences for mark in ("::=", ">>>", "***", '"', "_", "  ", "\n"))
    words = " ".join(sentences).lower().split()
    assert words.count("the") / len(words) > 0.04


def test_passages_hold_the_sentences_in_order() -> None:
    for split in SPLITS:
        sentences, passages = embedded.embedded_sentences(split), embedded.embedded_passages(split)
        assert passages.keys() == sentences.keys()
        for topic, texts in passages.items():
            assert " ".join(texts) == " ".join(sentences[topic])
            assert all(len(text.split()) >= 16 for text in texts[:-1])


@pytest.mark.parametrize("name", ["pairs", "sentences"])
def test_no_text_occurs_in_two_splits_and_no_topic_is_most_of_one(
    name: str, tasks: dict[str, dict[str, Columns]]
) -> None:
    texts = dict[str, set[str]]()
    for split in SPLITS:
        *columns, _ = tasks[name][split].values()
        sentences, passages = embedded.embedded_sentences(split), embedded.embedded_passages(split)
        topics = [text for source in (sentences, passages) for own in source.values() for text in own]
        texts[split] = {normalized(text) for own in (*columns, topics) for text in own}
        sizes = list(map(len, passages.values()))
        assert len(sizes) >= 5
        assert max(sizes) < 0.5 * sum(sizes)
    assert len(set.union(*texts.values())) == sum(map(len, texts.values()))


@pytest.mark.parametrize("name", HASHES)
def test_the_rows_are_those_of_the_printed_scores(name: str) -> None:
    tables = [json.dumps(embedded_columns(name, split), ensure_ascii=False) for split in SPLITS]
    assert " ".join(hashlib.sha256(table.encode()).hexdigest()[:12] for table in tables) == HASHES[name]


@pytest.mark.parametrize("name", ["pairs", "sentences"])
def test_labels_are_balanced_and_mixed(name: str, tasks: dict[str, dict[str, Columns]]) -> None:
    for split, columns in tasks[name].items():
        labels = columns["label"]
        assert Counter(labels) == {0: len(labels) // 2, 1: len(labels) // 2}
        assert len(labels) > (5000 if split == "train" else 500)
        assert 30 < sum(labels[:100]) < 70


def test_pairs_are_labeled_by_topic_and_no_column_tells_the_label(tasks: dict[str, dict[str, Columns]]) -> None:
    for split in SPLITS:
        columns, passages = tasks["pairs"][split], embedded.embedded_passages(split)
        topic_of = {text: topic for topic, texts in passages.items() for text in texts}
        for first, second, label in zip(*columns.values(), strict=True):
            assert (topic_of[first] == topic_of[second]) == bool(label)
            assert first != second
        for name in ("sentence1", "sentence2"):
            counts = Counter(zip(columns[name], columns["label"], strict=True))
            assert all(counts[text, 0] == counts[text, 1] for text in columns[name])


def test_each_sentence_has_a_corrupted_copy_in_its_split(tasks: dict[str, dict[str, Columns]]) -> None:
    """As long as the original, made of training words, and never equal to an original."""
    pool = {word for texts in embedded.embedded_sentences("train").values() for text in texts for word in text.split()}
    for columns in tasks["sentences"].values():
        corrupted, original = (
            [text for text, label in zip(*columns.values(), strict=True) if label == number] for number in (0, 1)
        )
        assert Counter(len(text.split()) for text in original) == Counter(len(text.split()) for text in corrupted)
        assert not set(map(normalized, corrupted)) & set(map(normalized, original))
        assert set(" ".join(corrupted).split()) <= set(" ".join(original).split()) | pool


@pytest.mark.slow
def test_another_process_makes_the_same_examples_and_vocabulary(
    tmp_path: Path, tasks: dict[str, dict[str, Columns]]
) -> None:
    """There the sets of Python and the hash maps of `tokenizers` are in another order."""
    script = (
        "import sys; from distill_runner.datasets import embedded, pretraining\n"
        "pretraining.train_wordpiece(embedded.embedded_columns('text', 'train')[0]['text'], 1000, sys.argv[1])\n"
        "print(embedded.embedded_columns('sentences', 'test')[0]['sentence'][:3])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(tmp_path / "other")]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert output == str(tasks["sentences"]["test"]["sentence"][:3])
    pretraining.train_wordpiece(embedded_columns("text", "train")[0]["text"], 1000, tmp_path / "own")
    vocabularies = [
        json.loads((tmp_path / place / "tokenizer.json").read_text())["model"]["vocab"] for place in ("own", "other")
    ]
    assert vocabularies[0] == vocabularies[1]


def test_the_tokenizer_folder_loads_and_knows_english(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    pretraining.train_wordpiece(embedded_columns("text", "train")[0]["text"], 1200, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.is_fast
    assert len(tokenizer) == tokenizer.vocab_size == 1200
    assert tokenizer.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]
    assert sorted(tokenizer.all_special_tokens) == sorted(pretraining.SPECIAL_TOKENS)
    assert tokenizer.tokenize("The Statement") == ["the", "statement"]
    unseen = "jazzy quixotic zebras, e.g. (a+b)*c == {42}; 3.14~x?"
    decoded = str(tokenizer.decode(tokenizer(unseen, add_special_tokens=False)["input_ids"]))
    assert decoded.replace(" ", "") == unseen.replace(" ", "")
    held_out = tokenizer(embedded_columns("text", "test")[0]["text"])["input_ids"]
    assert sum(ids.count(tokenizer.unk_token_id) for ids in held_out) < 0.001 * sum(map(len, held_out))
    pair = tokenizer("the one", "the other")
    assert (pair["input_ids"][0], pair["token_type_ids"][-1]) == (2, 1)


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="embedded:triples"):
        corpora.CorpusPart(dataset="embedded:triples", columns=["text"])
