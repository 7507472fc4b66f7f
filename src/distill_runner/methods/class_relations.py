"""Loss terms on the logits of classes that newer papers compare with soft labels: DKD and DIST.

Both read the teacher's logits alone, so they are cached like soft labels. ``conf/method/{dkd,dist}.yaml`` use them;
logit standardization (Sun et al. 2024) is an option of ``predictions.SoftLabels``.

Shapes: O outputs per batch with C classes each; an output is an example, or a word.
"""

import torch
from torch import Tensor
from torch.nn import functional

from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import LossTerm, Progress
from distill_runner.methods.outputs import Outputs, require_classes, weighted_mean
from distill_runner.methods.predictions import Temperature
from distill_runner.models.features import EncoderShape, FeatureRequest, Features


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


def correlation_over_classes(student_OC: Tensor, teacher_OC: Tensor, batch: Batch | None = None) -> Tensor:
    """1 minus Pearson's correlation over the classes of each output, 0 to 2; mean over the outputs (DIST, Eq. 6).

    ``batch`` may have weights of the examples.
    """
    one, other = (values - values.mean(1, keepdim=True) for values in (student_OC, teacher_OC))
    return weighted_mean(1 - functional.cosine_similarity(one, other, dim=1), batch)


def correlation_over_outputs(student_OC: Tensor, teacher_OC: Tensor, batch: Batch | None = None) -> Tensor:
    """1 minus Pearson's correlation over the outputs of each class, 0 to 2; mean over the classes (DIST, Eq. 7).

    With weights of the examples it is the weighted correlation: the sums over outputs in the two means, in the two
    variances and in the covariance have the weights. An example of weight n then counts as n equal examples.
    """
    if batch is None or batch.example_weights is None:
        one, other = (values - values.mean(0, keepdim=True) for values in (student_OC, teacher_OC))
    else:
        weights_O1 = batch.example_weights.to(student_OC)[:, None]
        shares_O1 = weights_O1 / weights_O1.sum().clamp_min(torch.finfo(student_OC.dtype).tiny)
        one, other = (
            (values - (shares_O1 * values).sum(0, keepdim=True)) * shares_O1.sqrt()
            for values in (student_OC, teacher_OC)
        )
    return (1 - functional.cosine_similarity(one, other, dim=0)).mean()


class DecoupledSoftLabels(LossTerm):
    """``alpha * target + beta * others``: the parts of the divergence with weights of their own (DKD, Eq. 7).

    In the KL divergence, the part of the other classes counts less the surer the teacher is of the label. With two
    classes this part is 0.

    Args:
        alpha, beta: weights of the label's part, and of the other classes'.
        temperature: temperature T of student and teacher.
        scale_by_t2: whether the loss is multiplied by T², as in the authors' code.

    ``diagnostics`` has both parts: ``target`` and ``others``.
    """

    reads_labels = frozenset({"labels"})
    weighs_examples = True

    def __init__(
        self, alpha: float = 1.0, beta: float = 8.0, temperature: Temperature = 4.0, scale_by_t2: bool = True
    ) -> None:
        super().__init__()
        self.alpha, self.beta, self.temperature, self.scale_by_t2 = alpha, beta, temperature, scale_by_t2

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        require_classes(outputs, ".term", "decoupled_soft_labels")
        self.mean_over = outputs.unit
        self.student_needs = self.teacher_needs = FeatureRequest(logits=True)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        parts = decoupled_divergences(student.logits_OC, teacher.logits_OC, batch.gold, self.temperature)
        target, others = (weighted_mean(part, batch) for part in parts)
        self.diagnostics = {"target": target.detach(), "others": others.detach()}
        return (self.alpha * target + self.beta * others) * (self.temperature**2 if self.scale_by_t2 else 1)


class CorrelatedSoftLabels(LossTerm):
    """Correlations of the predictions: over the classes of an example, and over the examples of a class (DIST, Eq. 10).

    The second part is over the examples of a batch: with parts of an update, as in several processes, it is a mean over
    the parts, which is not the correlation over the update. Weights of the examples weigh the mean of the first part,
    and the correlation of the second. With two classes the first part is 0 or 2 and has no gradient.

    Args:
        over_classes, over_examples: weights of the two parts: beta and gamma.
        temperature: temperature T of student and teacher.
        scale_by_t2: whether the loss is multiplied by T², as in the authors' code.

    ``diagnostics`` has both parts: ``over_classes`` and ``over_examples``.
    """

    weighs_examples = True
    compares_examples = True

    def __init__(
        self,
        over_classes: float = 2.0,
        over_examples: float = 2.0,
        temperature: Temperature = 4.0,
        scale_by_t2: bool = True,
    ) -> None:
        super().__init__()
        self.weights, self.temperature, self.scale_by_t2 = (over_classes, over_examples), temperature, scale_by_t2

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        require_classes(outputs, ".term", "correlated_soft_labels")
        self.mean_over = outputs.unit
        self.student_needs = self.teacher_needs = FeatureRequest(logits=True)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        one, other = ((logits / self.temperature).softmax(-1) for logits in (student.logits_OC, teacher.logits_OC))
        over_classes = correlation_over_classes(one, other, batch)
        over_examples = correlation_over_outputs(one, other, batch)
        self.diagnostics = {"over_classes": over_classes.detach(), "over_examples": over_examples.detach()}
        loss = self.weights[0] * over_classes + self.weights[1] * over_examples
        return loss * (self.temperature**2 if self.scale_by_t2 else 1)
