"""Loss terms on a head's outputs: labels, the teacher's predictions (Hinton et al.; DKD, DIST) and logits (Pro-KD).

``LogitMatching`` is phase I of Pro-KD and of Annealing-KD: the student matches logits that are softened less and less.
The rest of these methods is configuration. ``schedules`` chooses the checkpoint for each epoch, and
``conf/method/{vanilla,takd,rco,annealing,prokd}.yaml`` choose the stages.
"""

import logging
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from distill_runner.common.errors import UserError, error_context, override
from distill_runner.common.schema import Assumption
from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import LossTerm, Progress
from distill_runner.methods.outputs import Outputs, require_classes, standardized, weighted_mean
from distill_runner.methods.schedules import EpochsPerStep
from distill_runner.models.features import EncoderShape, FeatureRequest, Features

log = logging.getLogger(__name__)

Temperature = Annotated[float, Field(gt=0, le=1e6)]
"""Temperature of softened predictions; above the highest one that is allowed they are practically uniform."""


class HardLabels(LossTerm):
    """Loss against the labels, such as cross entropy for classes (ALP-KD Eq. 1) and squared error for scores.

    Args:
        smoothing: share of the loss that is against equal probabilities of all classes (Szegedy et al. 2016), as
            ``label_smoothing`` in torch.
    """

    reads_teacher = False
    reads_labels = frozenset({"labels"})
    weighs_examples = True

    def __init__(self, smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0) -> None:
        super().__init__()
        self.smoothing = smoothing

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        if not outputs.has_labels:
            remedy = "Learn from the vectors of a teacher: " + override("method", "vectors", "teacher.fine_tuned", True)
            raise UserError(".term", "hard_labels", "texts of a task of vectors have no labels", remedy)
        if self.smoothing and not outputs.has_temperature:
            raise UserError(".smoothing", self.smoothing, "is for classes, but this task has scores", "Leave it out.")
        self.outputs, self.mean_over = outputs, outputs.unit
        self.student_needs = FeatureRequest(logits=True)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        loss, logits = self.outputs.label_loss(student.logits_OC, batch), student.logits_OC
        if not self.smoothing:
            return loss
        even = self.outputs.soft_label_loss(logits, torch.zeros_like(logits), batch, 1.0)
        return (1 - self.smoothing) * loss + self.smoothing * even


class NextSentence(LossTerm):
    """Cross entropy of next sentence prediction: does the second segment follow the first? (BERT, section 3.1, task 2).

    Together with masked language modeling it is the MLM+ of the well-read students (Turc et al. 2019).
    """

    reads_teacher = False
    reads_labels = frozenset({"is_next"})
    weighs_examples = True

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        if student.model_type != "bert":
            problem = f"a model of type {student.model_type} has no head for next sentence prediction"
            raise UserError(".", None, problem, override("pretraining", "mlm") + " pre-trains without it.")
        self.student_needs = FeatureRequest(next_sentence=True)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        assert student.next_sentence is not None
        assert batch.is_next is not None
        if batch.example_weights is None:
            return functional.cross_entropy(student.next_sentence, batch.is_next)
        losses_B = functional.cross_entropy(student.next_sentence, batch.is_next, reduction="none")
        return weighted_mean(losses_B, batch.example_weights)


class PredictionTerm(LossTerm):
    """Base of the terms that compare the logits of student and teacher.

    Attributes:
        of_classes: id of a term that is for classes alone; empty for any outputs.
    """

    weighs_examples = True
    of_classes: ClassVar[str] = ""

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        if self.of_classes:
            require_classes(outputs, ".term", self.of_classes)
        self.outputs, self.mean_over = outputs, outputs.unit
        self.student_needs = self.teacher_needs = FeatureRequest(logits=True)


class SoftLabels(PredictionTerm):
    """Loss against the teacher's predictions (ALP-KD Eq. 2, Hinton et al.); for regression, squared error of outputs.

    Cross entropy cannot fall below the teacher's entropy. The term is the excess over it, the KL divergence: what is
    left to learn, with the same gradient.

    Args:
        temperature: temperature T > 0 of student and teacher; unused for regression.
        scale_by_t2: whether the loss is multiplied by T², so that the size of the gradient does not depend on T.
        standardize: whether the logits of each output are standardized before (Sun et al. 2024, arXiv 2403.01427).
    """

    per_class: ClassVar[bool] = False

    def __init__(
        self,
        temperature: Temperature,
        scale_by_t2: Annotated[
            bool,
            Assumption(
                "the term is multiplied by T^2, as in Hinton et al. and in the code of the authors' group",
                "ALP-KD Eq. 2",
                True,
            ),
        ] = True,
        standardize: Annotated[
            bool,
            Assumption(
                "the standard deviation of a population (K); the authors' code takes that of a sample (K - 1)",
                "logit standardization",
                True,
            ),
        ] = False,
    ) -> None:
        super().__init__()
        self.temperature, self.scale_by_t2, self.standardize = temperature, scale_by_t2, standardize

    @classmethod
    def ignored_arguments(cls, outputs: Outputs) -> frozenset[str]:
        return frozenset(() if outputs.has_temperature else {"temperature", "scale_by_t2"})

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        if self.standardize:
            require_classes(outputs, ".standardize", True, smallest=3, num_classes=student.num_labels)
        super().bind(student, teacher, outputs)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        logits, targets = student.logits_OC, teacher.logits_OC
        if self.standardize:
            logits, targets = standardized(logits), standardized(targets)
        loss = self.outputs.soft_label_divergence(logits, targets, batch, self.temperature)
        if self.scale_by_t2 and self.outputs.has_temperature:
            loss = loss * self.temperature**2
        return loss / (self.outputs.num_summed_classes(logits) if self.per_class else 1)


class SoftLabelsPerClass(SoftLabels):
    """``SoftLabels`` as in PKD's published code: the mean is over the classes as well as the batch.

    That code supports only classes. For label sets, spans and scores this term equals ``SoftLabels``: the losses of
    label sets are means over the labels already, and spans and scores have no classes.
    """

    version = 2
    per_class = True


SOFTENINGS: dict[str, Callable[[int, int], float]] = {
    "divide": lambda temperature, tau_max: 1 / temperature,
    "scale": lambda temperature, tau_max: 1 - (temperature - 1) / tau_max,
    "none": lambda temperature, tau_max: 1.0,
}
"""Factor c(T) on the teacher's logits: 1/T (Pro-KD Eq. 3), phi(T) (Annealing-KD), or 1 (ablation, Pro-KD Table 10)."""


class LogitMatching(PredictionTerm):
    """Squared distance between the student's and the teacher's softened logits, ``|z_S - c(T) z_T|²`` (Pro-KD Eq. 3).

    T is ``tau_max`` in the first step and falls by 1 with each step, down to 1. Only the teacher's logits are softened.
    The output of a regression head is treated like a logit.

    Args:
        tau_max: highest temperature, and the number of steps.
        soften: name of the factor c(T): ``divide``, ``scale`` or ``none``, see ``SOFTENINGS``.
        steps: number of epochs at each temperature.
        over_classes: ``sum``, the norm that the papers print, or ``mean``, as in the code of Annealing-KD.
        num_checkpoints: number of teacher checkpoints that the student follows; None if it follows a single teacher. It
            must not be smaller than ``tau_max``, or T would never reach 1.
    Raises:
        UserError: ``tau_max`` is below 1 or above ``num_checkpoints``, or ``steps`` does not fit the number of steps.

    ``diagnostics`` has ``temperature``.
    """

    ends_late = True

    def __init__(
        self,
        tau_max: int,
        soften: Literal["divide", "scale", "none"],
        steps: EpochsPerStep,
        over_classes: Annotated[
            Literal["sum", "mean"],
            Assumption("the norm is a sum over classes; the authors' code takes the mean", "Pro-KD Eq. 3"),
        ] = "sum",
        num_checkpoints: int | None = None,
    ) -> None:
        super().__init__()
        if tau_max < 1:
            remedy = "Pro-KD counts the teacher's epochs, and an already fine-tuned one has none."
            raise UserError("loss.tau_max", tau_max, "must be at least 1", remedy)
        if num_checkpoints is not None and tau_max > num_checkpoints:
            problem = f"T falls by 1 with each of the {num_checkpoints} checkpoints, and would never reach 1"
            remedy = "Take the default or less: " + override("loss.tau_max", num_checkpoints)
            raise UserError("loss.tau_max", tau_max, problem, remedy)
        self.tau_max, self.soften, self.steps, self.over_classes = tau_max, soften, steps, over_classes
        self.num_steps = num_checkpoints or tau_max
        with error_context(".steps"):
            steps.spread(range(self.num_steps), num_epochs=1)
        self.register_buffer("softening_2", torch.ones(2), persistent=False)

    @classmethod
    def ignored_arguments(cls, outputs: Outputs) -> frozenset[str]:
        return frozenset({"num_checkpoints"})

    def check_epochs(self, num_epochs: int) -> None:
        if (last := self.temperature(Progress(num_epochs - 1, 0, num_epochs, 0))) > 1:
            log.warning("T falls from loss.tau_max=%d to %d in %d epochs, not to 1", self.tau_max, last, num_epochs)

    def temperature(self, progress: Progress) -> int:
        """Return T in the current epoch; after the last step T stays at 1."""
        step_temperatures = [max(1, self.tau_max - step) for step in range(self.num_steps)]
        temperatures = self.steps.spread(step_temperatures, progress.num_epochs)
        return temperatures[min(progress.epoch, len(temperatures) - 1)]

    def begin_epoch(self, progress: Progress) -> None:
        """Put T and c(T) where a recorded update reads them."""
        temperature = self.temperature(progress)
        values = temperature, SOFTENINGS[self.soften](temperature, self.tau_max)
        self.get_buffer("softening_2").copy_(torch.tensor(values, dtype=torch.float64))

    def graph_key(self, progress: Progress) -> None:
        return None

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        temperature, factor = self.get_buffer("softening_2")
        self.diagnostics = {"temperature": temperature.clone()}
        return self.outputs.logit_loss(student.logits_OC, teacher.logits_OC * factor, batch, self.over_classes)


def decoupled_divergences(
    student_OC: Tensor, teacher_OC: Tensor, labels_O: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the two parts of the KL divergence of the softened predictions, each (O,) (DKD, Eq. 5).

    With p and q the predictions of teacher and student, y the label, KL(p || q) = target + (1 - p_y) * others.

    Returns:
        The divergence of (p_y, 1 - p_y), and that of the distributions over the other classes.
    """
    is_label_OC = functional.one_hot(labels_O, student_OC.shape[-1]).bool()

    def split(logits_OC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of (p_y, 1 - p_y), (O, 2), and of the other classes, (O, C) with 0 at the label."""
        log_OC = (logits_OC / temperature).log_softmax(-1)
        rest_O1 = log_OC.masked_fill(is_label_OC, -torch.inf).logsumexp(-1, keepdim=True)
        pair_O2 = torch.cat([log_OC.gather(-1, labels_O[:, None]), rest_O1], dim=-1)
        return pair_O2, (log_OC - rest_O1).masked_fill(is_label_OC, 0)

    (pair_O2, others_OC), (p_pair_O2, p_others_OC) = split(student_OC), split(teacher_OC)
    target_O = (p_pair_O2.exp() * (p_pair_O2 - pair_O2)).sum(-1)
    return target_O, (p_others_OC.exp() * (p_others_OC - others_OC)).sum(-1)


def correlation_over_classes(student_OC: Tensor, teacher_OC: Tensor, weights_O: Tensor | None = None) -> Tensor:
    """1 minus Pearson's correlation over the classes of each output, 0 to 2; mean over the outputs (DIST, Eq. 6)."""
    one, other = (values - values.mean(1, keepdim=True) for values in (student_OC, teacher_OC))
    return weighted_mean(1 - functional.cosine_similarity(one, other, dim=1), weights_O)


def correlation_over_outputs(student_OC: Tensor, teacher_OC: Tensor, weights_O: Tensor | None = None) -> Tensor:
    """1 minus Pearson's correlation over the outputs of each class, 0 to 2; mean over the classes (DIST, Eq. 7).

    With weights of the examples it is the weighted correlation: the sums over outputs in the two means, in the two
    variances and in the covariance have the weights. An example of weight n then counts as n equal examples.
    """
    if weights_O is None:
        one, other = (values - values.mean(0, keepdim=True) for values in (student_OC, teacher_OC))
    else:
        weights_O1 = weights_O.to(student_OC)[:, None]
        shares_O1 = weights_O1 / weights_O1.sum().clamp_min(torch.finfo(student_OC.dtype).tiny)
        one, other = (
            (values - (shares_O1 * values).sum(0, keepdim=True)) * shares_O1.sqrt()
            for values in (student_OC, teacher_OC)
        )
    return (1 - functional.cosine_similarity(one, other, dim=0)).mean()


class DecoupledSoftLabels(PredictionTerm):
    """``alpha * target + beta * others``: the parts of the divergence with weights of their own (DKD, Eq. 7).

    In the KL divergence, the part of the other classes counts less the surer the teacher is of the label. With two
    classes this part is 0.

    Args:
        alpha, beta: weights of the label's part, and of the other classes'.
        temperature: temperature T of student and teacher.
        scale_by_t2: whether the loss is multiplied by T², as in the authors' code.

    ``diagnostics`` has both parts: ``target`` and ``others``.
    """

    of_classes = "decoupled_soft_labels"
    reads_labels = frozenset({"labels"})

    def __init__(
        self, alpha: float = 1.0, beta: float = 8.0, temperature: Temperature = 4.0, scale_by_t2: bool = True
    ) -> None:
        super().__init__()
        self.alpha, self.beta, self.temperature, self.scale_by_t2 = alpha, beta, temperature, scale_by_t2

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        parts = decoupled_divergences(student.logits_OC, teacher.logits_OC, batch.gold, self.temperature)
        target, others = (weighted_mean(part, batch.output_weights) for part in parts)
        self.diagnostics = {"target": target, "others": others}
        return (self.alpha * target + self.beta * others) * (self.temperature**2 if self.scale_by_t2 else 1)


class CorrelatedSoftLabels(PredictionTerm):
    """Correlations of the predictions: over the classes of an example, and over the examples of a class (DIST, Eq. 10).

    The second part is over the examples of a batch: with parts of an update, as in several processes, it is a mean over
    the parts, which is not the correlation over the update. Weights of the examples weigh the mean of the first part,
    and the correlation of the second. With two classes the first part is 0 or 2 and has no gradient.

    Args:
        over_classes, over_examples: weights of the two parts: beta and gamma.
        temperature: temperature T of student and teacher.
        scale_by_t2: whether the loss is multiplied by T², as in the authors' code.

    Both are computed in float64: predictions that are nearly equal cancel in float32, to errors of 1e-4.

    ``diagnostics`` has both parts: ``over_classes`` and ``over_examples``.
    """

    of_classes = "correlated_soft_labels"
    compares_examples = True

    def __init__(
        self,
        over_classes: float = 2.0,
        over_examples: float = 2.0,
        temperature: Temperature = 4.0,
        scale_by_t2: bool = True,
    ) -> None:
        super().__init__()
        self.over_classes, self.over_examples = over_classes, over_examples
        self.temperature, self.scale_by_t2 = temperature, scale_by_t2

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        both = student.logits_OC, teacher.logits_OC
        one, other = ((logits.double() / self.temperature).softmax(-1) for logits in both)
        over_classes = correlation_over_classes(one, other, batch.output_weights)
        over_examples = correlation_over_outputs(one, other, batch.output_weights)
        self.diagnostics = {"over_classes": over_classes, "over_examples": over_examples}
        loss = (self.over_classes * over_classes + self.over_examples * over_examples).to(student.logits_OC.dtype)
        return loss * (self.temperature**2 if self.scale_by_t2 else 1)
