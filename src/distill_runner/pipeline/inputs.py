"""Inputs of stages: vocabularies, tokenized splits and the data made from them, each stored once; and their models."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache, reduce
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from distill_runner.common.errors import UserError, error_context, quantity
from distill_runner.common.seeds import stage_seed
from distill_runner.datasets.pretraining import train_wordpiece, write_examples
from distill_runner.datasets.readers.content import column_names, hub_commit
from distill_runner.datasets.readers.dataset import Dataset
from distill_runner.datasets.readers.table import FileRecord, TableRecord, recorded_tables
from distill_runner.datasets.splits import CorpusSplit, HeldOutSplit, Split, held_out_examples
from distill_runner.datasets.tokenization import array_in
from distill_runner.models.sources import ModelSource, resolve_source
from distill_runner.models.vocabulary import num_changed, trim_tokenizer
from distill_runner.models.weights import WeightsReport, read_report
from distill_runner.pipeline.stages import Stage, TrimmedTokenizer
from distill_runner.pipeline.status import write_json
from distill_runner.pipeline.store import Store
from distill_runner.tasks.scores import TRANSFER, score_table
from distill_runner.tasks.split_account import SplitAccount, account_of_tables, length_counts
from distill_runner.tasks.task_splits import HELD_OUT
from distill_runner.training.data import CorpusData, Data, TaskData, TextData
from distill_runner.training.devices import Device

ACCOUNT, HASHES = "account.json", "hashes"
"""Files of a stored split: what was taken from the data, and a hash of each example."""
REMAINING = "remaining.npy"
"""File of a trimmed tokenizer: the ids that its tokens had before."""


class StageInputs:
    """Inputs of stages for a device, which is requested only when needed."""

    def __init__(self, store: Store, device: Callable[[], Device]) -> None:
        self.store, self.device = store, device
        self.data = cache(self._read_data)
        """Returns the data that a stage is trained and evaluated on, tokenized into the store. It is read once."""

    def tokenizer(self, stage: Stage) -> Any:
        """Return the stage's tokenizer; None without text. A vocabulary from the corpus is trained first if missing."""
        if stage.tokenizer is None:
            return None
        if isinstance(stage.tokenizer, ModelSource):
            return stage.tokenizer.tokenizer()
        if isinstance(stage.tokenizer, TrimmedTokenizer):
            return resolve_source(str(self.trimmed(stage.tokenizer)[0])).tokenizer()
        corpus = stage.root.config.corpus
        assert corpus is not None
        size = corpus.vocab_size
        assert size is not None

        def train(folder: Path) -> None:
            train_wordpiece(corpus.texts("train"), size, folder)

        return resolve_source(str(self.store.get(stage.vocabulary_spec, train))).tokenizer()

    def trimmed(self, tokenizer: TrimmedTokenizer) -> tuple[Path, np.ndarray]:
        """Return the folder of a trimmed tokenizer, which is made first if missing, and the old ids of its tokens."""

        def write(folder: Path) -> None:
            used = (self.split(stage, name).token_ids for stage, name in tokenizer.texts)
            used_ids = reduce(np.union1d, (ids for ids in used if ids is not None))
            np.save(folder / REMAINING, trim_tokenizer(self.tokenizer(tokenizer.stage), used_ids, folder))

        folder = self.store.get(tokenizer.spec, write)
        return folder, np.load(folder / REMAINING)

    def vocab_size(self, stage: Stage) -> int | None:
        """Return the vocabulary size of a newly initialized or resized model; None keeps that of the source.

        It is the size before its vocabulary is trimmed.
        """
        if stage.source_stage is not None and isinstance(stage.source_stage.tokenizer, TrimmedTokenizer):
            return None
        stage = stage.with_full_vocabulary
        if stage.config.model.resize and (stage.source_stage or stage.model_source):
            return stage.shape.vocab_size
        tokenizer = None if stage.source_stage or stage.model_source else self.tokenizer(stage)
        return None if tokenizer is None else max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))

    def split(self, stage: Stage, name: str, tokenizer: Any | None = None) -> Split:
        """Return a split of the stage's data, ready for batches; the name ``TRANSFER`` stands for the transfer set.

        Args:
            tokenizer: the stage's tokenizer; None reads it if the split is not in the store.
        """
        task, corpus = stage.config.task, stage.config.corpus

        def write(folder: Path) -> None:
            stage_tokenizer = tokenizer or self.tokenizer(stage)
            with recorded_tables() as tables:
                if task is not None:
                    examples = read_examples(stage, name)
                    cut = task.write(folder, examples, stage_tokenizer)
                    account = account_of_examples(stage, name, examples, tables)
                    if (hashes := task.hashes(examples, folder)) is not None:
                        np.save(folder / HASHES, hashes)
                else:
                    assert corpus is not None
                    cut = write_examples(folder, corpus, "train" if name == "train" else "validation", stage_tokenizer)
                    account = account_of_tables(name, tables, [], [])
            opened = task.open(folder) if task is not None else CorpusSplit(folder)
            account.rows = opened.num_examples
            if isinstance(stage.tokenizer, TrimmedTokenizer):
                account.retokenized = self._retokenized(stage, name, opened, self.trimmed(stage.tokenizer)[1])
            if stage_tokenizer is not None:
                lengths = opened.teacher_inputs.lengths  # of each text of a pair whose vectors are compared
                account.lengths = length_counts(lengths, cut, stage.config.num_positions)
            write_json(folder / ACCOUNT, asdict(account))

        folder = self.store.get(stage.split_spec(name), write)
        return task.open(folder, stage.views) if task is not None else CorpusSplit(folder)

    def _retokenized(self, stage: Stage, name: str, split: Split, remaining: np.ndarray) -> list[int]:
        """Return how many texts have other tokens than with the full vocabulary, and the number of texts.

        Raises:
            UserError: there are some in the training split of the stage that trims its vocabulary.
        """
        full = self.split(stage.with_full_vocabulary, name)
        changed = num_changed(split.teacher_inputs, full.teacher_inputs, remaining)
        if changed and stage.config.model.vocabulary == "trim" and name == stage.train_split:
            problem = f"{changed:,} of {quantity(len(split), 'training text', ',')} would have other tokens"
            raise UserError(".model.vocabulary", "trim", problem, "Leave it out.")
        return [changed, len(split.teacher_inputs)]

    def account(self, stage: Stage, name: str) -> tuple[SplitAccount, np.ndarray | None] | None:
        """Return the account of a split in the store, and the hashes of its examples if they have any.

        None if the split is not in the store.
        """
        folder = self.store.find(stage.split_spec(name))
        if folder is None or not (folder / ACCOUNT).exists():
            return None
        content = json.loads((folder / ACCOUNT).read_text(encoding="utf-8"))
        account = SplitAccount(**{**content, "files": [FileRecord(**record) for record in content["files"]]})
        return account, array_in(folder, HASHES)

    def _read_data(self, stage: Stage) -> Data:
        corpus, seed = stage.config.corpus, stage_seed(stage.config.seed, stage.name)
        if stage.is_corpus and not stage.is_masked:
            return TextData(self.split(stage, "train"), self.device())
        if corpus is not None:
            tokenizer = self.tokenizer(stage)
            train, validation = (self.split(stage, split, tokenizer) for split in ("train", "validation"))
            return CorpusData(corpus, train, validation, tokenizer, seed, self.device())
        task = stage.task
        splits = {name: self.split(stage, split) for name, split in task.validation.items()}
        train = self.split(stage, stage.train_split)
        held_out = None
        if task.select_on == HELD_OUT:
            full_split = train if stage.train_split == task.train else self.split(stage, task.train)
            held_out = HeldOutSplit(full_split, held_out_examples(np.asarray(full_split.labels), task.hold_out))
        return TaskData(task, train, splits, self.device(), stage.share, held_out, seed)


def read_examples(stage: Stage, name: str) -> Any:
    """Return the examples of a split of the stage's task from the data, or those of its transfer set.

    Raises:
        UserError: the split to train on lacks a column of scores that the task names; or ``Task.examples`` refuses it.
    """
    task, transfer = stage.task, stage.config.transfer
    if transfer and name == TRANSFER:
        return task.transfer(transfer)
    if name == stage.train_split and task.prediction_columns:
        with recorded_tables():  # the task reads the split itself, and skips columns that are not there
            if not set(task.prediction_columns) <= set(column_names(task, name)):
                score_table(task, name)
    return task.examples(name)


def account_of_examples(stage: Stage, name: str, examples: Any, tables: list[TableRecord]) -> SplitAccount:
    """Return what was taken from the data of a split; a transfer set has columns of its own, and no label is read."""
    task, transfer = stage.task, stage.config.transfer
    account = task.account(name, examples, tables)
    if transfer is None or name != TRANSFER:
        return account
    columns = list(dict.fromkeys(column for part in transfer.parts.values() for column in part.columns))
    of_files = account_of_tables(name, tables, columns, task.prediction_columns)
    texts = dict.fromkeys(" + ".join(part.columns) for part in transfer.parts.values())
    return replace(account, texts=[" or ".join(texts)], label="", unread=of_files.unread)


def weights_report(stage: Stage) -> WeightsReport | None:
    """Return what the stage reads of its source's weights; None if it reads none, or they are not on this machine."""
    if stage.model_source is None:
        return None
    with error_context(f"stages.{stage.name}"):
        return read_report(stage.model_source, stage.config.model, stage.head)


def hub_commits(stage: Stage) -> dict[str, str]:
    """Return the commit of each hub model and dataset that the stage or its upstream stages read, by name."""
    commits = dict[str, str]()
    for part in stage.in_build_order:
        config, sources = part.config, [part.model_source, part.tokenizer]
        for source in [source for source in sources if isinstance(source, ModelSource)]:
            for own in [source, *([source.base] if source.base else [])]:
                if own.commit is not None:
                    commits[own.name] = own.commit.sha
        mixtures = [mixture.parts.values() for mixture in (config.corpus, config.transfer) if mixture]
        data: list[Dataset] = [*filter(None, [config.task]), *chain(*mixtures)]
        for dataset in (entry.locate(split)[0] for entry in data for split in sorted(entry.splits)):
            if (sha := hub_commit(dataset)) is not None:
                commits[f"{dataset.dataset}@{dataset.revision}" if dataset.revision else dataset.dataset] = sha
    return commits
