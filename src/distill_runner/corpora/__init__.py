"""Unlabelled text to pre-train on: what it is, where it comes from, how it is tokenised and masked."""

from distill_runner.corpora.embedded import (
    PAIR_LABELS,
    SENTENCE_LABELS,
    SPLITS,
    Split,
    demo_task,
    embedded_fingerprint,
    embedded_passages,
    embedded_text,
)
from distill_runner.corpora.pretraining import mask_tokens, train_wordpiece
from distill_runner.errors import UserError
from distill_runner.schema import Schema

__all__ = [
    "PAIR_LABELS",
    "SENTENCE_LABELS",
    "SPLITS",
    "Corpus",
    "Split",
    "demo_task",
    "embedded_fingerprint",
    "embedded_passages",
    "embedded_text",
    "mask_tokens",
    "train_wordpiece",
]


class Corpus(Schema):
    """A body of text to pre-train on, with the sizes that its tokenizer and its examples take.

    Attributes:
        name, version: identity; raise the version when the same source yields other text.
        source: ``embedded``; folders and files of text are not read yet.
        max_length: tokens of one example, special tokens included.
        vocab_size: entries of the WordPiece vocabulary trained on it.
    """

    name: str
    version: int
    source: str = "embedded"
    max_length: int
    vocab_size: int

    def texts(self, split: Split) -> list[str]:
        """Passages of one split.

        Raises:
            UserError: the source is unknown.
        """
        self._check_source()
        return embedded_text(split)

    def fingerprint(self) -> str:
        """Content hash of all that `texts` can return; errors as there."""
        self._check_source()
        return embedded_fingerprint()

    def _check_source(self) -> None:
        if self.source != "embedded":
            raise UserError("corpus.source", self.source, "unknown source of text", "Known: embedded.")
