"""Inputs of stages: vocabularies, tokenised splits and the data made from them, each stored once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from distill_runner.common.seeds import stage_seed
from distill_runner.datasets.corpora import CorpusTokens, train_wordpiece, write_examples
from distill_runner.datasets.held_out import HeldOut, held_out_rows
from distill_runner.datasets.split import Split
from distill_runner.kinds.splits import HELD_OUT
from distill_runner.models.sources import read_tokenizer
from distill_runner.pipeline.stage_data import CORPUS, TRANSFER
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store
from distill_runner.training.data import Data, TaskData
from distill_runner.training.devices import Device
from distill_runner.training.text_data import CorpusData, TextData


class Inputs:
    """Inputs of stages for a device, which is requested only when needed."""

    def __init__(self, store: Store, device: Callable[[], Device]) -> None:
        self.store, self.device = store, device

    def tokenizer(self, stage: Stage) -> Any:
        """Return the stage's tokenizer; None without text. A vocabulary from the corpus is trained first if missing."""
        if stage.tokenizer is None:
            return None
        if stage.tokenizer != CORPUS:
            return read_tokenizer(stage.tokenizer)
        corpus = stage.root.config.corpus
        assert corpus is not None
        size = corpus.vocab_size
        assert size is not None

        def train(folder: Path) -> None:
            train_wordpiece(corpus.texts("train"), size, folder)

        return read_tokenizer(str(self.store.get(stage.data.vocabulary_spec, train)))

    def vocab_size(self, stage: Stage) -> int | None:
        """Return the vocabulary size of a newly initialised model; None for a model with a source or without text."""
        tokenizer = None if stage.source or stage.config.model.source else self.tokenizer(stage)
        return None if tokenizer is None else len(tokenizer)

    def split(self, stage: Stage, name: str, tokenizer: Any | None = None) -> Split:
        """Return a split of the stage's data, ready for batches; the name ``TRANSFER`` stands for the transfer set."""
        task, corpus, transfer = stage.config.task, stage.config.corpus, stage.config.transfer

        def write(folder: Path) -> None:
            read_by = tokenizer or self.tokenizer(stage)
            if task is not None:
                examples = task.transfer(transfer) if transfer and name == TRANSFER else task.examples(name)
                task.write(folder, examples, read_by)
            elif corpus is not None:
                write_examples(folder, corpus, "train" if name == "train" else "validation", read_by)

        folder = self.store.get(stage.data.split_spec(name), write)
        return task.open(folder, stage.data.views) if task is not None else CorpusTokens(folder)

    def data(self, stage: Stage) -> Data:
        """Return the data that the stage is trained and evaluated on, tokenised into the store."""
        task, corpus = stage.config.task, stage.config.corpus
        seed = stage_seed(stage.config.seed, stage.name)
        if not stage.data.is_judged:
            return TextData(self.split(stage, "train"), self.device())
        if corpus is not None:
            tokenizer = self.tokenizer(stage)
            train, held_out = (self.split(stage, split, tokenizer) for split in ("train", "validation"))
            return CorpusData(corpus, train, held_out, tokenizer, seed, self.device())
        assert task is not None
        validation = {name: self.split(stage, split) for name, split in task.validation.items()}
        train = self.split(stage, stage.data.train_split)
        selecting = None
        if task.select_on == HELD_OUT:
            whole = train if stage.data.train_split == task.train else self.split(stage, task.train)
            selecting = HeldOut(whole, held_out_rows(np.asarray(whole.labels), task.hold_out))
        return TaskData(task, train, validation, self.device(), stage.data.share, selecting, seed)
