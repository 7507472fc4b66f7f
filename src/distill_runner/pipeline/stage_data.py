"""Data of a stage and what determines them: examples, tokens, labels to learn from, and data to evaluate on."""

from dataclasses import dataclass
from functools import cached_property

from distill_runner.datasets.batches import gives_segments
from distill_runner.models.sources import read_tokenizer, source_fingerprint
from distill_runner.pipeline.config import StageConfig
from distill_runner.pipeline.store import Spec

SCHEMA = 3
"""Version of what artifacts mean. Raising it makes every artifact be built again."""
CORPUS, TRANSFER = "corpus", "transfer"


@dataclass(frozen=True, eq=False)
class StageData:
    """Examples of a stage, as its tokenizer encodes them.

    Attributes:
        tokenizer: a source as in ``ModelConfig``, never a stage, or the name ``corpus``; None for data without text,
            and for a stage of predictions.
        first: data of the first stage in the chain of sources of this stage; None if this stage is the first one.
        has_teacher: whether a teacher reads the examples too.
    """

    config: StageConfig
    tokenizer: str | None
    first: "StageData | None"
    has_teacher: bool

    @cached_property
    def spec(self) -> Spec:
        """Spec of the examples."""
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
        content = {"content": source_fingerprint(self.tokenizer)}
        # Examples that older versions stored under the key without this had segments 1.
        if self._is_framed and not gives_segments(read_tokenizer(self.tokenizer)):
            return content | {"segments": False}
        return content

    @property
    def _is_framed(self) -> bool:
        """Whether special tokens and segment ids of two texts come from ``Frame``, not from the tokenizer itself."""
        if self.config.corpus is not None:
            return self.config.corpus.examples == "pairs"
        return self.config.task is not None and self.config.task.framed

    @cached_property
    def vocabulary_spec(self) -> Spec:
        """Spec of a vocabulary trained on the corpus of the first stage in this stage's chain of sources."""
        corpus = (self.first or self).spec
        read = ("version", "parts", "hold_out", "vocab_size")
        return {"kind": "vocabulary", "schema": SCHEMA, "corpus": {key: corpus[key] for key in read}}

    def split_spec(self, split: str) -> Spec:
        """Return the spec of a tokenised split: everything that its texts, labels and tokens depend on."""
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
        """Name of the split to train on; ``TRANSFER`` stands for the transfer set."""
        if self.config.transfer:
            return TRANSFER
        return self.config.task.train if self.config.task else "train"

    @property
    def share(self) -> float:
        """Share of the training examples to use; 1 for a transfer set, which only its own ``size`` cuts."""
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
        if self.config.transfer:
            return frozenset()
        paired = self.config.corpus is not None and self.config.corpus.examples == "pairs"
        return frozenset({"labels", "is_next"} if paired else {"labels"})

    @cached_property
    def labels_read(self) -> frozenset[str]:
        """Names of the labels that the method reads from the training batches."""
        return self.config.method.make().reads_labels()

    @property
    def is_corpus(self) -> bool:
        """Whether the data are the text of a corpus, not the examples of a task."""
        return self.config.corpus is not None

    @property
    def is_masked(self) -> bool:
        """Whether the method reads labels of the corpus: masked tokens, or whether sentences follow each other."""
        return self.is_corpus and bool(self.labels_read)

    @property
    def is_judged(self) -> bool:
        """Whether there are data to evaluate a model on."""
        return self.is_masked or not self.is_corpus
