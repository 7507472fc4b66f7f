"""Stages: what determines each, and what it needs. ``resolving`` makes them of a configuration."""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.metadata import version
from itertools import chain
from typing import Any, Literal

import torch

from distill_runner.datasets.reading.dataset import Dataset
from distill_runner.datasets.reading.tables import on_hub
from distill_runner.methods.base import Method
from distill_runner.methods.outputs import Classes, Outputs
from distill_runner.models.config import ModelConfig
from distill_runner.models.encoders import EncoderShape
from distill_runner.models.features import FeatureRequest
from distill_runner.models.head import LANGUAGE_MODEL, PRE_TRAINING, Head
from distill_runner.models.sources import commit, fresh_architecture, is_on_hub, source_fingerprint
from distill_runner.pipeline.config import StageConfig
from distill_runner.pipeline.store import Spec, key_of
from distill_runner.training.teachers import why_live

SCHEMA = 3
"""Raised when the meaning of an artifact changes; everything is then built again."""
STAGE, CORPUS, TRANSFER = "stage:", "corpus", "transfer"


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage with everything upstream resolved.

    ``source`` is the stage whose model it starts from and ``teacher`` the one it learns from, if any. ``tokenizer``
    is a source as in ``ModelConfig``, never a stage, or the name ``corpus``; None where there is no text. ``route`` is,
    for each of its epochs, the epochs that the teacher it learns from has behind it; None to learn from the model that
    the teacher yields.
    """

    name: str
    config: StageConfig
    shape: EncoderShape
    tokenizer: str | None
    source: "Stage | None"
    teacher: "Stage | None"
    precision: str
    route: tuple[int, ...] | None = None
    members: tuple["Stage", ...] = ()
    """Of an ensemble, whose predictions are the mean of theirs."""

    @property
    def outputs(self) -> Outputs:
        """What the outputs of its model's head mean."""
        return self.config.task.outputs if self.config.task else Classes()

    @property
    def head(self) -> Head:
        """What its model has on top."""
        if self.config.task is not None:
            return self.config.task.head
        return PRE_TRAINING if self.needs[0].next_sentence else LANGUAGE_MODEL

    @property
    def root(self) -> "Stage":
        """The first stage of this line, whose model does not come from another one."""
        return self.source.root if self.source else self

    @property
    def upstream(self) -> list["Stage"]:
        return [stage for stage in (self.source, self.teacher, *self.members) if stage]

    @property
    def all_upstream(self) -> list["Stage"]:
        """All that it needs, the nearest first, each once."""
        every = [stage for near in self.upstream for stage in (near, *near.all_upstream)]
        return list({id(stage): stage for stage in every}.values())

    @cached_property
    def data_spec(self) -> dict[str, Any]:
        if self.config.corpus is not None:
            of_masks = () if self.is_masked else ("mask_probability", "whole_word")
            return {key: value for key, value in self.config.corpus.spec().items() if key not in of_masks}
        assert self.config.task is not None
        return self.config.task.spec() | ({"transfer": self.config.transfer.spec()} if self.config.transfer else {})

    @cached_property
    def tokenizer_spec(self) -> dict[str, Any] | None:
        if self.tokenizer is None:
            return None
        if self.tokenizer == CORPUS:
            return self.vocabulary_spec
        return {"content": source_fingerprint(self.tokenizer)}

    @cached_property
    def vocabulary_spec(self) -> dict[str, Any]:
        """Of a vocabulary trained on the corpus of the first stage of this line."""
        root = self.root
        read = ("version", "parts", "hold_out", "vocab_size")
        return {"kind": "vocabulary", "schema": SCHEMA, "corpus": {key: root.data_spec[key] for key in read}}

    @cached_property
    def spec(self) -> dict[str, Any]:
        """Everything that determines what the stage yields, and nothing else."""
        if self.config.given is not None:
            what = {"kind": self.config.given.kind, "schema": SCHEMA, "data": self.data_spec}
            members = [key_of(member.spec) for member in self.members]
            return what | ({"members": members, "weights": self.config.given.shares} if members else {})
        model = self.config.model
        source = {"upstream": key_of(self.source.spec)} if self.source else _source_spec(model)
        share = {"share": self.share} if self.share < 1 else {}
        return (
            share
            | {
                "kind": "stage",
                "schema": SCHEMA,
                "stage": self.name,
                "seed": self.config.seed,
                "data": self.data_spec,
                "tokenizer": self.tokenizer_spec,
                "model": {**model.model_dump(exclude={"source", "tokenizer"}), **source},
                "method": self.config.method.spec(self.outputs),
                "teacher": key_of(self.teacher.spec) if self.teacher else None,
                "optim": self.config.optim.model_dump(mode="json"),
                "select": self.config.select,
                "precision": self.precision,
                "versions": {name: _major(name) for name in ("torch", "transformers")},
            }
            | ({"route": self.route} if self.route else {})
            | ({"views": self.views} if self.views else {})
        )

    @property
    def key(self) -> str:
        return key_of(self.spec)

    @property
    def first_teacher(self) -> "Stage | None":
        """The teacher that all goes back to: an assistant's own, or that of the phase this stage goes on from."""
        if self.teacher is not None:
            return self.teacher.first_teacher or self.teacher
        return self.source.first_teacher if self.source else None

    @property
    def has_head(self) -> bool:
        """Whether its head has been trained, here or before."""
        if self.config.given is not None:
            return bool(self.members)
        return self.config.optim.epochs != 0 or self.config.model.head == "keep"

    @property
    def has_columns(self) -> bool:
        """Whether its predictions are columns of the data."""
        return self.config.given is not None and not self.members

    @property
    def followed(self) -> list[int | None]:
        """The checkpoints of the teacher that this stage reads; None is the model that the teacher yields."""
        return [*sorted(set(self.route))] if self.route else [None]

    @property
    def hub_commits(self) -> dict[str, str]:
        """The commit of each model and data set of the hub that it reads, here or in the stages that it needs."""
        config, found = self.config, dict[str, str]()
        for upstream in self.upstream:
            found |= upstream.hub_commits
        for source in (config.model.source, self.tokenizer):
            if source and source != CORPUS and not source.startswith(STAGE) and is_on_hub(source):
                found[source] = commit(source).sha
        parts = [mixture.parts.values() for mixture in (config.corpus, config.transfer) if mixture]
        data: list[Dataset] = [*filter(None, [config.task]), *chain(*parts)]
        return found | {entry.dataset: sha for entry in data if (sha := on_hub(entry))}

    @property
    def checkpoints_spec(self) -> Spec:
        """Of the model after each epoch, beside what the stage yields."""
        return {"kind": "checkpoints", "schema": SCHEMA, "stage": self.key}

    def describe(self) -> str:
        """Data, sizes, origin and terms in a few words."""
        config = self.config
        data = config.task.name if config.task else f"corpus {config.corpus.name}" if config.corpus else ""
        data += f" on {config.transfer.name}" if config.transfer else ""
        if config.given is not None:
            of = ", ".join(config.given.sources)
            return f"{data}: {f'mean of {of}' if of else 'columns of the data'}"
        origin = self.source.name if self.source else config.model.source or "fresh"
        terms = ", ".join(config.method.terms)
        return f"{data}: {self.shape.num_layers} layers x {self.shape.width} from {origin}; {terms or 'as it is'}"

    @property
    def train_split(self) -> str:
        """The split to train on; ``TRANSFER`` stands for the transfer set."""
        if self.config.transfer:
            return TRANSFER
        return self.config.task.train if self.config.task else "train"

    @property
    def reads_text(self) -> bool:
        """Whether it is of a corpus, and not of a task."""
        return self.config.corpus is not None

    @cached_property
    def unbound(self) -> Method:
        """The stage's method before it knows the models: what it reads of labels and of a teacher."""
        return self.config.method.make()

    @property
    def is_masked(self) -> bool:
        """Whether its text has labels: tokens that are hidden, and whether sentences follow each other."""
        return self.reads_text and bool(self.unbound.reads_labels())

    @property
    def is_judged(self) -> bool:
        """Whether there is something to judge its model by."""
        return self.is_masked or not self.reads_text

    @property
    def share(self) -> float:
        """Of the training examples that are used; a transfer set is cut by its own ``size`` alone."""
        return 1.0 if self.config.transfer else self.config.share

    @property
    def views(self) -> int | None:
        """How many fixed pictures of each example a teacher sees; None where each epoch has its own."""
        return self.config.views if self.teacher else None

    def why_live(self, mode: Literal["auto", "cached", "live"]) -> str | None:
        """Why the teacher's outputs cannot be cached; None if they can."""
        task = self.config.task
        endless = task is not None and task.is_endless(self.views)
        return why_live(mode, self.needs[1], text=self.reads_text, endless=endless)

    @property
    def labels(self) -> frozenset[str]:
        """What the training batches have of their own to learn from."""
        if self.config.transfer:
            return frozenset()
        paired = self.config.corpus is not None and self.config.corpus.examples == "pairs"
        return frozenset({"labels", "is_next"} if paired else {"labels"})

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
            "data": {key: value for key, value in self.data_spec.items() if key in read},
            "split": split,
            "tokenizer": self.tokenizer_spec,
        }

    @cached_property
    def needs(self) -> tuple[FeatureRequest, FeatureRequest]:
        """What the method reads of the student and of the teacher, told without drawing or holding a parameter."""
        with torch.device("meta"):
            return self.method().needs

    def targets_spec(self, checkpoint: int | None) -> Spec:
        """Of the cached features of the teacher, or of one of its checkpoints, on the training split."""
        assert self.teacher is not None
        assert self.config.task is not None
        _, needs = self.needs
        return {
            "kind": "targets",
            "schema": SCHEMA,
            "layout": "by example",
            "teacher": self.teacher.key,
            "tokens": self.read_by(self.teacher).split_spec(self.train_split),
            "needs": {"logits": needs.logits, "cls": sorted(needs.cls)},
            "precision": self.precision,
            **({"checkpoint": checkpoint} if checkpoint is not None else {}),
            **({"shown": {**shown, "views": self.views}} if (shown := self.config.task.shown) else {}),
        }

    def read_by(self, teacher: "Stage") -> "Stage":
        """This stage with its data tokenised for a teacher."""
        same = teacher.config.given is not None or teacher.tokenizer == self.tokenizer
        return self if same else replace(self, tokenizer=teacher.tokenizer)

    def method(self, student: EncoderShape | None = None) -> Method:
        """The stage's method, bound to its models; new parameters are drawn from torch's global generator."""
        return self.config.method.make().bind(
            student or self.shape, self.teacher.shape if self.teacher else None, self.outputs
        )


@cache
def _major(package: str) -> str:
    """Asked of its files: once."""
    return version(package).split(".")[0]


def _source_spec(model: ModelConfig) -> dict[str, Any]:
    if model.source:
        return {"content": source_fingerprint(model.source)}
    # However its depth is given: models that are the same are pre-trained once.
    return {"architecture": fresh_architecture(model), "num_layers": None} if model.num_layers else {}
