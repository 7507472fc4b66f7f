"""Stages: what determines each one, and which others it needs. ``resolving`` makes them from a configuration."""

from dataclasses import dataclass, replace
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
    """Stage with all upstream stages resolved.

    ``source`` is the stage whose model this stage starts from, and ``teacher`` the stage it learns from; None if there
    is none. ``tokenizer`` is a source as in ``ModelConfig``, never a stage, or the name ``corpus``; None without text,
    and for a stage of predictions. ``route`` names the teacher's checkpoint for each epoch of this stage, by the number
    of epochs that the teacher had trained. A ``route`` of None learns from the model that the teacher yields.
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
    """Members of an ensemble; the ensemble's predictions are the mean of their predictions."""

    @cached_property
    def data(self) -> StageData:
        """Data that the stage reads."""
        first = self.root.data if self.source else None
        return StageData(self.config, self.tokenizer, first, self.teacher is not None)

    @property
    def outputs(self) -> Outputs:
        """Meaning of the outputs of the model's head."""
        return self.config.task.outputs if self.config.task else Classes()

    @property
    def head(self) -> Head:
        """Head of the stage's model."""
        if self.config.task is not None:
            return self.config.task.head
        return PRE_TRAINING if self.needs[0].next_sentence else LANGUAGE_MODEL

    @property
    def root(self) -> "Stage":
        """First stage in the chain of sources; its model comes from no other stage."""
        return self.source.root if self.source else self

    @property
    def upstream(self) -> list["Stage"]:
        return [stage for stage in (self.source, self.teacher, *self.members) if stage]

    @property
    def all_upstream(self) -> list["Stage"]:
        """All stages that this stage needs, directly or indirectly, depth first, each once."""
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
            | ({"teacher_outputs": self.teacher_outputs} if self.teacher_outputs != "float32" else {})
        )

    @cached_property
    def key(self) -> str:
        return key_of(self.spec)

    def with_seed(self, seed: int) -> "Stage":
        """Return this stage with another seed. The members of an ensemble have its seed, so it must not be one."""
        twin = replace(self, config=self.config.model_copy(update={"seed": seed}))
        known = {name: value for name, value in vars(self).items() if name in ("data", "needs")}
        vars(twin).update(known, spec={**self.spec, "seed": seed})
        return twin

    @property
    def first_teacher(self) -> "Stage | None":
        """Original teacher: the one before all assistants, or the teacher of the phase that this stage continues."""
        if self.teacher is not None:
            return self.teacher.first_teacher or self.teacher
        return self.source.first_teacher if self.source else None

    @property
    def has_head(self) -> bool:
        """Whether the head has been trained, in this stage or before."""
        if self.config.given is not None:
            return bool(self.members)
        return self.config.optim.epochs != 0 or self.config.model.head == "keep"

    @property
    def has_columns(self) -> bool:
        """Whether the stage's predictions are columns of the data."""
        return self.config.given is not None and not self.members

    @property
    def followed(self) -> list[int | None]:
        """Checkpoints of the teacher that this stage reads; None stands for the model that the teacher yields."""
        return [*sorted(set(self.route))] if self.route else [None]

    @property
    def teacher_outputs(self) -> str:
        """Precision of the teacher's outputs that the student learns from; float32 where no cache can hold them."""
        if self.teacher is None or self.teacher.has_columns or self.needs[1].of_tokens or self.data.is_endless:
            return "float32"
        return self.config.teacher_outputs

    @property
    def checkpoints_spec(self) -> Spec:
        """Spec of the checkpoints: the model after each epoch, together with all that the stage yields."""
        return {"kind": "checkpoints", "schema": SCHEMA, "stage": self.key}

    @cached_property
    def needs(self) -> tuple[FeatureRequest, FeatureRequest]:
        """Features that the method reads of student and teacher, found without drawing or storing parameters."""
        with torch.device("meta"):
            return self.method().needs

    def method(self, student: EncoderShape | None = None) -> Method:
        """Return the stage's method, bound to its models; new parameters are drawn from torch's global generator."""
        return self.config.method.make().bind(
            student or self.shape, self.teacher.shape if self.teacher else None, self.outputs
        )


@cache
def _major(package: str) -> str:
    """Return the major version of a package; cached, since it is read from the package's files."""
    return version(package).split(".")[0]


def _source_spec(model: ModelConfig) -> dict[str, Any]:
    if model.source:
        return {"content": source_fingerprint(model.source)}
    # The depth counts as part of the architecture: equal models are pre-trained once, however their depth is given.
    return {"architecture": fresh_architecture(model), "num_layers": None} if model.num_layers else {}
