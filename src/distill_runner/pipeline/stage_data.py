"""Data of a stage: which examples it reads, as its tokenizer encodes them, and the keys of their splits."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, Protocol

from distill_runner.models.sources import ModelSource
from distill_runner.pipeline.code_version import code_version
from distill_runner.pipeline.config import StageConfig
from distill_runner.pipeline.store import SCHEMA, Spec
from distill_runner.tasks.scores import TRANSFER

CORPUS: Final = "corpus"
"""Tokenizer of a stage whose vocabulary is trained on its corpus."""


class DerivedTokenizer(Protocol):
    """Tokenizer that is built from others and from texts; its spec holds what determines it."""

    @property
    def spec(self) -> Spec: ...


Tokenizer = ModelSource | DerivedTokenizer | Literal["corpus"] | None
"""Tokenizer of a stage: its source, a derived one such as ``stages.TrimmedTokenizer``, or ``corpus`` for a vocabulary
trained on the corpus; None without text, and for a stage of predictions."""


@dataclass(frozen=True, eq=False)
class StageData:
    """Examples of a stage, as its tokenizer encodes them.

    Attributes:
        first: data of the first stage in the chain of sources of this stage; None if this stage is the first one.
        has_teacher: whether a teacher reads the examples too.
    """

    config: StageConfig
    tokenizer: Tokenizer
    first: "StageData | None"
    has_teacher: bool

    @cached_property
    def spec(self) -> Spec:
        """Spec of the examples."""
        if self.config.corpus is not None:
            mask_keys = () if self.is_masked else ("mask_probability", "whole_word")
            return {key: value for key, value in self.config.corpus.spec().items() if key not in mask_keys}
        assert self.config.task is not None
        return self.config.task.spec() | ({"transfer": self.config.transfer.spec()} if self.config.transfer else {})

    @cached_property
    def tokenizer_spec(self) -> Spec | None:
        if self.tokenizer is None:
            return None
        if isinstance(self.tokenizer, ModelSource):
            return {"content": self.tokenizer.fingerprint}
        return self.vocabulary_spec if self.tokenizer == CORPUS else self.tokenizer.spec

    @cached_property
    def vocabulary_spec(self) -> Spec:
        """Spec of a vocabulary trained on the corpus of the first stage in this stage's chain of sources."""
        corpus = (self.first or self).spec
        keys = ("version", "parts", "hold_out", "vocab_size", "exponent")
        return {"kind": "vocabulary", "schema": SCHEMA, "corpus": {key: corpus[key] for key in keys if key in corpus}}

    def split_spec(self, split: str) -> Spec:
        """Return the spec of a tokenized split: everything that its texts, labels and tokens depend on."""
        keys = {"parts", "examples", "hold_out", "short_pairs", "max_length", "exponent"}
        keys |= {"version"} if self.spec.get("version") != 1 else set()
        if self.config.task is not None:
            keys = {"content"} | self.config.task.example_fields
        if split == TRANSFER:
            depends_on_labels = self.config.task is not None and self.config.task.reads_labels_for_transfer
            keys = {"transfer"} | (keys if depends_on_labels else keys - {"content", "label", "labels"})
        data = {key: value for key, value in self.spec.items() if key in keys}
        if self.config.task is not None and split != TRANSFER:
            data |= self.config.task.split_settings(split)
            if self.config.task.is_test(split):
                data["content"] = self.config.task.test_content(split)  # the spec of a stage knows no test splits
        return {
            "kind": "tokens",
            "schema": SCHEMA,
            "code": code_version(),
            "data": data,
            "split": split,
            "tokenizer": self.tokenizer_spec,
        }

    @property
    def train_split(self) -> str:
        """Name of the split to train on; ``TRANSFER`` stands for the transfer set."""
        if self.config.transfer:
            return TRANSFER
        return self.config.task.train if self.config.task else "train"

    @property
    def share(self) -> float:
        """Share of the training examples to use; 1 for a transfer set, which only its own ``size`` limits."""
        return 1.0 if self.config.transfer else self.config.share

    @property
    def views(self) -> int | None:
        """Number of fixed views of each example that a teacher sees; None if there is no limit, or one view only."""
        task = self.config.task
        return self.config.views if self.has_teacher and task is not None and task.is_endless(None) else None

    @property
    def is_endless(self) -> bool:
        """Whether training examples look different in each epoch: text of a corpus, or images cropped at random."""
        return self.is_corpus or (self.config.task is not None and self.config.task.is_endless(self.views))

    @property
    def labels(self) -> frozenset[str]:
        """Names of the labels that the training batches contain."""
        if self.config.transfer or (self.config.task is not None and not self.config.task.has_train_labels):
            return frozenset()
        paired = self.config.corpus is not None and self.config.corpus.examples == "pairs"
        return frozenset({"labels", "is_next"} if paired else {"labels"})

    @property
    def is_corpus(self) -> bool:
        """Whether the data are the text of a corpus, not the examples of a task."""
        return self.config.corpus is not None

    @cached_property
    def is_masked(self) -> bool:
        """Whether the method reads labels of the corpus: masked tokens, or whether sentences follow each other."""
        return self.is_corpus and bool(self.config.method.reads_labels)

    @property
    def has_evaluation_data(self) -> bool:
        """Whether there are data to evaluate a model on."""
        return self.is_masked or not self.is_corpus
