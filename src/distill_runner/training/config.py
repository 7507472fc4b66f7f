"""Options for training a stage, and for the hardware it runs on."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, ValidationInfo, field_validator, model_serializer

from distill_runner.common.schema import Schema

MAX_COUNT = 10**6
"""Upper limit for batch size, accumulation and epochs; a larger value must be a mistake."""
MAX_THREADS = 1024
Share = Annotated[float, Field(ge=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]


class Optim(Schema):
    """Optimizer, batches and learning rate schedule of a training run.

    Args:
        name: the optimizer of ``torch`` to use: AdamW, Adam or SGD.
        lr: highest learning rate, reached at the end of the warm-up.
        batch_size: number of examples in one update, over all of its ``accumulation`` passes.
        accumulation: number of forward and backward passes that an update is divided into. More passes need less memory
            and give the same update, up to rounding. Batch normalization, and losses that compare examples
            (``similarities``, ``dist``), read each pass alone. The number is rounded up to a multiple of
            the number of processes.
        bucketing: put examples of similar lengths into one batch. This saves padding, but the batches differ from those
            of the papers.
        epochs: number of passes over the training examples. 0 evaluates the model without training it; None trains for
            ``max_steps``.
        max_steps: maximum number of steps; None for no maximum. If it ends training before ``epochs``, the learning
            rate schedule spans only these steps.
        schedule: learning rate after the warm-up. ``constant`` keeps it, ``linear`` and ``cosine`` decrease it, to be
            0 after the last step, and ``steps`` multiplies it by ``drop`` at each of ``milestones``.
        milestones: shares of all steps, in rising order, at which ``schedule=steps`` changes the learning rate.
        drop: factor of the learning rate at each of ``milestones``.
        warmup: share of the steps over which the learning rate rises from 0.
        weight_decay: strength of weight decay. AdamW shrinks the weights directly; SGD and Adam add an L2 term to the
            gradient, as ``torch`` does.
        decay: parameters that weight decay applies to. ``matrices`` leaves out biases and normalization, as in BERT's
            recipe; ``all`` includes them, as in the recipes for CIFAR (He et al. 2015).
        momentum, nesterov: momentum of ``sgd``, and whether it is Nesterov's. As in torch, the learning rate multiplies
            the whole running average.
        betas: decay rates of the running averages of the gradient and of its square, in ``adamw`` and ``adam``.
        eps: number that ``adamw`` and ``adam`` add to the denominator of an update, so that it is never 0.
        clip: maximum norm of the gradient; None for no limit. With a limit, the norm before clipping is logged as
            ``gradient_norm``, except in fp16.
        patience: stop after this many epochs without a better score; None never stops early. It needs ``select=best``.
            The learning rate schedule still spans all epochs, as with the ``Trainer`` of ``transformers``.
    """

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: float = Field(gt=0)
    batch_size: int = Field(ge=1, le=MAX_COUNT)
    accumulation: int = Field(1, ge=1, le=MAX_COUNT)
    bucketing: bool = False
    epochs: int | None = Field(ge=0, le=MAX_COUNT)
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

    @field_validator("max_steps", "milestones", "nesterov")
    @classmethod
    def _options_fit(cls, value: Any, info: ValidationInfo) -> Any:
        match info.field_name:
            case "max_steps" if value is None and info.data.get("epochs", 0) is None:
                raise ValueError("needs a value if epochs is null")
            case "milestones" if list(value) != sorted(value) or not all(0 < share < 1 for share in value):
                raise ValueError("must be increasing fractions of the steps, such as 0.5,0.75")
            case "nesterov" if value and not info.data.get("momentum"):
                raise ValueError("needs a momentum above 0")
        return value

    @model_serializer(mode="wrap")
    def _only_what_is_read(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Keep out of keys and results what this optimizer and schedule do not read."""
        unread = self.unread_options(self.name, self.schedule)
        return {key: value for key, value in dump(self).items() if key not in unread}

    @staticmethod
    def unread_options(name: str, schedule: str) -> set[str]:
        """Return the options that the optimizer ``name`` and the learning rate's ``schedule`` do not read."""
        unread = {"milestones", "drop"} if schedule != "steps" else set[str]()
        return unread | ({"betas", "eps"} if name == "sgd" else {"momentum", "nesterov"})

    def steps_per_epoch(self, num_examples: int) -> int:
        return math.ceil(num_examples / self.batch_size)

    def num_steps(self, num_examples: int) -> int:
        """Return the number of steps in all epochs of training on ``num_examples`` examples."""
        bounds = (self.max_steps, None if self.epochs is None else self.epochs * self.steps_per_epoch(num_examples))
        return min(bound for bound in bounds if bound is not None)

    def num_epochs(self, num_examples: int) -> int:
        """Return the number of epochs that training on ``num_examples`` examples begins before its steps end."""
        return math.ceil(self.num_steps(num_examples) / self.steps_per_epoch(num_examples))


class Runtime(Schema):
    """Hardware, checkpoints and logging of a run.

    Only ``precision`` is part of a result's key. ``device``, ``graphs`` and several processes of ``torchrun`` change
    results by rounding, and on a GPU by other draws of dropout, as another machine does. Several processes also change
    losses that compare examples, and batch normalization; tables keep such runs apart. Results in the store are not
    made again.

    Args:
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:<number>``. ``auto`` takes a GPU with a free place and waits while
            there is none (``workers_per_gpu``); on a machine without a GPU it takes the CPU. The others never wait.
        workers_per_gpu: number of runs that may share a GPU under ``device: auto``; further runs wait. Runs take the
            emptiest GPU first. With ``graphs`` one run nearly fills a GPU while it trains, but not while it loads.
        precision: precision of matrix products; weights and losses are float32. ``tf32`` and ``fp16`` need a GPU.
        targets: read the teacher's outputs from a cache (``cached``) or run the teacher during training (``live``).
            ``auto`` decides by the size of the cache and the free disk space.
        threads: number of CPU threads of torch in each process. None takes torch's default, or the CPUs that the
            process may use if they are fewer, divided among the processes of ``torchrun`` on the machine.
        gradient_checkpointing: recompute each layer of the trained model in the backward pass instead of keeping its
            activations: less memory, more time, the same numbers.
        graphs: record updates on a GPU as CUDA graphs, and replay them: the GPU then does not wait for Python.
        checkpoint_minutes: largest number of minutes between two checkpoints. The end of an epoch writes one earlier
            if that takes less than a twentieth of the time since the last one, or its model replaces the best.
        pause_after: number of epochs after which the requested stage stops; the same command without this option
            resumes it.
        checkpoint_steps: number of steps between two checkpoints, in addition to ``checkpoint_minutes``; None for no
            checkpoints by steps.
        log_every: number of steps between two lines of metrics.
    """

    device: str = "auto"
    workers_per_gpu: int = Field(2, ge=1, le=256)
    precision: Precision = "fp32"
    targets: Literal["auto", "cached", "live"] = "auto"
    threads: int | None = Field(None, ge=1, le=MAX_THREADS)
    gradient_checkpointing: bool = False
    graphs: bool = True
    checkpoint_minutes: float = Field(5, gt=0)
    pause_after: int | None = Field(None, ge=1)
    checkpoint_steps: int | None = Field(None, ge=1)
    log_every: int = Field(10, ge=1)
