"""Building what stages describe: each artifact once, in the order in which they need each other."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from distill_runner.batches import Tokens
from distill_runner.config import Runtime
from distill_runner.corpora import train_wordpiece, write_examples
from distill_runner.data import CorpusData, Data, TaskData
from distill_runner.devices import Device
from distill_runner.encoders import Needs
from distill_runner.errors import within
from distill_runner.meter import Log
from distill_runner.models import build, count_parameters, read_tokenizer, require_weights
from distill_runner.seeds import seed_all, stage_seed
from distill_runner.stages import CORPUS, SCHEMA, TRANSFER, Stage
from distill_runner.store import Spec, Store, key_of, remove
from distill_runner.tasks import Examples, load_split
from distill_runner.teachers import Cached, Live, NoTeacher, TeacherTargets, cache_bytes, choose
from distill_runner.train import CHECKPOINT, Training, fit

log = logging.getLogger(__name__)

Report = Callable[[str], Log]
"""Gives the sink for the numbers of a stage, by its name."""


@dataclass(frozen=True)
class Planned:
    """A line of the plan: an artifact, whether it is in the store, and what it is made of."""

    name: str
    key: str
    hit: bool
    what: str

    def __str__(self) -> str:
        return f"{'hit' if self.hit else 'build':5} {self.name:8} {self.key}  {self.what}"


class Pipeline:
    """Builds stages into a store.

    Args:
        report: where the numbers of a stage's training go, by the stage's name.
    """

    def __init__(self, store: Store, runtime: Runtime, report: Report) -> None:
        self.store, self.runtime, self.report = store, runtime, report
        self.device = Device.of(runtime.device, runtime.precision)

    def plan(self, stage: Stage) -> list[Planned]:
        """What ``build`` would touch, in its order, the stage itself last; one that is there needs nothing more."""
        lines = []
        if not (hit := self.store.has(stage.spec)):
            lines = [line for upstream in stage.upstream for line in self.plan(upstream)]
            if stage.teacher:
                lines.append(self._plan_targets(stage, stage.teacher))
        return list(dict.fromkeys([*lines, Planned(stage.name, stage.key, hit, stage.describe())]))

    def _plan_targets(self, stage: Stage, teacher: Stage) -> Planned:
        with torch.device("meta"):
            needs = stage.method().teacher_needs
        spec = targets_spec(stage, needs)
        read = [*(["logits"] if needs.logits else []), *(f"[CLS] of layer {layer}" for layer in sorted(needs.cls))]
        what = ", ".join(read if len(read) <= 3 else [*read[:2], "...", read[-1]])
        mode = "" if self.runtime.targets == "auto" else f" (runtime.targets={self.runtime.targets})"
        return Planned("targets", key_of(spec), self.store.has(spec), f"{what} of {teacher.name}{mode}")

    def prepare(self, stage: Stage) -> None:
        """Read what training will read, in all stages to build: what is missing is told before anything is trained."""
        if self.store.has(stage.spec):
            return
        for upstream in stage.upstream:
            self.prepare(upstream)
        with within(f"stages.{stage.name}"):
            if stage.source is None and stage.config.model.source:
                require_weights(stage.config.model.source)
            self._data(stage, self.tokenizer(stage))

    def build(self, stage: Stage) -> Path:
        """The folder of the stage's artifact, built with all that it needs if it is not there."""
        with within(f"stages.{stage.name}"):
            return self.store.get(stage.spec, lambda folder: self._fit(stage, folder))

    def _fit(self, stage: Stage, folder: Path) -> None:
        for upstream in stage.upstream:
            self.build(upstream)
        log.info("stage %s: building %s", stage.name, stage.key)
        tokenizer = self.tokenizer(stage)
        data = self._data(stage, tokenizer)
        targets = self._targets(stage)
        # Nothing above may leave a trace in the random numbers below: it may have come from the store.
        seed_all(stage_seed(stage.config.seed, stage.name))
        model = self._model(stage, len(tokenizer))
        started = time.monotonic()
        training = Training(
            model,
            stage.method(),
            data,
            targets,
            stage.config.optim,
            select_best=stage.config.select == "best",
            seed=stage_seed(stage.config.seed, stage.name),
            device=self.device,
            runtime=self.runtime,
            folder=folder,
            report=self.report(stage.name),
        )
        history = fit(training)
        self.tokenizer(stage).save_pretrained(folder / "model")  # unlike ``tokenizer``, never set to truncate
        metrics = asdict(history) | {
            "examples_per_second": history.examples_per_second,
            "wall_seconds": time.monotonic() - started,
            "metrics": history.epochs[history.best - 1],
            "num_params": count_parameters(model),
            "shape": asdict(stage.shape),
        }
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=1))
        remove(folder / CHECKPOINT)

    def _model(self, stage: Stage, vocab_size: int) -> Any:
        model = stage.config.model
        if stage.source is not None:
            model = model.model_copy(update={"source": str(self.build(stage.source) / "model"), "revision": None})
        trained_vocabulary = vocab_size if model.source is None else None
        with torch.device("meta"):
            next_sentence = stage.method().student_needs.next_sentence
        return build(model, stage.config.task, trained_vocabulary, next_sentence)

    def tokenizer(self, stage: Stage) -> Any:
        """The stage's tokenizer, its vocabulary trained first if it is to come from the corpus."""
        if stage.tokenizer != CORPUS:
            return read_tokenizer(stage.tokenizer)
        root = stage
        while root.source is not None:
            root = root.source
        corpus = root.config.corpus
        assert corpus is not None

        def train(folder: Path) -> None:
            train_wordpiece(corpus.texts("train"), corpus.vocab_size, folder)

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

    def _data(self, stage: Stage, tokenizer: Any) -> Data:
        task, corpus = stage.config.task, stage.config.corpus
        if corpus is not None:
            train, held_out = (self.tokens(stage, split, tokenizer) for split in ("train", "validation"))
            seed = stage_seed(stage.config.seed, stage.name)
            return CorpusData(corpus, train, held_out, tokenizer, seed, self.device)
        assert task is not None
        validation = {name: self.tokens(stage, split, tokenizer) for name, split in task.validation.items()}
        return TaskData(task, self.tokens(stage, stage.train_split, tokenizer), validation, self.device)

    def _targets(self, stage: Stage) -> TeacherTargets:
        """Cached or live, whichever fits; both give the same numbers."""
        if stage.teacher is None:
            return NoTeacher()
        task, teacher, needs = stage.config.task, stage.teacher, stage.method().teacher_needs
        assert task is not None
        tokens = self.tokens(stage, stage.train_split)
        size = cache_bytes(needs, teacher.shape, len(tokens))
        cached, why = choose(self.runtime.targets, size, self.store.folder)
        log.info("stage %s: teacher targets %s", stage.name, why)

        def live() -> Live:
            kept = teacher.config.model.model_copy(
                update={
                    "source": str(self.build(teacher) / "model"),
                    "revision": None,
                    "head": "keep",
                    "labels": None,
                }
            )
            return Live(build(kept, task), tokens, needs, self.device)

        if not cached:
            return live()
        folder = self.store.get(targets_spec(stage, needs), lambda folder: Cached.write(folder, live()))
        return Cached(folder, self.device)


def targets_spec(stage: Stage, needs: Needs) -> Spec:
    """Of the cached features of a stage's teacher on its training split."""
    assert stage.teacher is not None
    return {
        "kind": "targets",
        "schema": SCHEMA,
        "teacher": stage.teacher.key,
        "tokens": stage.split_spec(stage.train_split),
        "needs": {"logits": needs.logits, "cls": sorted(needs.cls)},
        "precision": stage.precision,
    }
