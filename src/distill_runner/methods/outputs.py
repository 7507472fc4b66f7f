"""What a head's outputs mean, and the losses on them. Loss terms ask these, and never which kind of task it is.

Shapes: O outputs of a batch (B, where they are those of examples), C numbers in each.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from distill_runner.common.readings import Reading
from distill_runner.datasets.batches import Batch, Unit


def cross_entropy(logits_BC: Tensor, labels_B: Tensor) -> Tensor:
    """Cross entropy with class indices (ALP-KD Eq. 1, as a mean instead of a sum over the examples)."""
    return functional.cross_entropy(logits_BC, labels_B)


def soft_cross_entropy(student_BC: Tensor, teacher_BC: Tensor, temperature: float, scale_by_t2: bool) -> Tensor:
    """Cross entropy of the student's softmax with the teacher's, both at T (ALP-KD Eq. 2), times T² if asked.

    It differs from the KL divergence by the teacher's entropy only, so the gradient is the same.
    """
    teacher = functional.softmax(teacher_BC / temperature, dim=-1)
    student = functional.log_softmax(student_BC / temperature, dim=-1)
    loss = -(teacher * student).sum(dim=-1).mean()
    return loss * temperature**2 if scale_by_t2 else loss


def squared_error(outputs_B1: Tensor, targets_B: Tensor) -> Tensor:
    """Squared error of a regression head's single output."""
    return (outputs_B1.squeeze(-1) - targets_B).square().mean()


class Outputs(ABC):
    """One meaning of a head's outputs.

    ``unit`` is what its losses are a mean over; ``has_temperature`` says whether a temperature means anything to it.
    """

    unit: ClassVar[Unit] = "output"
    has_temperature: ClassVar[bool] = True
    readings: ClassVar[Mapping[str, Reading]] = {}
    """What terms mean for such outputs where their papers do not say, by the ids of the terms."""

    @abstractmethod
    def gold(self, logits_OC: Tensor, batch: Batch) -> Tensor:
        """The loss against the batch's own labels: a scalar, mean over ``unit``."""

    @abstractmethod
    def soft(
        self, student_OC: Tensor, teacher_OC: Tensor, batch: Batch, temperature: float, scale_by_t2: bool
    ) -> Tensor:
        """The loss against the teacher's predictions at a temperature: a scalar, mean over ``unit``."""

    def summed_over(self, logits_OC: Tensor) -> int:
        """How many classes ``soft`` sums over for one output; 1 where it is a mean already, or there are none."""
        return 1

    @abstractmethod
    def mean(self, logits: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """What several models say together, (O, C): of each one's (O, C) and its weight; the weights sum to 1."""

    def match(self, student_OC: Tensor, target_OC: Tensor, batch: Batch, over: Literal["sum", "mean"]) -> Tensor:
        """Squared distance of the raw outputs, sum or mean over the C numbers: a scalar, mean over ``unit``."""
        loss = (student_OC - target_OC).square().mean()
        return loss * target_OC.shape[-1] if over == "sum" else loss


class Classes(Outputs):
    """Logits of classes; the labels are class indices (O,).

    Args:
        weights: of the classes in the loss on gold labels; None for equal ones.
    """

    def __init__(self, weights: Sequence[float] | None = None) -> None:
        self.weights = weights

    def gold(self, logits_OC: Tensor, batch: Batch) -> Tensor:
        assert batch.labels is not None
        if self.weights is None:
            return cross_entropy(logits_OC, batch.labels)
        weight_O = logits_OC.new_tensor(self.weights)[batch.labels]
        # A mean over examples, and not over their weights: parts of an update then add up to the whole.
        return (functional.cross_entropy(logits_OC, batch.labels, reduction="none") * weight_O).mean()

    def soft(
        self, student_OC: Tensor, teacher_OC: Tensor, batch: Batch, temperature: float, scale_by_t2: bool
    ) -> Tensor:
        return soft_cross_entropy(student_OC, teacher_OC, temperature, scale_by_t2)

    def summed_over(self, logits_OC: Tensor) -> int:
        return logits_OC.shape[-1]

    def mean(self, logits: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Logarithms of the mean probabilities."""
        logs = [one.log_softmax(-1) + math.log(weight) for one, weight in zip(logits, weights, strict=True)]
        return torch.stack(logs).logsumexp(0)


class LabelSets(Outputs):
    """Logits of labels that an example may have together: Bernoulli each; ``labels`` are 0 and 1, (O, C).

    Losses are means over the labels too, as ``transformers`` has them.
    """

    def gold(self, logits_OC: Tensor, batch: Batch) -> Tensor:
        assert batch.labels is not None
        return functional.binary_cross_entropy_with_logits(logits_OC, batch.labels.to(logits_OC))

    def soft(
        self, student_OC: Tensor, teacher_OC: Tensor, batch: Batch, temperature: float, scale_by_t2: bool
    ) -> Tensor:
        """Cross entropy of each label's two probabilities, both sides at T, times T² if asked."""
        teacher = torch.sigmoid(teacher_OC / temperature)
        loss = functional.binary_cross_entropy_with_logits(student_OC / temperature, teacher)
        return loss * temperature**2 if scale_by_t2 else loss

    def mean(self, logits: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Logits of the mean probability of each label."""
        shares = [math.log(weight) for weight in weights]
        yes = [functional.logsigmoid(one) + share for one, share in zip(logits, shares, strict=True)]
        no = [functional.logsigmoid(-one) + share for one, share in zip(logits, shares, strict=True)]
        return torch.stack(yes).logsumexp(0) - torch.stack(no).logsumexp(0)


class Score(Outputs):
    """One number (O, 1), the score itself; the labels are scores (O,)."""

    has_temperature = False
    readings: ClassVar[Mapping[str, Reading]] = {
        "soft_labels": Reading("squared error of the two outputs, without a temperature", "ALP-KD")
    }

    def gold(self, logits_OC: Tensor, batch: Batch) -> Tensor:
        assert batch.labels is not None
        return squared_error(logits_OC, batch.labels)

    def soft(
        self, student_OC: Tensor, teacher_OC: Tensor, batch: Batch, temperature: float, scale_by_t2: bool
    ) -> Tensor:
        """Squared error of the two outputs. ALP-KD prints a T for STS-B, which has no meaning here."""
        return squared_error(student_OC, teacher_OC.squeeze(-1))

    def mean(self, logits: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        return torch.stack([one * weight for one, weight in zip(logits, weights, strict=True)]).sum(0)
