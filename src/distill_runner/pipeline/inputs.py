"""What stages read: vocabularies, tokenised splits and the data made of them, each once in the store."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from distill_runner.common.seeds import stage_seed
from distill_runner.datasets.batches import Tokens
from distill_runner.datasets.corpora import train_wordpiece, write_examples
from distill_runner.datasets.examples import Examples
from distill_runner.datasets.tasks import load_split
from distill_runner.models.sources import read_tokenizer
from distill_runner.pipeline.stages import CORPUS, TRANSFER, Stage
from distill_runner.pipeline.store import Store
from distill_runner.training.data import CorpusData, Data, TaskData, TextData
from distill_runner.training.devices import Device


class Inputs:
    """The inputs of stages, on the device that will read them, which is asked for when it is needed."""

    def __init__(self, store: Store, device: Callable[[], Device]) -> None:
        self.store, self.device = store, device

    def tokenizer(self, stage: Stage) -> Any:
        """The stage's tokenizer, its vocabulary trained first if it is to come from the corpus."""
        if stage.tokenizer != CORPUS:
            return read_tokenizer(stage.tokenizer)
        corpus = stage.root.config.corpus
        assert corpus is not None
        size = corpus.vocab_size
        assert size is not None

        def train(folder: Path) -> None:
            train_wordpiece(corpus.texts("train"), size, folder)

        return read_tokenizer(str(self.store.get(stage.vocabulary_spec, train)))

    def tokens(self, stage: Stage, split: str, tokenizer: Any | None = None) -> Tokens:
        """A tokenised split of the stage's data."""

        def write(folder: Path) -> None:
            tokens_of = tokenizer or self.tokenizer(stage)
            if stage.config.corpus is not None:
                write_examples(folder, stage.config.corpus, "train" if split == "train" else "validation", tokens_of)
            else:
                examples, max_length = self._examples(stage, split)
                Tokens.write(folder, examples, tokens_of, max_length)

        return Tokens(self.store.get(stage.split_spec(split), write))

    @staticmethod
    def _examples(stage: Stage, split: str) -> tuple[Examples, int]:
        task, transfer = stage.config.task, stage.config.transfer
        assert task is not None
        examples = transfer.examples() if transfer and split == TRANSFER else load_split(task, split)
        return examples, task.max_length

    def data(self, stage: Stage) -> Data:
        """What the stage trains on and is judged by, tokenised into the store."""
        task, corpus = stage.config.task, stage.config.corpus
        if not stage.is_judged:
            return TextData(self.tokens(stage, "train"), self.device())
        if corpus is not None:
            tokenizer = self.tokenizer(stage)
            train, held_out = (self.tokens(stage, split, tokenizer) for split in ("train", "validation"))
            seed = stage_seed(stage.config.seed, stage.name)
            return CorpusData(corpus, train, held_out, tokenizer, seed, self.device())
        assert task is not None
        validation = {name: self.tokens(stage, split) for name, split in task.validation.items()}
        train = self.tokens(stage, stage.train_split)
        return TaskData(task, train, validation, self.device(), stage.share)
