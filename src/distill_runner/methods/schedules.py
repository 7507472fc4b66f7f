"""What changes from epoch to epoch: supervised layers, the checkpoints of a teacher, and temperatures."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field, field_validator
from torch import Tensor

from distill_runner.common.errors import UserError, override, quantity, require_choice
from distill_runner.common.schema import Assumption, Schema
from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import LayeredTerm, LossTerm, Method, Progress
from distill_runner.methods.outputs import Outputs
from distill_runner.models.features import EncoderShape, FeatureRequest, Features

log = logging.getLogger(__name__)

_KEY = ".method.schedule"
Limit = Annotated[int, Field(ge=0)]


class LayerSchedule(Schema):
    """Schedule of which student layers are supervised when (internal representations, "How to distill", Algorithm 1).

    The schedule goes through the student layers that any loss term supervises, from the bottom up. It moves on to the
    next layer after an epoch in which the current layer reached its limit, or the watched term fell below the layer's
    threshold. After the last layer only the terms on predictions run: all terms that supervise no layer.

    Args:
        rule: ``pid`` supervises one layer at a time; ``sid`` supervises all layers up to the current one; ``together``
            supervises all layers at once, as a single step. It is the control of the other two: it differs from
            ``sid`` in nothing but the order of the layers.
        limits: maximum number of epochs of each layer: one number for all layers, or a list. With 0 a layer has no
            epochs of its own; ``sid`` still supervises it together with the layers above it. ``together`` takes one
            number, for all layers together.
        share: fraction of all epochs that is divided evenly among the layers. It is used only without ``limits``.
        thresholds: thresholds for the unweighted mean of the watched term over an epoch: one number for all layers, or
            a list. Algorithm 1 uses the sum over batches instead, which is this mean times the number of batches.
        watch: name of the loss term that is compared with ``thresholds``.
        classification: when the terms on predictions run: ``at_end``, after the last layer (the paper's arrow), or
            ``always``, in every epoch (its plus sign).
        trains: which parameters get gradients up to the last layer. With ``supervised``, the embeddings get none, nor,
            under ``pid``, the layers up to the previous supervised one: "only one layer is optimized at a time".
            ``all`` restricts the losses but not the gradients, as Algorithm 1 does for SID.
        trains_at_end: which parameters get gradients after the last layer: the ``head`` (pooler and classifier), or
            ``all``.
    """

    rule: Literal["pid", "sid", "together"]
    limits: list[Limit] | None = None
    share: Annotated[
        float,
        Assumption("six layers take about 40 of 50 epochs in Figure 4", "internal representations, Figure 4", 0.8),
    ] = Field(0.8, ge=0, le=1)
    thresholds: Annotated[
        list[float] | None,
        Assumption("no thresholds: the paper gives no values", "internal representations, Algorithm 1", None),
    ] = None
    watch: str = "cos"
    classification: Literal["at_end", "always"] = "at_end"
    trains: Annotated[
        Literal["supervised", "all"],
        Assumption(
            'PID is described as supervised ("one layer at a time"), SID as all (Algorithm 1 freezes nothing)',
            "internal representations, How to distill",
        ),
    ] = "all"
    trains_at_end: Annotated[
        Literal["head", "all"],
        Assumption(
            'Figure 4 says head ("only the classification layer is trained"); Algorithm 1 updates all weights',
            "internal representations, Figure 4",
        ),
    ] = "head"

    @field_validator("limits", "thresholds", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, int | float) else value

    def num_steps(self, num_layers: int) -> int:
        """Return the number of steps: one for each supervised layer, or a single one for all layers together."""
        return min(num_layers, 1) if self.rule == "together" else num_layers

    def step_limits(self, num_layers: int, num_epochs: int) -> list[int]:
        """Return the maximum number of epochs of each step. ``share`` leaves an epoch for what follows the layers."""
        num_steps = self.num_steps(num_layers)
        if self.limits is None:
            layered = max(0, min(round(self.share * num_epochs), num_epochs - (self.classification == "at_end")))
            ends = [layered * number // num_steps for number in range(num_steps + 1)]
            return [end - start for start, end in pairwise(ends)]
        return self.limits * num_steps if len(self.limits) == 1 else self.limits

    def check(self, num_layers: int, terms: Mapping[str, LossTerm]) -> None:
        """Check that the schedule fits the terms of a method.

        Raises:
            UserError: the schedule does not fit.
        """
        for key, values in (("limits", self.limits), ("thresholds", self.thresholds)):
            if values is not None and len(values) not in (1, num_steps := self.num_steps(num_layers)):
                layers = f"{num_layers} layers are supervised" + (" together" if num_steps < num_layers else "")
                problem = f"has {len(values)} entries, but {layers}"
                raise UserError(f"{_KEY}.{key}", values, problem, "Give one number for each layer, or one for all.")
        layered = [name for name, term in terms.items() if isinstance(term, LayeredTerm)]
        if len(layered) in (0, len(terms)):
            missing = "reads the predictions" if layered else "supervises layers"
            problem = f"none of the method's terms ({', '.join(terms)}) {missing}"
            raise UserError(f"{_KEY}.rule", self.rule, problem, "Without one: " + override("schedule", "all"))
        if self.thresholds is not None:
            require_choice(f"{_KEY}.watch", self.watch, layered, "is not a term of the method that supervises layers")

    def check_epochs(self, num_layers: int, num_epochs: int) -> None:
        """Check that the layers leave an epoch for the terms on predictions, where these run only at the end.

        A layer without an epoch of its own is told, in ``pid``, where no other epoch supervises it.

        Raises:
            UserError: there is no such epoch, or a single one for the layers and the predictions.
        """
        limits = self.step_limits(num_layers, num_epochs)
        if self.rule == "pid" and self.limits is None and min(limits) == 0 < max(limits):
            shares = f"{sum(limits)} of {num_epochs} epochs to {num_layers} layers"
            log.warning("schedule=pid gives %s, one at a time: some layers are never supervised", shares)
        if self.classification == "always" or self.thresholds is not None:
            return
        remedy = "Raise optim.epochs, or set " + override("schedule.classification", "always") + "."
        if self.limits is None and self.share and num_epochs == 1:
            problem = f"schedule={self.rule} needs two or more: for the layers, then for the predictions"
            raise UserError(".optim.epochs", 1, problem, remedy)
        if (layered := sum(self.step_limits(num_layers, num_epochs))) >= num_epochs:
            problem = f"{num_layers} layers take {layered} of {num_epochs} epochs and leave none for the predictions"
            raise UserError(f"{_KEY}.limits", self.limits, problem, remedy)


@dataclass
class ScheduleState:
    """Position in a layer schedule, saved with checkpoints.

    Attributes:
        epoch: last epoch begun; -1 before the first.
        position: index of the current step: of the current layer among the supervised layers.
        first_epoch: epoch in which the current step began.
        watched_sum: sum of the watched term over the epoch's examples so far.
        num_examples: number of these examples.
    """

    epoch: int = -1
    position: int = 0
    first_epoch: int = 0
    watched_sum: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64, device="cpu"))
    num_examples: int = 0


class ScheduledMethod(Method):
    """Method that computes only the terms and layers that a ``LayerSchedule`` supervises in the current epoch.

    ``diagnostics`` has ``schedule/layer``: the current layer, or 0 after the last layer, when only terms on predictions
    run.
    """

    def __init__(self, terms: Mapping[str, LossTerm], weights: Mapping[str, float], schedule: LayerSchedule) -> None:
        super().__init__(terms, weights)
        self.schedule, self.state = schedule, ScheduleState()

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> "Method":
        super().bind(student, teacher, outputs)
        self.layers = self.supervised_layers()
        self.schedule.check(len(self.layers), self.named_terms())
        self.head = student.num_layers + 1
        at_end = self.head if self.schedule.trains_at_end == "head" else 0
        student.require(FeatureRequest(first_trained=max(self._first_trained(0), at_end)), "student")
        return self

    @property
    def layer(self) -> int:
        """Current layer of the schedule, the highest one that it supervises; 0 after the last layer."""
        if self.state.position >= self.schedule.num_steps(len(self.layers)):
            return 0
        return self.layers[-1 if self.schedule.rule == "together" else self.state.position]

    def begin_epoch(self, progress: Progress) -> None:
        """Move on if the current layer is done, and supervise the layers of this epoch.

        A second call for the same epoch, after a resume, does not move on again.
        """
        super().begin_epoch(progress)
        state = self.state
        if progress.epoch > state.epoch:
            limits = self.schedule.step_limits(len(self.layers), progress.num_epochs)
            while self.layer and self._is_done(limits[state.position], progress.epoch):
                log.info("layer %d: finished after %d epochs", self.layer, progress.epoch - state.first_epoch)
                state.position, state.first_epoch = state.position + 1, progress.epoch
            state.epoch = progress.epoch
            state.watched_sum, state.num_examples = torch.zeros_like(state.watched_sum), 0
        lowest = state.position if self.schedule.rule == "pid" else 0
        current_layers = [layer for layer in self.layers[lowest:] if layer <= self.layer]
        for term in self.named_terms().values():
            if isinstance(term, LayeredTerm):
                term.supervise(current_layers)
        student, self.teacher_needs = self.combined_needs(self.current_terms().values())
        self.student_needs = replace(student, first_trained=self._first_trained(lowest))

    def _first_trained(self, lowest: int) -> int:
        """Return the lowest layer that gets gradients; 0 includes the embeddings, and ``self.head`` is the head alone.

        Args:
            lowest: index in ``layers`` of the lowest supervised layer.
        """
        if not self.layer:
            return self.head if self.schedule.trains_at_end == "head" else 0
        if self.schedule.trains == "all":
            return 0
        return self.layers[lowest - 1] + 1 if lowest else 1

    def _is_done(self, limit: int, epoch: int) -> bool:
        state, thresholds = self.state, self.schedule.thresholds
        if epoch - state.first_epoch >= limit:
            return True
        if thresholds is None or epoch == state.first_epoch:
            return False
        threshold = thresholds[0] if len(thresholds) == 1 else thresholds[state.position]
        return state.watched_sum.item() < threshold * state.num_examples

    def current_terms(self) -> dict[str, LossTerm]:
        predictions = not self.layer or self.schedule.classification == "always"
        return {
            name: term
            for name, term in self.named_terms().items()
            if (bool(term.current_layers) if isinstance(term, LayeredTerm) else predictions)
        }

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        means = super().forward(student, teacher, batch, progress)
        self.logged_layer = torch.full((), self.layer, device=next(iter(means.values())).device)
        return means

    def end_update(self, means: Mapping[str, Tensor], num_examples: int) -> None:
        if self.schedule.thresholds is not None and (mean := means.get(self.schedule.watch)) is not None:
            self.state.watched_sum = self.state.watched_sum + mean.double() * num_examples
            self.state.num_examples += num_examples

    def diagnostics(self) -> dict[str, Tensor]:
        return super().diagnostics() | {"schedule/layer": self.logged_layer}

    def get_extra_state(self) -> dict[str, Any]:
        return dict(vars(self.state))

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.state = ScheduleState(**state)


# Routes and temperatures

Item = TypeVar("Item")


class EpochsPerStep(Schema):
    """Number of epochs that each of several consecutive steps takes.

    Args:
        epochs: number of epochs of every step, or a list with one number per step: n_i of Pro-KD, section 4. None
            divides the student's epochs evenly; the remainder goes to the last step, as in the code of Annealing-KD.
        warmup: number of additional epochs of the first step.
    """

    epochs: Annotated[
        int | list[int] | None, Assumption("n_i of section 4 is the increment factor of section 5.2", "Pro-KD 5.2")
    ] = None
    warmup: Annotated[
        int,
        Assumption('"warm-up epochs" are additional epochs of the first step', "Pro-KD 5.2"),
    ] = Field(0, ge=0)

    def spread(self, items: Sequence[Item], num_epochs: int) -> list[Item]:
        """Return the item of each epoch; the list is as long as the steps together.

        Args:
            items: one item per step.
            num_epochs: number of epochs to divide among the steps; used only where ``epochs`` is None.
        Raises:
            UserError: ``epochs`` is a list of another length than ``items``, or a step takes no epoch.
        """
        count = len(items)
        if self.epochs is None:
            equal = max(1, (num_epochs - self.warmup) // count)
            lengths = [*[equal] * (count - 1), equal + max(0, num_epochs - self.warmup - equal * count)]
        else:
            lengths = list(self.epochs) if isinstance(self.epochs, list) else [self.epochs] * count
        if len(lengths) != count:
            raise UserError(".epochs", self.epochs, f"has {len(lengths)} numbers for {count} steps")
        if min(lengths) < 1:
            raise UserError(".epochs", self.epochs, "each step needs at least 1 epoch")
        lengths = [lengths[0] + self.warmup, *lengths[1:]]
        return [item for item, length in zip(items, lengths, strict=True) for _ in range(length)]


class CheckpointSchedule(EpochsPerStep):
    """Which checkpoints of its teacher a student follows, and for how many epochs each.

    Args:
        checkpoints: epochs of the teacher, counted from 1, in the order in which the student follows their checkpoints:
            the anchors of RCO (Jin et al. 2019). By default the student follows every epoch, as in Pro-KD.
        moment: whether the checkpoint of an epoch is the teacher at its ``end`` or at its ``beginning``. Pro-KD's Eqs.
            2 and 3 take theta(i), the parameters "at the beginning of epoch i". With ``beginning``, the checkpoint of
            epoch 1 is a teacher that is not fine-tuned yet. Pro-KD's Figure 1 and Table 1 number each checkpoint by the
            epoch that produced it.
    """

    checkpoints: list[int] | None = Field(None, min_length=1)
    moment: Annotated[
        Literal["end", "beginning"],
        Assumption("Figure 1 and Table 1 say the end of epoch i; Eqs. 2 and 3 say the beginning", "Pro-KD"),
    ] = "end"

    @property
    def variant(self) -> dict[str, int]:
        """What distinguishes a paper's numbers: the checkpoint of a student that follows only one (Pro-KD Table 1)."""
        return {"checkpoint": self.checkpoints[0]} if self.checkpoints and len(self.checkpoints) == 1 else {}

    def epoch_checkpoints(self, teacher_epochs: int, student_epochs: int) -> tuple[int, ...]:
        """Return the checkpoint that each epoch of the student follows.

        A checkpoint is the number of epochs that the teacher had trained; 0 is the teacher before fine-tuning.

        Args:
            teacher_epochs, student_epochs: number of epochs that the teacher and the student train.
        Raises:
            UserError: the teacher has no such epoch, or the steps take more or fewer epochs than the student trains.
        """
        all_epochs = range(1, teacher_epochs + 1)
        checkpoints = self.checkpoints or list(all_epochs)
        if unknown := [epoch for epoch in checkpoints if epoch not in all_epochs]:
            raise UserError(".route.checkpoints", unknown[0], f"the teacher trains {quantity(teacher_epochs, 'epoch')}")
        if not checkpoints:
            raise UserError(".route", None, "the teacher trains for no epoch, so there are no checkpoints to follow")
        try:
            route = self.spread(checkpoints, student_epochs)
        except UserError as error:
            raise error.with_key(f".route{error.key}") from error
        if (num_epochs := len(route)) != student_epochs:
            problem = (
                f"its {len(checkpoints)} checkpoints take {num_epochs} epochs; the student trains {student_epochs}"
            )
            raise UserError(".route", None, problem, "Set route.epochs, route.warmup or the student's epochs.")
        return tuple(epoch - (self.moment == "beginning") for epoch in route)
