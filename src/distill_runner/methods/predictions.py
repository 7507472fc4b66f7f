"""Terms on what a head gives: gold labels, a teacher's predictions (Hinton et al.), and its logits (Pro-KD).

``LogitMatching`` is phase I of Pro-KD and of Annealing-KD: the student matches logits that are softened less and less.
All else of these methods is configuration: which checkpoint is followed when (``checkpoint_schedule``), and what comes
before and after (stages of ``conf/method/{vanilla,takd,rco,annealing,prokd}.yaml``).
"""

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from distill_runner.common.errors import UserError
from distill_runner.common.readings import Reading
from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import LossTerm, Progress
from distill_runner.methods.checkpoint_schedule import EpochsPerStep
from distill_runner.methods.outputs import Outputs, cross_entropy
from distill_runner.models.encoders import EncoderShape
from distill_runner.models.features import FeatureRequest, Features

GRID = "The paper's grid is 1, 5, 10, 20."
HOTTEST = 1e6
"""Beyond which nothing is left of what a teacher says."""


SCALED = Reading("the term is multiplied by T^2, as in Hinton et al. and in the code of the group", "ALP-KD Eq. 2")


class HardLabels(LossTerm):
    """The loss against the gold labels: cross entropy of classes (ALP-KD Eq. 1), squared error of a score."""

    reads_teacher = False
    reads_labels = frozenset({"labels"})

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        self.outputs, self.mean_over = outputs, outputs.unit
        self.student_needs = FeatureRequest(logits=True)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        assert student.logits is not None
        return self.outputs.gold(student.logits, batch)


class NextSentence(LossTerm):
    """Cross entropy of "does the second segment follow the first?" (BERT, section 3.1, task 2).

    With masked language modelling it is the paper's MLM+.
    """

    reads_teacher = False
    reads_labels = frozenset({"is_next"})

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        if student.model_type != "bert":
            problem = f"a model of the type {student.model_type} has no head for next sentence prediction"
            raise UserError(".", None, problem, "pretraining=mlm pre-trains without it.")
        self.student_needs = FeatureRequest(next_sentence=True)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        assert student.next_sentence is not None
        assert batch.is_next is not None
        return cross_entropy(student.next_sentence, batch.is_next)


class SoftLabels(LossTerm):
    """Distillation of the predictions (ALP-KD Eq. 2, Hinton et al.); squared error of the outputs for regression.

    Args:
        temperature: T > 0, of both sides; unused for regression.
        scale_by_t2: multiply by T², so that the gradient's size does not depend on T.
    """

    per_class: ClassVar[bool] = False

    def __init__(self, temperature: float, scale_by_t2: Annotated[bool, SCALED] = True) -> None:
        super().__init__()
        if temperature <= 0:
            raise UserError(".temperature", temperature, "must be greater than 0", GRID)
        if temperature > HOTTEST:
            raise UserError(".temperature", temperature, f"must be at most {HOTTEST:g}", GRID)
        self.temperature, self.scale_by_t2 = temperature, scale_by_t2

    @classmethod
    def ignored_arguments(cls, outputs: Outputs) -> frozenset[str]:
        return frozenset(() if outputs.has_temperature else {"temperature", "scale_by_t2"})

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        self.outputs, self.mean_over = outputs, outputs.unit
        self.student_needs = self.teacher_needs = FeatureRequest(logits=True)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        assert student.logits is not None
        assert teacher.logits is not None
        how = (batch, self.temperature, self.scale_by_t2)
        share = self.outputs.summed_over(student.logits) if self.per_class else 1
        loss = self.outputs.soft(student.logits, teacher.logits, *how) / share
        # Cross entropy never falls below the teacher's own entropy; what is above it is what is left to learn.
        least = self.outputs.soft(teacher.logits, teacher.logits, *how) / share
        self.observed = {"divergence": (loss - least).detach()}
        return loss


class SoftLabelsPerClass(SoftLabels):
    """``SoftLabels`` as in PKD's published code: the mean is over the classes as well as the batch.

    That code has classes alone. The losses of label sets are means over the labels as they are, and spans have no
    classes: with both this is ``SoftLabels``.
    """

    version = 2
    per_class = True


SOFTENINGS: dict[str, Callable[[int, int], float]] = {
    "divide": lambda temperature, tau_max: 1 / temperature,
    "scale": lambda temperature, tau_max: 1 - (temperature - 1) / tau_max,
    "none": lambda temperature, tau_max: 1.0,
}
"""Factor of the teacher's logits at T: 1/T (Pro-KD Eq. 3), phi(T) (Annealing-KD), and Pro-KD Table 10's ablation."""


class LogitMatching(LossTerm):
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

    def __init__(
        self,
        tau_max: int,
        soften: Literal["divide", "scale", "none"],
        steps: EpochsPerStep,
        over_classes: Annotated[
            Literal["sum", "mean"], Reading("the norm is a sum over classes; the code takes the mean", "Pro-KD Eq. 3")
        ] = "sum",
        followed: int | None = None,
    ) -> None:
        super().__init__()
        if tau_max < 1:
            remedy = "Pro-KD counts the teacher's epochs, of which a fine-tuned one (teacher.fine_tuned=true) has none."
            raise UserError("loss.tau_max", tau_max, "must be at least 1", remedy)
        if followed is not None and tau_max > followed:
            problem = f"T falls by 1 with each checkpoint, of which {followed} are followed, and would never be 1"
            raise UserError("loss.tau_max", tau_max, problem, f"Take loss.tau_max={followed}, the default, or less.")
        self.tau_max, self.soften, self.steps, self.over_classes = tau_max, soften, steps, over_classes

    @classmethod
    def ignored_arguments(cls, outputs: Outputs) -> frozenset[str]:
        return frozenset({"followed"})

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        self.outputs, self.mean_over = outputs, outputs.unit
        self.student_needs = self.teacher_needs = FeatureRequest(logits=True)

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
        return self.outputs.match(student.logits, target_BC, batch, self.over_classes)
