"""Tiny classifiers of any family of transformers, with random weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer


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
