"""Meaning of a head's outputs, with the losses on them; loss terms use it and need not know the type of the task.

Shapes: O outputs per batch with C numbers each. O is the number of examples B if each example has one output.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from distill_runner.common.errors import UserError, override
from distill_runner.datasets.batches import Batch, Unit


def weighted_mean(values_O: Tensor, weights_O: Tensor | None = None) -> Tensor:
    """Return the mean over outputs, or over examples, each times its weight if there are weights.

    It is not divided by the weights of the batch, so that the batches of an update add up to the update's loss.
    """
    return (values_O if weights_O is None else values_O * weights_O.to(values_O)).mean()


def soft_cross_entropy(
    student_OC: Tensor, teacher_OC: Tensor, temperature: float, weights_O: Tensor | None = None
) -> Tensor:
    """Cross entropy between the softmax outputs of teacher and student, both at temperature T (ALP-KD Eq. 2).

    The cross entropy differs from the KL divergence only by the teacher's entropy, so the gradient is the same.
    """
    teacher = functional.softmax(teacher_OC / temperature, dim=-1)
    return -weighted_mean((teacher * functional.log_softmax(student_OC / temperature, dim=-1)).sum(dim=-1), weights_O)


def squared_error(outputs_O1: Tensor, targets_O: Tensor, weights_O: Tensor | None = None) -> Tensor:
    """Squared error of a regression head's single output, (weighted) mean over the outputs."""
    return weighted_mean((outputs_O1.squeeze(-1) - targets_O).square(), weights_O)


class Outputs(ABC):
    """Base of the meanings that a head's outputs can have.

    Attributes:
        unit: unit that the losses are a mean over.
        has_temperature: whether a temperature has an effect on these outputs.
        has_labels: whether examples have labels that the outputs are compared with.
    """

    unit: ClassVar[Unit] = "output"
    has_temperature: ClassVar[bool] = True
    has_labels: ClassVar[bool] = True

    @abstractmethod
    def label_loss(self, logits_OC: Tensor, batch: Batch) -> Tensor:
        """Return the loss against the batch's own labels: a scalar, the mean over ``unit``."""

    @abstractmethod
    def soft_label_loss(self, student_OC: Tensor, teacher_OC: Tensor, batch: Batch, temperature: float) -> Tensor:
        """Return the loss against the teacher's predictions at a temperature: a scalar, the mean over ``unit``."""

    def soft_label_divergence(self, student_OC: Tensor, teacher_OC: Tensor, batch: Batch, temperature: float) -> Tensor:
        """Return ``soft_label_loss`` minus the lowest value that it can have for this teacher."""
        lowest = self.soft_label_loss(teacher_OC, teacher_OC, batch, temperature)
        return self.soft_label_loss(student_OC, teacher_OC, batch, temperature) - lowest

    def num_summed_classes(self, logits_OC: Tensor) -> int:
        """Return the number of classes that ``soft_label_loss`` sums over; 1 if it takes a mean or has no classes."""
        return 1

    def logit_loss(
        self, student_OC: Tensor, target_OC: Tensor, batch: Batch, reduction: Literal["sum", "mean"]
    ) -> Tensor:
        """Return the squared distance between the raw outputs: a scalar, the mean over ``unit``.

        Args:
            reduction: sum or mean over the C numbers of an output.
        """
        error_OC = (student_OC - target_OC).square()
        weights = batch.output_weights
        loss = error_OC.mean() if weights is None else weighted_mean(error_OC.mean(-1), weights)
        return loss * target_OC.shape[-1] if reduction == "sum" else loss

    def ensemble_mean(self, logits: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Return the joint outputs (O, C) of several models: by default their weighted mean.

        Of logits it corresponds to a geometric mean of the probabilities, the usual ensemble of SQuAD models.

        Args:
            logits: outputs (O, C) of each model.
            weights: weight of each model; the weights sum to 1.
        """
        return torch.stack([weight * one for one, weight in zip(logits, weights, strict=True)]).sum(0)


class Classes(Outputs):
    """Outputs that are logits of classes; the labels are class indices (O,).

    Args:
        weights: weights of the classes in the loss on labels; None for equal weights.
    """

    def __init__(self, weights: Sequence[float] | None = None) -> None:
        self.weights = weights
        self.weights_on = dict[torch.device, Tensor]()  # an update that a GPU records must not copy them

    def label_loss(self, logits_OC: Tensor, batch: Batch) -> Tensor:
        """Return the cross entropy (ALP-KD Eq. 1, but with the mean over the outputs instead of the sum)."""
        if self.weights is None and batch.output_weights is None:
            return functional.cross_entropy(logits_OC, batch.gold)
        loss_O = functional.cross_entropy(logits_OC, batch.gold, reduction="none")
        if self.weights is not None:
            if logits_OC.device not in self.weights_on:
                self.weights_on[logits_OC.device] = torch.tensor(self.weights, device=logits_OC.device)
            loss_O = loss_O * self.weights_on[logits_OC.device].to(logits_OC)[batch.gold]
        return weighted_mean(loss_O, batch.output_weights)

    def soft_label_loss(self, student_OC: Tensor, teacher_OC: Tensor, batch: Batch, temperature: float) -> Tensor:
        return soft_cross_entropy(student_OC, teacher_OC, temperature, batch.output_weights)

    def soft_label_divergence(self, student_OC: Tensor, teacher_OC: Tensor, batch: Batch, temperature: float) -> Tensor:
        """Return the KL divergence. It is summed by class, since the two cross entropies nearly cancel."""
        student, teacher = (functional.log_softmax(side / temperature, dim=-1) for side in (student_OC, teacher_OC))
        shares = functional.softmax(teacher_OC / temperature, dim=-1)
        return weighted_mean((shares * (teacher - student)).sum(dim=-1), batch.output_weights)

    def num_summed_classes(self, logits_OC: Tensor) -> int:
        return logits_OC.shape[-1]

    def ensemble_mean(self, logits: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Return the logarithms of the weighted mean of the models' probabilities."""
        logs = [one.log_softmax(-1) + math.log(weight) for one, weight in zip(logits, weights, strict=True)]
        return torch.stack(logs).logsumexp(0)


def require_classes(outputs: Outputs, key: str, value: object, smallest: int = 2, num_classes: int = 2) -> None:
    """Check that the outputs are logits of one class of several, for losses that compare classes with each other.

    Args:
        key, value: option that needs it, for the message.
        smallest: lowest number of classes that makes sense.
        num_classes: number of classes.
    Raises:
        UserError: they are scores, labels of a set or spans, or there are too few classes.
    """
    remedy = override("loss.kd.standardize", False) if value is True else override("method", "rkd")
    if not isinstance(outputs, Classes):
        raise UserError(key, value, "compares the classes of an output; this task's outputs are no classes", remedy)
    if num_classes < smallest:
        problem = f"with {num_classes} classes every output becomes 1 and -1, so that nothing is learned"
        raise UserError(key, value, problem, remedy)


def standardized(logits_OC: Tensor) -> Tensor:
    """Subtract the mean over the classes and divide by the standard deviation (logit standardization, Algorithm 1)."""
    centered = logits_OC - logits_OC.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True).sqrt() + 1e-7)


def label_set_loss(logits_OC: Tensor, targets_OC: Tensor, batch: Batch) -> Tensor:
    """Binary cross entropy, mean over the labels and over the examples of ``batch``, which may have weights."""
    if batch.output_weights is None:
        return functional.binary_cross_entropy_with_logits(logits_OC, targets_OC)
    loss_OC = functional.binary_cross_entropy_with_logits(logits_OC, targets_OC, reduction="none")
    return weighted_mean(loss_OC.mean(-1), batch.output_weights)


class LabelSets(Outputs):
    """Outputs that are logits of C independent labels (multi-label classification); ``labels`` are 0 or 1, (O, C).

    Losses are means over the labels as well as the examples, as in ``transformers``.
    """

    def label_loss(self, logits_OC: Tensor, batch: Batch) -> Tensor:
        return label_set_loss(logits_OC, batch.gold.to(logits_OC), batch)

    def soft_label_loss(self, student_OC: Tensor, teacher_OC: Tensor, batch: Batch, temperature: float) -> Tensor:
        """Return the binary cross entropy per label, with both models at T."""
        return label_set_loss(student_OC / temperature, torch.sigmoid(teacher_OC / temperature), batch)

    def ensemble_mean(self, logits: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Return the logits of the weighted mean probability of each label."""
        shares = [math.log(weight) for weight in weights]
        yes = [functional.logsigmoid(one) + share for one, share in zip(logits, shares, strict=True)]
        no = [functional.logsigmoid(-one) + share for one, share in zip(logits, shares, strict=True)]
        return torch.stack(yes).logsumexp(0) - torch.stack(no).logsumexp(0)


class Score(Outputs):
    """Outputs that are scores (O, 1), for regression; the labels are scores (O,)."""

    has_temperature = False

    def label_loss(self, logits_OC: Tensor, batch: Batch) -> Tensor:
        return squared_error(logits_OC, batch.gold, batch.output_weights)

    def soft_label_loss(self, student_OC: Tensor, teacher_OC: Tensor, batch: Batch, temperature: float) -> Tensor:
        """Return the squared error between the two outputs. ALP-KD gives a T for STS-B, which has no effect here."""
        return squared_error(student_OC, teacher_OC.squeeze(-1), batch.output_weights)
