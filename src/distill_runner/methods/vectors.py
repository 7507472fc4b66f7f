"""Distillation of vectors of texts: the vectors themselves, their similarities in a batch, and margins of given scores.

Shapes: B texts of a batch with vectors of C numbers; R rows of k texts.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from distill_runner.common.errors import UserError, override
from distill_runner.common.schema import Assumption
from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import LossTerm, Progress
from distill_runner.methods.outputs import Outputs, weighted_mean
from distill_runner.models.features import EncoderShape, FeatureRequest, Features

Distance = Literal["squared", "cosine"]


def vector_distance(
    student_BC: Tensor, teacher_BC: Tensor, distance: Distance, weights_B: Tensor | None = None
) -> Tensor:
    """Return the distance of the vectors of the same texts, (weighted) mean over the texts.

    ``squared`` is the squared Euclidean distance, a sum over the numbers of a vector; ``cosine`` is 1 minus the cosine.
    For vectors of length 1, the first is twice the second.
    """
    if distance == "squared":
        losses_B = (student_BC - teacher_BC).square().sum(-1)
    else:
        losses_B = 1 - functional.cosine_similarity(student_BC, teacher_BC, dim=-1)
    return weighted_mean(losses_B, weights_B)


def similarity_kl(
    student_BC: Tensor, teacher_BC: Tensor, temperature: float, weights_B: Tensor | None = None
) -> Tensor:
    """Return the KL divergence of the similarities of each text with the others of the batch, mean over the texts.

    The similarities are softmax(U Uᵀ / T) without the diagonal, of vectors divided by their lengths; the divergence is
    that of the student's distribution from the teacher's. It is 0 for one or two texts. Widths may differ.
    A text of weight 0 is none of the others; the other weights are factors in the mean.
    """
    hidden_BB = torch.eye(len(student_BC), dtype=torch.bool, device=student_BC.device)
    if weights_B is not None:
        hidden_BB = hidden_BB | (weights_B == 0)
    log_student, log_teacher = (_log_similarities(side, temperature, hidden_BB) for side in (student_BC, teacher_BC))
    terms_BB = log_teacher.exp() * (log_teacher - log_student)
    return weighted_mean(terms_BB.masked_fill(hidden_BB, 0).sum(-1), weights_B)


def _log_similarities(vectors_BC: Tensor, temperature: float, hidden_BB: Tensor) -> Tensor:
    """Return the log-softmax of the cosines of each text with the others, (B, B), very small where ``hidden_BB``."""
    unit_BC = functional.normalize(vectors_BC, dim=-1)
    cosines_BB = unit_BC @ unit_BC.T / temperature
    return cosines_BB.masked_fill(hidden_BB, torch.finfo(cosines_BB.dtype).min).log_softmax(-1)


def margin_error(similarities_Rk: Tensor, scores_R: Tensor) -> Tensor:
    """Return the squared error of the margins between texts (Hofstätter et al. 2020, Eq. 3).

    With the similarities of two texts with a third one (k = 2), the margin is their difference, and ``scores_R`` are
    the margins of the teacher: mean over the rows. With one similarity a row (k = 1), the margins are those between all
    pairs of rows of the batch, and ``scores_R`` are the scores of the rows: mean over the pairs of rows, 0 for one row.
    """
    if similarities_Rk.shape[1] == 2:
        return (similarities_Rk[:, 0] - similarities_Rk[:, 1] - scores_R).square().mean()
    error_R = similarities_Rk[:, 0] - scores_R
    count = len(error_R)
    if count < 2:
        return error_R.sum() * 0
    # The mean over pairs of (e_i - e_j)² is twice the unbiased variance of e.
    return 2 * (error_R - error_R.mean()).square().sum() / (count - 1)


def principal_components(vectors: Iterable[Tensor], width: int) -> Tensor:
    """Return the first principal components (width, C) of vectors that come in parts (n, C), by float64 covariance.

    Each component has its largest entry, by absolute value, positive.
    """
    count, total, products = 0, torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for part in vectors:
        part_nC = part.double()
        count += len(part_nC)
        total = total + part_nC.sum(0)
        products = products + part_nC.T @ part_nC
    _, vectors_CC = torch.linalg.eigh(products / count - torch.outer(total, total) / count**2)
    components = vectors_CC.flip(1)[:, :width].T
    return components * torch.where(components.gather(1, components.abs().argmax(1, keepdim=True)) < 0, -1.0, 1.0)


class VectorLoss(LossTerm):
    """Distance between the student's and the teacher's vectors of the same texts.

    Args:
        distance: ``squared`` (sentence-transformers' ``MSELoss`` takes the mean over the numbers instead of their sum),
            or ``cosine``.
        widths: what to do if the two models' vectors have different widths. ``equal`` refuses them. ``pca`` compares
            with the teacher's vectors along their first principal components over the training texts. ``project``
            compares a trained linear map of the student's vectors, which is not a part of the saved student.
        prefixes: numbers of leading components that are compared, each with its length set to 1 (Matryoshka, Kusupati
            et al. 2022, Eq. 1); the loss is the mean over them. Empty compares the vectors as they are.
    """

    weighs_examples = True
    components: Tensor

    def __init__(
        self,
        distance: Distance = "squared",
        widths: Annotated[
            Literal["equal", "pca", "project"],
            Assumption(
                "the components are applied without centering, as in sentence-transformers' script", "SBERT", "pca"
            ),
        ] = "equal",
        prefixes: list[int] | None = None,
    ) -> None:
        super().__init__()
        self.distance, self.widths, self.prefixes = distance, widths, prefixes or []
        self.fits_teacher = widths == "pca"

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        require_vectors(outputs)
        assert teacher is not None
        self.student_needs = self.teacher_needs = FeatureRequest(logits=True)
        own, other = student.num_labels, teacher.num_labels
        compared = other
        if self.widths == "pca":
            if own > other:
                problem = f"the student's vectors have {own} numbers, more than the teacher's {other}"
                raise UserError(".widths", "pca", problem, "Take " + override("vectors.widths", "project") + ".")
            self.register_buffer("components", torch.zeros(own, other))
            compared = own
        elif self.widths == "project":
            self.projection = nn.Linear(own, other, bias=False)
        elif own != other:
            problem = f"the student's vectors have {own} numbers, the teacher's {other}"
            remedy = "Take " + override("vectors.widths", "pca") + " or " + override("vectors.widths", "project")
            raise UserError(".widths", "equal", problem, remedy)
        require_prefixes(self.prefixes, compared)

    def fit(self, teacher: Iterable[Features]) -> None:
        logits = (features.logits for features in teacher)
        width = len(self.components)
        self.components.copy_(principal_components((part for part in logits if part is not None), width))

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        own, target = student.logits_OC, teacher.logits_OC
        if self.widths == "pca":
            target = target @ self.components.T.to(target.dtype)
        elif self.widths == "project":
            own = self.projection(own)
        pairs = [(prefix(own, size), prefix(target, size)) for size in self.prefixes] or [(own, target)]
        return torch.stack([vector_distance(*pair, self.distance, batch.example_weights) for pair in pairs]).mean()


class SimilarityLoss(LossTerm):
    """KL divergence of the similarities within a batch, see ``similarity_kl``; the widths of vectors may differ.

    It depends on the batch: with ``optim.accumulation`` or several processes, each part compares its own texts only.

    Args:
        temperature: temperature of both distributions.
        prefixes: numbers of leading components of the student's vectors that are compared, each with all of the
            teacher's; the loss is the mean over them. Empty compares whole vectors.
    """

    version = 2  # rounds otherwise
    weighs_examples = True
    compares_examples = True

    def __init__(
        self,
        temperature: Annotated[
            float, Field(gt=0), Assumption("0.05, as in contrastive training of sentence vectors", "similarities", 0.05)
        ] = 0.05,
        prefixes: list[int] | None = None,
    ) -> None:
        super().__init__()
        self.temperature, self.prefixes = temperature, prefixes or []

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        require_vectors(outputs)
        self.student_needs = self.teacher_needs = FeatureRequest(logits=True)
        require_prefixes(self.prefixes, student.num_labels)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        sizes = self.prefixes or [student.logits_OC.shape[1]]
        own, other, weights = student.logits_OC, teacher.logits_OC, batch.example_weights
        return torch.stack([similarity_kl(own[:, :size], other, self.temperature, weights) for size in sizes]).mean()


class MarginLoss(LossTerm):
    """Squared error of the margins between texts whose scores are a column of the data, see ``margin_error``.

    A training row has three texts and a margin (query, relevant, irrelevant; Hofstätter et al. 2020, with the scores of
    a cross-encoder), or two texts and a score. With two texts the term depends on the batch.

    Args:
        similarity: ``cosine`` or ``dot`` product of two vectors.
        scale: factor of the student's similarities, for scores on another scale.
    """

    reads_teacher = False
    reads_labels = frozenset({"labels"})
    weighs_examples = True  # texts that no row names, as those of weight 0, change nothing
    compares_examples = True

    def __init__(
        self, similarity: Literal["cosine", "dot"] = "cosine", scale: Annotated[float, Field(gt=0)] = 1.0
    ) -> None:
        super().__init__()
        self.similarity, self.scale = similarity, scale

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        require_vectors(outputs)
        self.student_needs = FeatureRequest(logits=True)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        if batch.texts_of_rows is None or batch.labels is None or batch.texts_of_rows.shape[1] not in (2, 3):
            problem = "needs training rows of two or three texts with a score"
            remedy = "Name them: " + override("task.train_columns", ["<query>", "<positive>", "<negative>"])
            raise UserError("task.label", None, problem, remedy)
        vectors = functional.normalize(student.logits_OC, dim=-1) if self.similarity == "cosine" else student.logits_OC
        texts = vectors[batch.texts_of_rows]
        similarities = (texts[:, :1] * texts[:, 1:]).sum(-1) * self.scale
        return margin_error(similarities, batch.labels.to(similarities))


def prefix(vectors_BC: Tensor, size: int) -> Tensor:
    """Return the first ``size`` numbers of each vector, divided by their length."""
    return functional.normalize(vectors_BC[:, :size], dim=-1)


def require_vectors(outputs: Outputs) -> None:
    """Raise a UserError, relative to the term, if the outputs are not vectors of texts."""
    if outputs.has_labels:
        problem = "compares vectors of texts, which this task does not have"
        remedy = "Take a task of vectors: " + override("task", "stsb_vectors") + ", or custom_vectors."
        raise UserError(".term", None, problem, remedy)


def require_prefixes(prefixes: list[int], width: int) -> None:
    """Raise a UserError, relative to the term, if a prefix is not a part of vectors of ``width`` numbers."""
    for size in prefixes:
        if not 1 <= size <= width:
            raise UserError(".prefixes", size, f"must be between 1 and {width}, the width that is compared")
