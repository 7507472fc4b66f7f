"""Unlabelled text for pre-training and distillation: sources, tokenisation and masking."""

from distill_runner.datasets.corpora.corpus import Corpus, TransferSet
from distill_runner.datasets.corpora.parts import CorpusPart
from distill_runner.datasets.corpora.pretraining import continuations, mask_draws, mask_tokens, train_wordpiece
from distill_runner.datasets.corpora.text_examples import write_examples
from distill_runner.datasets.corpora.tokens import CorpusTokens

__all__ = [
    "Corpus",
    "CorpusPart",
    "CorpusTokens",
    "TransferSet",
    "continuations",
    "mask_draws",
    "mask_tokens",
    "train_wordpiece",
    "write_examples",
]
