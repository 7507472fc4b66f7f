"""Losses on vectors of texts as outputs of a head.

Shapes: B texts with vectors of C numbers.
"""

from collections.abc import Sequence
from typing import ClassVar, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from distill_runner.common.errors import UserError
from distill_runner.datasets.batches import Batch
from distill_runner.methods.outputs import Outputs


class Vectors(Outputs):
    """Outputs that are vectors of texts (B, C); the texts have no labels."""

    has_temperature: ClassVar[bool] = False
    has_labels: ClassVar[bool] = False

    def label_loss(self, logits_OC: Tensor, batch: Batch) -> NoReturn:
        raise TypeError("vectors have no labels")

    def soft_label_loss(
        self, student_OC: Tensor, teacher_OC: Tensor, batch: Batch, temperature: float, scale_by_t2: bool
    ) -> Tensor:
        """Return the squared distance of the two vectors, mean over the texts; there is no temperature.

        Raises:
            UserError: the vectors have different widths.
        """
        _require_equal_widths(student_OC, teacher_OC)
        return (student_OC - teacher_OC).square().sum(-1).mean()

    def ensemble_mean(self, logits: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Return the weighted mean of the vectors, divided by its length."""
        mean = torch.stack([weight * one for one, weight in zip(logits, weights, strict=True)]).sum(0)
        return functional.normalize(mean, dim=-1)


def _require_equal_widths(student_BC: Tensor, teacher_BC: Tensor) -> None:
    widths = student_BC.shape[-1], teacher_BC.shape[-1]
    if widths[0] != widths[1]:
        problem = f"its vectors have {widths[0]} numbers, the teacher's {widths[1]}"
        raise UserError("student", None, problem, "Take method=vectors vectors.widths=pca, or project.")
