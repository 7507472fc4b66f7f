"""Phase I of Pro-KD and of Annealing-KD: the student matches logits of the teacher that are softened less and less.

All else of these methods is configuration: which checkpoint is followed when (``routes``), and what comes before and
after (stages of ``conf/method/{vanilla,takd,rco,annealing,prokd}.yaml``).
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from distill_runner import losses
from distill_runner.batches import Batch
from distill_runner.encoders import Shape
from distill_runner.errors import UserError
from distill_runner.features import Features, Needs
from distill_runner.methods.base import Kind, Progress, Term
from distill_runner.routes import Steps
from distill_runner.schema import typed

SOFTENINGS: dict[str, Callable[[int, int], float]] = {
    "divide": lambda temperature, tau_max: 1 / temperature,
    "scale": lambda temperature, tau_max: 1 - (temperature - 1) / tau_max,
    "none": lambda temperature, tau_max: 1.0,
}
"""Factor of the teacher's logits at T: 1/T (Pro-KD Eq. 3), phi(T) (Annealing-KD), and Pro-KD Table 10's ablation."""


class LogitMatching(Term):
    """Squared distance of the student's logits and the teacher's softened ones, ``|z_S - c(T) z_T|²`` (Pro-KD Eq. 3).

    T is ``tau_max`` in the first step and one less in each that follows, down to 1; only the teacher's side has it.
    The output of a regression is treated as a logit is.

    Args:
        tau_max: the highest temperature, and the number of steps.
        soften: c(T): ``divide``, ``scale`` or ``none``, see ``SOFTENINGS``.
        steps: how many epochs each temperature takes.
        over_classes: ``sum``, the norm that the papers print, or ``mean``, as in the code of Annealing-KD.
        followed: how many checkpoints of the teacher are followed, if any are; T = 1 would not be reached with fewer
            than ``tau_max``.

    ``observed`` has ``temperature``.
    """

    mean_over = "output"

    def __init__(
        self,
        tau_max: int,
        soften: Literal["divide", "scale", "none"],
        steps: Steps | Mapping[str, Any],
        over_classes: Literal["sum", "mean"] = "sum",
        followed: int | None = None,
    ) -> None:
        super().__init__()
        if tau_max < 1:
            remedy = "Pro-KD counts the teacher's epochs, of which a fine-tuned one (teacher.fine_tuned=true) has none."
            raise UserError("loss.tau_max", tau_max, "must be at least 1", remedy)
        if followed is not None and tau_max > followed:
            problem = f"T falls by 1 with each checkpoint, of which {followed} are followed, and would never be 1"
            raise UserError("loss.tau_max", tau_max, problem, f"Take loss.tau_max={followed}, the default, or less.")
        self.tau_max, self.soften, self.over_classes = tau_max, soften, over_classes
        self.steps = typed(Steps, steps, ".steps.")

    @classmethod
    def unread(cls, kind: Kind) -> frozenset[str]:
        return frozenset({"followed"})

    def bind(self, student: Shape, teacher: Shape | None, kind: Kind) -> None:
        self.student_needs = self.teacher_needs = Needs(logits=True)

    def temperature(self, progress: Progress) -> int:
        """T of the current epoch; behind the last step it stays at 1."""
        temperatures = self.steps.spread(range(self.tau_max, 0, -1), progress.num_epochs)
        return temperatures[min(progress.epoch, len(temperatures) - 1)]

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        assert student.logits is not None
        assert teacher.logits is not None
        temperature = self.temperature(progress)
        self.observed = {"temperature": torch.full((), float(temperature), device=student.logits.device)}
        target_BC = teacher.logits * SOFTENINGS[self.soften](temperature, self.tau_max)
        loss = losses.mean_squared_error(student.logits, target_BC)
        return loss * target_BC.shape[-1] if self.over_classes == "sum" else loss
