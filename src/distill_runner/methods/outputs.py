"""What a head's outputs mean, and the losses on them. Loss terms ask these, and never which kind of task it is.

Shapes: O outputs of a batch, C numbers in each.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from distill_runner.datasets.batches import Batch, Unit
from distill_runner.methods import losses


class Outputs(ABC):
    """One meaning of a head's outputs.

    ``unit`` is what its losses are a mean over; ``has_temperature`` says whether a temperature means anything to it.
    """

    unit: ClassVar[Unit] = "output"
    has_temperature: ClassVar[bool] = True

    @abstractmethod
    def gold(self, logits_OC: Tensor, batch: Batch) -> Tensor:
        """The loss against the batch's own labels: a scalar, mean over ``unit``."""

    @abstractmethod
    def soft(
        self, student_OC: Tensor, teacher_OC: Tensor, batch: Batch, temperature: float, scale_by_t2: bool
    ) -> Tensor:
        """The loss against the teacher's predictions at a temperature: a scalar, mean over ``unit``."""

    def match(self, student_OC: Tensor, target_OC: Tensor, batch: Batch, over: Literal["sum", "mean"]) -> Tensor:
        """Squared distance of the raw outputs, sum or mean over the C numbers: a scalar, mean over ``unit``."""
        loss = losses.mean_squared_error(student_OC, target_OC)
        return loss * target_OC.shape[-1] if over == "sum" else loss


class Classes(Outputs):
    """Logits of classes; the labels are class indices (O,)."""

    def gold(self, logits_OC: Tensor, batch: Batch) -> Tensor:
        assert batch.labels is not None
        return losses.cross_entropy(logits_OC, batch.labels)

    def soft(
        self, student_OC: Tensor, teacher_OC: Tensor, batch: Batch, temperature: float, scale_by_t2: bool
    ) -> Tensor:
        return losses.soft_cross_entropy(student_OC, teacher_OC, temperature, scale_by_t2)


class Score(Outputs):
    """One number (O, 1), the score itself; the labels are scores (O,)."""

    has_temperature = False

    def gold(self, logits_OC: Tensor, batch: Batch) -> Tensor:
        assert batch.labels is not None
        return losses.squared_error(logits_OC, batch.labels)

    def soft(
        self, student_OC: Tensor, teacher_OC: Tensor, batch: Batch, temperature: float, scale_by_t2: bool
    ) -> Tensor:
        return losses.squared_error(student_OC, teacher_OC.squeeze(-1))
