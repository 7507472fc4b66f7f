"""Tiny classifiers of any family of transformers, with random weights; and tasks for their heads."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from distill_runner.models.config import Head
from distill_runner.tasks import make_task

TASK = make_task(
    name="tiny",
    dataset="nowhere",
    columns=["text"],
    labels=["no", "perhaps", "yes"],
    metrics=["accuracy"],
    max_length=48,
    epochs=1,
    validation={"validation": "validation"},
)
SCORES = make_task(**TASK.model_dump() | {"labels": None, "type": "regression", "metrics": ["pearson"]})
"""Tasks of three classes and of scores; their data are not read."""
HEAD = Head("AutoModelForSequenceClassification", ("no", "yes"), "single_label_classification", "rte")
SIZES = dict[str, Any](hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, vocab_size=20)


def save_classifier(folder: Path, family: str, tokenizer: Path, settings: Mapping[str, Any], seed: int) -> Path:
    """Save a classifier and its tokenizer; ``settings`` are those of its configuration but the vocabulary's size."""
    words = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, vocab_size=len(words), **settings)
    model: Any = AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # the norms stay as they are
            nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def outputs_of(folder: Path, pairs: Sequence[Sequence[str]]) -> np.ndarray:
    """The outputs of a model by another route: the library's own model, on one padded batch of pairs of texts."""
    tokenizer, texts = AutoTokenizer.from_pretrained(folder), [[pair[number] for pair in pairs] for number in (0, 1)]
    batch = tokenizer(*texts, padding=True, truncation=True, max_length=48, return_tensors="pt")
    with torch.inference_mode():
        outputs: np.ndarray = AutoModelForSequenceClassification.from_pretrained(folder).eval()(**batch).logits.numpy()
    return outputs
