"""How a stage is trained, and where it is computed."""

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, ValidationInfo, field_validator, model_serializer

from distill_runner.common.schema import Schema

MANY = 10**6
"""More examples at once, or epochs, than anyone means."""
USUAL = {"bucketing": False, "decay": "matrices", "patience": None}
"""What goes without saying in keys and results."""
Share = Annotated[float, Field(ge=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]


class Optim(Schema):
    """How weights are updated.

    Args:
        batch_size: examples of one update, over all ``accumulation`` passes that it is made of.
        bucketing: make batches of examples of similar lengths: less padding, and other batches than the papers'.
        epochs: 0 evaluates the model as it is; None leaves the end to ``max_steps``.
        max_steps: ends training earlier; the schedule then spans these steps.
        schedule: of the learning rate behind its warm-up: ``linear`` and ``cosine`` fall to 0, ``steps`` multiplies by
            ``drop`` at each of ``milestones``, shares of all steps.
        warmup: share of the steps in which the learning rate rises from 0.
        weight_decay: AdamW takes it off the weights; SGD and Adam add it to the gradient (L2), as ``torch`` does.
        decay: what is decayed: ``matrices`` leaves out biases and normalisation, as in BERT's recipe; ``all`` does not,
            as in the recipes for CIFAR (He et al. 2015).
        momentum, nesterov: of ``sgd``; torch's form, in which the learning rate multiplies the whole average.
        clip: largest norm of the gradient, which is then logged as ``gradient_norm``; None for no limit.
        patience: stop after so many epochs without a better score, which ``select=best`` keeps; None trains on. The
            schedule of the learning rate is that of all epochs, as with the ``Trainer`` of ``transformers``.
    """

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: float = Field(gt=0)
    batch_size: int = Field(ge=1, le=MANY)
    accumulation: int = Field(1, ge=1, le=MANY)
    bucketing: bool = False
    epochs: int | None = Field(ge=0, le=MANY)
    max_steps: int | None = Field(None, ge=1, validate_default=True)
    schedule: Literal["linear", "constant", "cosine", "steps"] = "linear"
    milestones: tuple[Share, ...] = (0.5, 0.75)
    drop: float = Field(0.1, gt=0, le=1)
    warmup: float = Field(0.1, ge=0, le=1)
    weight_decay: float = Field(0.01, ge=0)
    decay: Literal["matrices", "all"] = "matrices"
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = False
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0, le=1)
    clip: float | None = Field(1.0, gt=0)
    patience: int | None = Field(None, ge=1)

    @field_validator("max_steps")
    @classmethod
    def _ends(cls, max_steps: int | None, before: ValidationInfo) -> int | None:
        if max_steps is None and before.data.get("epochs", 0) is None:
            raise ValueError("needs a value where epochs is null")
        return max_steps

    @model_serializer(mode="wrap")
    def _without_the_usual(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """In keys and in results: batches drawn from all examples go without saying, and so does what is not read."""
        unread = {"milestones", "drop"} if self.schedule != "steps" else set[str]()
        unread |= {"betas", "eps"} if self.name == "sgd" else {"momentum", "nesterov"}
        unread |= {key for key, usual in USUAL.items() if getattr(self, key) == usual}
        return {key: value for key, value in dump(self).items() if key not in unread}

    @field_validator("milestones")
    @classmethod
    def _in_order(cls, milestones: tuple[float, ...]) -> tuple[float, ...]:
        if list(milestones) != sorted(milestones) or not all(0 < milestone < 1 for milestone in milestones):
            raise ValueError("must be rising shares of the steps, such as 0.5,0.75")
        return milestones

    @field_validator("nesterov")
    @classmethod
    def _looks_ahead(cls, nesterov: bool, before: ValidationInfo) -> bool:
        if nesterov and not before.data.get("momentum"):
            raise ValueError("needs a momentum")
        return nesterov

    @property
    def decay_is_decoupled(self) -> bool:
        """Whether weights without gradient are scaled and nothing else."""
        return self.name == "adamw" or not self.weight_decay

    def num_steps(self, per_epoch: int) -> int:
        """EpochsPerStep in all, with ``per_epoch`` of them in an epoch."""
        bounds = (self.max_steps, None if self.epochs is None else self.epochs * per_epoch)
        return min(bound for bound in bounds if bound is not None)


class Runtime(Schema):
    """What does not change the result, apart from ``precision``.

    Args:
        num_processes: that share each update, on the CPU or with a GPU each.
        workers_per_gpu: runs that share a GPU under ``device: auto``; one more waits. They take the emptiest GPU first.
            One small model alone leaves most of a GPU idle, as the host cannot start kernels fast enough.
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
    num_processes: int = Field(1, ge=1, le=256)
    workers_per_gpu: int = Field(4, ge=1, le=256)
    precision: Precision = "fp32"
    targets: Literal["auto", "cached", "live"] = "auto"
    targets_only: bool = False
    threads: int | None = Field(None, ge=1, le=1024)
    gradient_checkpointing: bool = False
    checkpoint_minutes: float = Field(5, gt=0)
    pause_after: int | None = Field(None, ge=1)
    checkpoint_steps: int | None = Field(None, ge=1)
    log_every: int = Field(10, ge=1)
