"""Stages: what determines each, and what it needs of others. ``resolving`` makes them of a configuration."""

from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any

import torch

from distill_runner.methods.base import Method
from distill_runner.methods.outputs import Classes, Outputs
from distill_runner.models.config import ModelConfig
from distill_runner.models.encoders import EncoderShape
from distill_runner.models.features import FeatureRequest
from distill_runner.models.head import LANGUAGE_MODEL, PRE_TRAINING, Head
from distill_runner.models.source_config import fresh_architecture
from distill_runner.models.sources import source_fingerprint
from distill_runner.pipeline.config import StageConfig
from distill_runner.pipeline.stage_data import SCHEMA, StageData
from distill_runner.pipeline.store import Spec, key_of

STAGE = "stage:"


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

    @cached_property
    def data(self) -> StageData:
        """What it reads."""
        first = self.root.data if self.source else None
        return StageData(self.config, self.tokenizer, first, self.teacher is not None)

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
    def spec(self) -> dict[str, Any]:
        """Everything that determines what the stage yields, and nothing else."""
        if self.config.given is not None:
            what = {"kind": self.config.given.kind, "schema": SCHEMA, "data": self.data.spec}
            members = [key_of(member.spec) for member in self.members]
            return what | ({"members": members, "weights": self.config.given.shares} if members else {})
        model = self.config.model
        source = {"upstream": key_of(self.source.spec)} if self.source else _source_spec(model)
        share = {"share": self.data.share} if self.data.share < 1 else {}
        return (
            share
            | {
                "kind": "stage",
                "schema": SCHEMA,
                "stage": self.name,
                "seed": self.config.seed,
                "data": self.data.spec,
                "tokenizer": self.data.tokenizer_spec,
                "model": {**model.model_dump(exclude={"source", "tokenizer"}), **source},
                "method": self.config.method.spec(self.outputs),
                "teacher": key_of(self.teacher.spec) if self.teacher else None,
                "optim": self.config.optim.model_dump(mode="json"),
                "select": self.config.select,
                "precision": self.precision,
                "versions": {name: _major(name) for name in ("torch", "transformers")},
            }
            | ({"route": self.route} if self.route else {})
            | ({"views": self.data.views} if self.data.views else {})
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
    def checkpoints_spec(self) -> Spec:
        """Of the model after each epoch, beside what the stage yields."""
        return {"kind": "checkpoints", "schema": SCHEMA, "stage": self.key}

    @cached_property
    def needs(self) -> tuple[FeatureRequest, FeatureRequest]:
        """What the method reads of the student and of the teacher, told without drawing or holding a parameter."""
        with torch.device("meta"):
            return self.method().needs

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
