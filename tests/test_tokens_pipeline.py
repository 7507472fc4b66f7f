"""Spans of ``predict`` beside those of ``pipeline("token-classification")``: which strategy gives the same, and where.

The models have random weights, so that the pieces of a word often disagree.
"""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForTokenClassification, pipeline

from distill_runner.tasks import make_task
from distill_runner.tasks.tokens.sentences import Sentence, Sentences
from helpers.words import WORDS

SCHEMES = {"bio": ["O", "B-x", "I-x", "B-y", "I-y"], "plain": ["O", "x", "y"]}
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
    fields = {"dataset": "d", "columns": ["text"], "metrics": ["f1"], "epochs": 1, "validation": {"v": "v"}}
    task = make_task(name="own", type="tokens", labels=names, **fields)
    sentences = Sentences([Sentence(text, line=f"in row {number}") for number, text in enumerate(rows)], "test", False)
    task.write(folder, sentences, tokenizer)
    split = task.open(folder)
    outputs = np.zeros((split.num_outputs, len(names)))
    for number in range(len(split)):
        batch = split.batch([number])
        with torch.inference_mode():
            logits = model(input_ids=batch.input_ids[None].long()).logits[0]
        outputs[batch.output_index] = logits[batch.head_tokens]
    lines = task.prediction_file(outputs, split, sentences, "", {}).splitlines()
    return [[(span["start"], span["end"], span["label"]) for span in json.loads(line)["spans"]] for line in lines]


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
