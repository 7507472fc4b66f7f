"""Spans of ``predict`` beside those of ``pipeline("token-classification")``: which strategy gives the same, and where.

The models have random weights, so that the pieces of a word often disagree.
"""

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from transformers import BertConfig, BertForTokenClassification, pipeline

from distill_runner.tasks.tokens.data import Sentence, Sentences
from distill_runner.tasks.tokens.prediction_files import predicted_spans
from distill_runner.tasks.tokens.schemes import TagSet
from distill_runner.tasks.tokens.words import Cutting, Words, write_words
from helpers.words import WORDS

SCHEMES = {
    "bio": ["O", "B-x", "I-x", "B-y", "I-y"],
    "plain": ["O", "x", "y"],
    "bioes": ["O", *(f"{role}-{kind}" for kind in "xy" for role in "BIES")],
}
Spans = list[list[tuple[int, int, str]]]


def texts(count: int, marks: str = ",.-'()3") -> list[str]:
    """Sentences in which words have several pieces, begin in upper case, and touch punctuation."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        words = rng.choices([*WORDS, "unbelievable", "Oslo", "qzx", "naïve"], k=rng.randint(3, 9))
        rows.append(" ".join(word + (rng.choice(marks) if marks and rng.random() < 0.4 else "") for word in words))
    return rows


def model_of(tokenizer: Any, names: list[str]) -> BertForTokenClassification:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BertConfig(vocab_size=len(tokenizer), intermediate_size=32, initializer_range=0.6, **sizes)
        config.id2label = dict(enumerate(names))
        return BertForTokenClassification(config).eval()


def own_spans(model: Any, tokenizer: Any, rows: list[str], names: list[str], folder: Path) -> Spans:
    tagset = TagSet.from_names(names)
    sentences = Sentences([Sentence(text, line=f"in row {number}") for number, text in enumerate(rows)], "test", False)
    write_words(folder, sentences, tokenizer, Cutting(max_length=128, overlap=8), tagset)
    split = Words(folder)
    outputs = np.zeros((split.num_outputs, len(names)))
    for number in range(len(split)):
        batch = split.batch([number])
        with torch.inference_mode():
            logits = model(input_ids=batch.input_ids[None].long()).logits[0]
        outputs[batch.output_index] = logits[batch.head_tokens]
    logs = log_softmax(outputs[split.rows], axis=1)
    tags = logs.argmax(axis=1)
    spans = predicted_spans(split, tags, np.exp(logs.max(axis=1)), tagset)
    return [[(span["start"], span["end"], span["label"]) for span in of_row] for of_row in spans]


def pipeline_spans(model: Any, tokenizer: Any, rows: list[str], strategy: str) -> Spans:
    all_groups: list[list[dict[str, Any]]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other tokenizers than WordPiece have no words
        finder = pipeline(
            "token-classification", model=model, tokenizer=tokenizer, aggregation_strategy=strategy, device="cpu"
        )
        all_groups = finder(rows)
    return [
        [(int(group["start"]), int(group["end"]), str(group["entity_group"])) for group in groups]
        for groups in all_groups
    ]


def num_equal(one: Spans, other: Spans) -> int:
    return sum(first == second for first, second in zip(one, other, strict=True))


@pytest.mark.parametrize("scheme", ["bio", "plain"])
def test_first_gives_the_spans_of_predict(scheme: str, wordpiece: Any, tmp_path: Path) -> None:
    """On all sentences, with WordPiece; ``simple`` only where the pieces of all words agree."""
    names, rows = SCHEMES[scheme], texts(100)
    model = model_of(wordpiece, names)
    own = own_spans(model, wordpiece, rows, names, tmp_path)
    assert sum(map(len, own)) > 100
    assert pipeline_spans(model, wordpiece, rows, "first") == own
    assert num_equal(pipeline_spans(model, wordpiece, rows, "simple"), own) < 90


@pytest.mark.parametrize(("name", "scheme"), [("byte_level", "bio"), ("wordpiece", "bioes")])
def test_where_no_strategy_does(name: str, scheme: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Byte-level tokenizers have no words for the pipeline, and it knows no prefixes but B and I, as the docs say."""
    tokenizer, names, rows = request.getfixturevalue(name), SCHEMES[scheme], texts(20)
    model = model_of(tokenizer, names)
    own = own_spans(model, tokenizer, rows, names, tmp_path)
    for strategy in ("first", "simple"):
        assert num_equal(pipeline_spans(model, tokenizer, rows, strategy), own) < 20
