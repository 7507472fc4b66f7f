"""What a stage reads, and what determines it: examples, tokens, and what there is to learn from and to judge by."""

from dataclasses import dataclass
from functools import cached_property

from distill_runner.models.sources import source_fingerprint
from distill_runner.pipeline.config import StageConfig
from distill_runner.pipeline.store import Spec

SCHEMA = 3
"""Raised when the meaning of an artifact changes; everything is then built again."""
CORPUS, TRANSFER = "corpus", "transfer"


@dataclass(frozen=True, eq=False)
class StageData:
    """The examples of a stage, as its tokenizer writes them.

    Attributes:
        tokenizer: a source as in ``ModelConfig``, never a stage, or the name ``corpus``; None where there is no text.
        first: of the first stage of its line, if that is another one.
        has_teacher: whether a teacher looks at the examples too.
    """

    config: StageConfig
    tokenizer: str | None
    first: "StageData | None"
    has_teacher: bool

    @cached_property
    def spec(self) -> Spec:
        """Of the examples."""
        if self.config.corpus is not None:
            of_masks = () if self.is_masked else ("mask_probability", "whole_word")
            return {key: value for key, value in self.config.corpus.spec().items() if key not in of_masks}
        assert self.config.task is not None
        return self.config.task.spec() | ({"transfer": self.config.transfer.spec()} if self.config.transfer else {})

    @cached_property
    def tokenizer_spec(self) -> Spec | None:
        if self.tokenizer is None:
            return None
        if self.tokenizer == CORPUS:
            return self.vocabulary_spec
        return {"content": source_fingerprint(self.tokenizer)}

    @cached_property
    def vocabulary_spec(self) -> Spec:
        """Of a vocabulary trained on the corpus of the first stage of this line."""
        corpus = (self.first or self).spec
        read = ("version", "parts", "hold_out", "vocab_size")
        return {"kind": "vocabulary", "schema": SCHEMA, "corpus": {key: corpus[key] for key in read}}

    def split_spec(self, split: str) -> Spec:
        """Of a tokenised split: what the texts, their labels and their tokens depend on."""
        read = {"parts", "examples", "hold_out", "short_pairs", "max_length"}
        if self.config.task is not None:
            read = {"content"} | self.config.task.read_fields
        if split == TRANSFER:
            read = {"transfer"} | (read - {"content", "label", "labels"})
        return {
            "kind": "tokens",
            "schema": SCHEMA,
            "data": {key: value for key, value in self.spec.items() if key in read},
            "split": split,
            "tokenizer": self.tokenizer_spec,
        }

    @property
    def train_split(self) -> str:
        """The split to train on; ``TRANSFER`` stands for the transfer set."""
        if self.config.transfer:
            return TRANSFER
        return self.config.task.train if self.config.task else "train"

    @property
    def share(self) -> float:
        """Of the training examples that are used; a transfer set is cut by its own ``size`` alone."""
        return 1.0 if self.config.transfer else self.config.share

    @property
    def views(self) -> int | None:
        """How many fixed pictures of each example a teacher sees; None where each epoch has its own."""
        return self.config.views if self.has_teacher else None

    @property
    def labels(self) -> frozenset[str]:
        """What the training batches have of their own to learn from."""
        if self.config.transfer:
            return frozenset()
        paired = self.config.corpus is not None and self.config.corpus.examples == "pairs"
        return frozenset({"labels", "is_next"} if paired else {"labels"})

    @cached_property
    def labels_read(self) -> frozenset[str]:
        """What the method reads of them."""
        return self.config.method.make().reads_labels()

    @property
    def is_corpus(self) -> bool:
        """Whether it is the text of a corpus, and not of a task."""
        return self.config.corpus is not None

    @property
    def is_masked(self) -> bool:
        """Whether its text has labels: tokens that are hidden, and whether sentences follow each other."""
        return self.is_corpus and bool(self.labels_read)

    @property
    def is_judged(self) -> bool:
        """Whether there is something to judge a model by."""
        return self.is_masked or not self.is_corpus
