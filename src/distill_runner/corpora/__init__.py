"""Unlabelled text to learn from: what it is, where it comes from, how it is tokenised and masked."""

from distill_runner.corpora.corpus import Corpus, TransferSet
from distill_runner.corpora.embedded import (
    PAIR_LABELS,
    SENTENCE_LABELS,
    SPLITS,
    demo_task,
    embedded_fingerprint,
    embedded_passages,
    embedded_text,
    topic_split,
)
from distill_runner.corpora.examples import write_examples
from distill_runner.corpora.parts import Part
from distill_runner.corpora.pretraining import continuations, mask_draws, mask_tokens, train_wordpiece

__all__ = [
    "PAIR_LABELS",
    "SENTENCE_LABELS",
    "SPLITS",
    "Corpus",
    "Part",
    "TransferSet",
    "continuations",
    "demo_task",
    "embedded_fingerprint",
    "embedded_passages",
    "embedded_text",
    "mask_draws",
    "mask_tokens",
    "topic_split",
    "train_wordpiece",
    "write_examples",
]
