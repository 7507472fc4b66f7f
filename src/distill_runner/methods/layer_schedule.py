"""Schedules that supervise layer after layer: progressive and stacked distillation, for methods with layered terms."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field, field_validator
from torch import Tensor

from distill_runner.common.errors import UserError
from distill_runner.common.readings import Reading
from distill_runner.common.schema import Schema
from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import LayeredTerm, LossTerm, Method, Progress
from distill_runner.methods.outputs import Outputs
from distill_runner.models.encoders import EncoderShape
from distill_runner.models.features import FeatureRequest, Features

log = logging.getLogger(__name__)

KEY = ".method.schedule"
Limit = Annotated[int, Field(ge=0)]
Value = TypeVar("Value", int, float)


class LayerSchedule(Schema):
    """Schedule of which student layers are supervised when (internal representations, "How to distill", Algorithm 1).

    The schedule goes through the student layers that any loss term supervises, from the bottom up. It moves on to the
    next layer after an epoch in which the current layer reached its limit, or the watched term fell below the layer's
    threshold. After the last layer only the terms on predictions run: all terms that supervise no layer.

    Args:
        rule: ``pid`` supervises one layer at a time; ``sid`` supervises all layers up to the current one.
        limits: maximum number of epochs of each layer: one number for all layers, or a list. With 0 a layer has no
            epochs of its own; ``sid`` still supervises it together with the layers above it.
        share: fraction of all epochs that is divided evenly among the layers. It is used only without ``limits``.
        thresholds: thresholds for the unweighted mean of the watched term over an epoch: one number for all layers, or
            a list. Algorithm 1 uses the sum over batches instead, which is this mean times the number of batches.
        watch: name of the loss term that is compared with ``thresholds``.
        classification: when the terms on predictions run: ``at_end``, after the last layer (the paper's arrow), or
            ``always``, in every epoch (its plus sign).
        trains: which parameters get gradients. With ``supervised``, the embeddings get none, nor, under ``pid``, the
            layers up to the previous supervised one. After the last layer only the head (pooler and classifier) is
            trained. The paper describes PID so, "only one layer is optimized at a time", and also the end, "only the
            classification layer is trained" (Figure 4). ``all`` restricts the losses but not the gradients, as
            Algorithm 1 does for SID.
    """

    rule: Literal["pid", "sid"]
    limits: list[Limit] | None = None
    share: Annotated[
        float, Reading("six layers take about 40 of 50 epochs in Figure 4", "internal representations, Figure 4")
    ] = Field(0.8, ge=0, le=1)
    thresholds: Annotated[
        list[float] | None, Reading("no thresholds: the paper gives no values", "internal representations, Algorithm 1")
    ] = None
    watch: str = "cos"
    classification: Literal["at_end", "always"] = "at_end"
    trains: Annotated[
        Literal["supervised", "all"],
        Reading("PID and SID each as the paper describes them", "internal representations, How to distill"),
    ] = "all"

    def spec(self) -> dict[str, Any]:
        """Return the options that determine the schedule, as part of a stage's key.

        ``trains`` is left out at its default, ``all``, so that keys from before this option stay valid.
        """
        return self.model_dump(exclude={"trains"} if self.trains == "all" else None)

    @field_validator("limits", "thresholds", mode="before")
    @classmethod
    def _one_for_all(cls, value: Any) -> Any:
        return [value] if isinstance(value, int | float) else value

    def limits_of(self, num_layers: int, num_epochs: int) -> list[int]:
        """Return the maximum number of epochs of each layer. ``share`` leaves an epoch for what follows the layers."""
        if self.limits is None:
            most = num_epochs - (self.classification == "at_end")
            layered = max(0, min(round(self.share * num_epochs), most))
            ends = [layered * number // num_layers for number in range(num_layers + 1)]
            return [end - start for start, end in pairwise(ends)]
        return _spread(self.limits, num_layers)

    def thresholds_of(self, num_layers: int) -> list[float] | None:
        return None if self.thresholds is None else _spread(self.thresholds, num_layers)

    def check(self, num_layers: int, terms: Mapping[str, LossTerm]) -> None:
        """Check that the schedule fits the terms of a method.

        Raises:
            UserError: the schedule does not fit.
        """
        for key, given in (("limits", self.limits), ("thresholds", self.thresholds)):
            if given is not None and len(given) not in (1, num_layers):
                problem = f"has {len(given)} entries, but {num_layers} layers are supervised"
                raise UserError(f"{KEY}.{key}", given, problem, "Give one number for each layer, or one for all.")
        layered = [name for name, term in terms.items() if isinstance(term, LayeredTerm)]
        if len(layered) in (0, len(terms)):
            missing = "reads the predictions" if layered else "supervises layers"
            problem = f"none of the method's terms ({', '.join(terms)}) {missing}"
            raise UserError(f"{KEY}.rule", self.rule, problem, "Without a layer schedule: schedule=all.")
        if self.thresholds is not None and self.watch not in layered:
            problem = "is not a term of the method that supervises layers"
            raise UserError(f"{KEY}.watch", self.watch, problem, f"Known: {', '.join(sorted(layered))}.")

    def check_epochs(self, num_layers: int, num_epochs: int) -> None:
        """Check that the layers leave an epoch for the terms on predictions, where these run only at the end.

        Raises:
            UserError: there is no such epoch, or a single one for the layers and the predictions.
        """
        if self.classification == "always" or self.thresholds is not None:
            return
        remedy = "Raise optim.epochs, or set schedule.classification=always."
        if self.limits is None and self.share and num_epochs == 1:
            problem = f"schedule={self.rule} needs two or more: for the layers, then for the predictions"
            raise UserError(".optim.epochs", 1, problem, remedy)
        if (layered := sum(self.limits_of(num_layers, num_epochs))) >= num_epochs:
            problem = f"{num_layers} layers take {layered} of {num_epochs} epochs and leave none for the predictions"
            raise UserError(f"{KEY}.limits", self.limits, problem, remedy)


def _spread(values: list[Value], count: int) -> list[Value]:
    return values * count if len(values) == 1 else values


class ScheduledMethod(Method):
    """Method that computes only the terms and layers that a ``LayerSchedule`` supervises in the current epoch.

    ``observed`` has ``schedule/layer``: the current layer, or 0 after the last layer, when only terms on predictions
    run.
    """

    def __init__(self, terms: Mapping[str, LossTerm], weights: Mapping[str, float], schedule: LayerSchedule) -> None:
        super().__init__(terms, weights)
        self.schedule = schedule
        self.epoch, self.position, self.since = -1, 0, 0
        """Last epoch begun, index in ``layers`` of its layer, and the epoch in which that layer became current."""
        self.watched, self.examples = torch.zeros((), dtype=torch.float64), 0
        """Sum of the watched term over the epoch's examples so far, and the number of these examples."""

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> "Method":
        super().bind(student, teacher, outputs)
        layered = [term for term in self.active() if isinstance(term, LayeredTerm)]
        self.layers = sorted({j for term in layered for j in term.layers})
        self.schedule.check(len(self.layers), self.by_name())
        self.head = student.num_layers + 1
        student.require(FeatureRequest(first_trained=self._first_trained(0)), "student")
        return self

    def check_epochs(self, num_epochs: int) -> None:
        self.schedule.check_epochs(len(self.layers), num_epochs)

    @property
    def layer(self) -> int:
        """Current layer of the schedule, or 0 after the last layer."""
        return self.layers[self.position] if self.position < len(self.layers) else 0

    def begin_epoch(self, progress: Progress) -> None:
        """Move on if the current layer is done, and supervise the layers of this epoch.

        A second call for the same epoch, after a resume, does not move on again.
        """
        if progress.epoch > self.epoch:
            limits = self.schedule.limits_of(len(self.layers), progress.num_epochs)
            while self.layer and self._is_through(limits[self.position], progress.epoch):
                log.info("layer %d: finished after %d epochs", self.layer, progress.epoch - self.since)
                self.position, self.since = self.position + 1, progress.epoch
            self.epoch = progress.epoch
            self.watched, self.examples = torch.zeros_like(self.watched), 0
        first = self.position if self.schedule.rule == "pid" else 0
        supervised = self.layers[first : self.position + 1] if self.layer else []
        for term in self.active():
            if isinstance(term, LayeredTerm):
                term.supervise(supervised)
        student, teacher = self.union(self.running().values())
        self.needs = replace(student, first_trained=self._first_trained(first)), teacher

    def _first_trained(self, first: int) -> int:
        """Return the lowest layer that gets gradients; 0 includes the embeddings, and ``self.head`` is the head alone.

        Args:
            first: index in ``layers`` of the lowest supervised layer.
        """
        if self.schedule.trains == "all":
            return 0
        if not self.layer:
            return self.head
        return self.layers[first - 1] + 1 if first else 1

    def _is_through(self, limit: int, epoch: int) -> bool:
        if epoch - self.since >= limit:
            return True
        thresholds = self.schedule.thresholds_of(len(self.layers))
        if thresholds is None or epoch == self.since:
            return False
        return self.watched.item() < thresholds[self.position] * self.examples

    def running(self) -> dict[str, LossTerm]:
        predictions = not self.layer or self.schedule.classification == "always"
        return {
            name: term
            for name, term in self.by_name().items()
            if (bool(term.supervised) if isinstance(term, LayeredTerm) else predictions)
        }

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        means = super().forward(student, teacher, batch, progress)
        self.current = torch.full((), self.layer, device=next(iter(means.values())).device)
        return means

    def end_update(self, means: Mapping[str, Tensor], num_examples: int) -> None:
        if self.schedule.thresholds is not None and (mean := means.get(self.schedule.watch)) is not None:
            self.watched = self.watched + mean.double() * num_examples
            self.examples += num_examples

    def observed(self) -> dict[str, Tensor]:
        return super().observed() | {"schedule/layer": self.current}

    def get_extra_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATE}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        for name in STATE:
            setattr(self, name, state[name])


STATE = ("epoch", "position", "since", "watched", "examples")
