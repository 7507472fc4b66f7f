"""The typed schema of a run."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, ValidationInfo, field_validator, model_serializer

from distill_runner.corpora import Corpus, TransferSet
from distill_runner.errors import UserError
from distill_runner.routes import Route
from distill_runner.schema import Schema
from distill_runner.tasks import Task
from distill_runner.tracking import TrackerConfig

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Init = Literal["first", "group_top", "alternate", "random", "embeddings_only"]


class ModelConfig(Schema):
    """Where a model comes from.

    Args:
        source: a hub id, one with its revision (``<id>@<revision>``), a folder, ``package:<module>/<folder>`` inside an
            installed package, ``stage:<name>`` for what an earlier stage yields, or None for a fresh model of
            ``architecture``.
        tokenizer: as ``source``, or ``corpus`` for a vocabulary trained on the stage's corpus; the source's own by
            default.
        num_layers: keep that many layers; all by default. A model that copies none may have more than its source.
        layers: which of the source's layers are copied (METHODS "Shared terms"): ``first`` (ALP-KD, PKD), ``group_top``
            (internal representations), ``alternate`` (DistilBERT), ``random`` or ``embeddings_only``.
        head: ``new``, or ``keep`` the one of a fine-tuned source, its outputs put in the task's order by name.
        labels: names of a kept head's outputs, for heads that do not say (LABEL_0, ...).
        architecture: configuration of a fresh model, with its ``model_type``.
    """

    source: str | None = None
    tokenizer: str | None = None
    num_layers: int | None = Field(None, ge=1)
    layers: Init = "first"
    head: Literal["new", "keep"] = "new"
    labels: list[str] | None = None
    architecture: dict[str, Any] | None = None

    @property
    def copies_layers(self) -> bool:
        """Whether it takes over layers of a source, of which it then cannot have more."""
        return self.source is not None and self.layers not in ("random", "embeddings_only")


class Optim(Schema):
    """How weights are updated.

    Args:
        batch_size: examples of one update, over all ``accumulation`` passes that it is made of.
        bucketing: make batches of examples of similar lengths: less padding, and other batches than the papers'.
        epochs: 0 evaluates the model as it is; None leaves the end to ``max_steps``.
        max_steps: ends training earlier; the schedule then spans these steps.
        warmup: share of the steps in which the learning rate rises from 0.
        weight_decay: not applied to biases and LayerNorm.
        clip: largest norm of the gradient; None for no limit.
    """

    name: Literal["adamw", "adam"] = "adamw"
    lr: float = Field(gt=0)
    batch_size: int = Field(ge=1)
    accumulation: int = Field(1, ge=1)
    bucketing: bool = False
    epochs: int | None = Field(ge=0)
    max_steps: int | None = Field(None, ge=1, validate_default=True)
    schedule: Literal["linear", "constant"] = "linear"
    warmup: float = Field(0.1, ge=0, le=1)
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    clip: float | None = Field(1.0, gt=0)

    @field_validator("max_steps")
    @classmethod
    def _ends(cls, max_steps: int | None, before: ValidationInfo) -> int | None:
        if max_steps is None and before.data.get("epochs", 0) is None:
            raise ValueError("needs a value where epochs is null")
        return max_steps

    @model_serializer(mode="wrap")
    def _without_the_usual(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Batches drawn from all examples go without saying, in keys and in results."""
        return {key: value for key, value in dump(self).items() if key != "bucketing" or value}

    @property
    def decay_is_decoupled(self) -> bool:
        """Whether weights without gradient are scaled and nothing else."""
        return self.name == "adamw" or not self.weight_decay

    def num_steps(self, per_epoch: int) -> int:
        """Steps in all, with ``per_epoch`` of them in an epoch."""
        bounds = (self.max_steps, None if self.epochs is None else self.epochs * per_epoch)
        return min(bound for bound in bounds if bound is not None)


class Runtime(Schema):
    """What does not change the result, apart from ``precision``.

    Args:
        num_processes: that share each update, on the CPU or with a GPU each.
        workers_per_gpu: runs that share a GPU under ``device: auto``; one more waits.
        targets: read the teacher from a cache or run it live; ``auto`` goes by size and free disk.
        targets_only: cache the outputs of teachers that are in the store, for the stages that read them, and stop.
        threads: of torch on the CPU; torch's own choice by default.
        gradient_checkpointing: compute each layer of a model in training again in the backward pass instead of keeping
            what it needs: less memory, more time, the same numbers.
        checkpoint_minutes: how often an epoch in progress is saved, beside the save at each epoch's end.
        pause_after: epochs after which the stage that is asked for stops; the same command without it goes on.
        checkpoint_steps: save after so many steps as well.
        log_every: steps between two lines of metrics.
    """

    device: str = "auto"
    num_processes: int = Field(1, ge=1)
    workers_per_gpu: int = Field(1, ge=1)
    precision: Precision = "fp32"
    targets: Literal["auto", "cached", "live"] = "auto"
    targets_only: bool = False
    threads: int | None = Field(None, ge=1)
    gradient_checkpointing: bool = False
    checkpoint_minutes: float = Field(5, gt=0)
    pause_after: int | None = Field(None, ge=1)
    checkpoint_steps: int | None = Field(None, ge=1)
    log_every: int = Field(10, ge=1)


class StoreConfig(Schema):
    dir: Path


class StageConfig(Schema):
    """A model fitted on one data set with one method, optionally against the teacher that another stage yields.

    Args:
        route: follow the teacher's checkpoints instead of learning from the model that it ends with.
        keep_checkpoints: keep the model after every epoch. A run that follows them keeps them by itself; this spares
            training the teacher twice where a run that does not comes first. No part of what the stage yields.
        share: of the task's training examples that are used, always the same ones, a smaller share within a larger. Of
            a transfer set none is left out.
        transfer: inputs without labels to train on instead of the task's own; the task still selects and judges.
    """

    task: Task | None = None
    corpus: Corpus | None = None
    transfer: TransferSet | None = None
    model: ModelConfig
    method: dict[str, Any]
    teacher: str | None = None
    route: Route | None = None
    optim: Optim
    select: Literal["best", "last"] = "best"
    keep_checkpoints: bool = False
    seed: int = Field(ge=0)
    share: float = Field(1.0, gt=0, le=1)

    def model_post_init(self, _context: Any) -> None:
        if (self.task is None) == (self.corpus is None):
            raise UserError(
                "stages", None, "a stage has either a task or a corpus", "Set one of them, the other to null."
            )
        if self.share < 1 and self.task is None:
            raise UserError(".share", self.share, "is of a task, and the stage has a corpus")
        if self.transfer is not None and self.task is None:
            raise UserError("transfer", self.transfer.name, "a transfer set needs a task to be judged by")


class TeacherConfig(Schema):
    """The teacher as results name it; the stage ``teacher`` reads the rest of its group by interpolation."""

    name: str
    source: str
    fine_tuned: bool


class RunConfig(Schema):
    """A run: ``stage`` is what is asked for; the others are there for it."""

    teacher: TeacherConfig
    stages: dict[str, StageConfig]
    runtime: Runtime
    store: StoreConfig
    tracker: TrackerConfig
    method: str
    command: str
    seed: int
    stage: str
    plan: bool
