"""Unlabeled text for pre-training and distillation: sources, tokenization and masking."""

from distill_runner.datasets.corpora.corpus import Corpus, CorpusPart, TransferSet
from distill_runner.datasets.corpora.examples import write_examples
from distill_runner.datasets.corpora.pretraining import continuations, mask_draws, mask_tokens, train_wordpiece

__all__ = [
    "Corpus",
    "CorpusPart",
    "TransferSet",
    "continuations",
    "mask_draws",
    "mask_tokens",
    "train_wordpiece",
    "write_examples",
]
