"""Distillation of [CLS] states: one loss term for PKD, CKD and ALP-KD, which differ in options only (Eqs. 3-7).

A ``Combination`` turns the states of several teacher layers into one target for a student layer: it selects,
concatenates or attends. A distance compares the student layer with the target. The mapping, combination and distance of
each method are in ``conf/method/{pkd,ckd,alp,pkd_original}.yaml``, and in ``internal.yaml`` for its term ``cos``.

Shapes: B examples, H features, K teacher layers, A attention heads of D features each.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from distill_runner.common.errors import UserError
from distill_runner.common.readings import Reading
from distill_runner.datasets.batches import Batch
from distill_runner.methods.attention_projections import KeysQueriesValues
from distill_runner.methods.base import LayeredTerm, Progress
from distill_runner.methods.layer_mapping import Attention, LayerMapping, single
from distill_runner.models.encoders import EncoderShape
from distill_runner.models.features import FeatureRequest, Features


def normalized_squared_distance(student_BH: Tensor, teacher_BH: Tensor) -> Tensor:
    """Squared distance of the L2-normalised states, 0 to 4 (ALP-KD Eq. 3, PKD): sum over features, mean over rows.

    ALP-KD prints a minus sign before the sum, which is a slip: the distance is minimised.
    """
    return (_normalized(student_BH) - _normalized(teacher_BH)).square().sum(dim=-1).mean()


def mean_squared_error(student_BH: Tensor, target_BH: Tensor) -> Tensor:
    """Squared error, mean over the features and the rows (ALP-KD Eq. 7)."""
    return (student_BH - target_BH).square().mean()


def normalized_mean_squared_error(student_BH: Tensor, teacher_BH: Tensor) -> Tensor:
    """``normalized_squared_distance`` as in PKD's published code: mean instead of sum over the features."""
    return mean_squared_error(_normalized(student_BH), _normalized(teacher_BH))


def cosine_distance(student_BH: Tensor, teacher_BH: Tensor) -> Tensor:
    """1 minus the cosine similarity of the states, 0 to 2; mean over the rows (internal representations, Eq. 3)."""
    return (1 - functional.cosine_similarity(student_BH, teacher_BH, dim=-1)).mean()


def attention_entropy(alpha_BK: Tensor) -> Tensor:
    """Entropy of each row of weights in nats, 0 (all weight on one layer) to ln K (uniform); mean over the rows."""
    return -torch.xlogy(alpha_BK, alpha_BK).sum(dim=-1).mean()


def _normalized(states_BH: Tensor) -> Tensor:
    return functional.normalize(states_BH, dim=-1)


DISTANCES = {
    "normalized": normalized_squared_distance,
    "mse": mean_squared_error,
    "normalized_mse": normalized_mean_squared_error,
    "cosine": cosine_distance,
}


class Combination(nn.Module, ABC):
    """Base of modules that build, for each supervised student layer j, the two tensors to compare: state and target.

    Args:
        layers: resolved mapping: one list of teacher layers per student layer.
        width_student, width_teacher: number of features of the states of the two models.
    Raises:
        UserError: the widths differ, and the combination compares the states without a projection.
    """

    name: str
    same_width = True

    def __init__(self, layers: list[list[int]], width_student: int, width_teacher: int) -> None:
        super().__init__()
        self.layers = {j: entry for j, entry in enumerate(layers, start=1) if entry}
        self.alpha: dict[int, Tensor] = {}
        """Attention weights (B, A, K) of the last forward by student layer, detached; empty without attention."""
        if self.same_width and width_student != width_teacher:
            raise UserError(
                "student",
                None,
                f"its states have {width_student} features, the teacher's {width_teacher}; "
                f"{self.name} compares them without a projection",
                "Take a student of the teacher's width, or a projection: method=ckd or attention=kqv1.",
            )

    def forward(self, student: dict[int, Tensor], teacher: dict[int, Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the pair (state, target) for each layer in ``student``. The inputs are states (B, H) by layer."""
        self.alpha.clear()
        return {
            j: self.sides(j, student[j], torch.stack([teacher[k] for k in entry], dim=1))
            for j, entry in self.layers.items()
            if j in student
        }

    @abstractmethod
    def sides(self, j: int, student_BH: Tensor, teacher_BKH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pair (state, target) for student layer j, from its state and its K teacher layers' states."""


class Select(Combination):
    """Combination that takes the single teacher layer of each student layer unchanged (PKD; ALP-KD Eq. 3)."""

    name = "combine=select"

    def __init__(self, layers: list[list[int]], width_student: int, width_teacher: int) -> None:
        super().__init__(layers, width_student, width_teacher)
        single(layers)

    def sides(self, j: int, student_BH: Tensor, teacher_BKH: Tensor) -> tuple[Tensor, Tensor]:
        return student_BH, teacher_BKH[:, 0]


class Concatenate(Combination):
    """Concatenation of the teacher layers with a trained affine projection (CKD; ALP-KD Eq. 4). Widths may differ.

    **reading**: each student layer has a separate projection: ALP-KD says "a single projection layer", but not for how
    many buckets. The distance after the projection is a plain mean squared error (``distance``); ALP-KD names none.

    Args:
        project: ``teacher`` projects the concatenation to the student's width, with ``W_j`` of shape (H, K * H), as
            the paper describes it. ``student`` projects the student's state to the width of the concatenation, as the
            published code of CKD does.
    """

    same_width = False

    def __init__(
        self,
        layers: list[list[int]],
        width_student: int,
        width_teacher: int,
        project: Literal["teacher", "student"],
    ) -> None:
        super().__init__(layers, width_student, width_teacher)
        self.project = project
        self.projections = nn.ModuleDict()
        for j, entry in self.layers.items():
            widths = (len(entry) * width_teacher, width_student)
            self.projections[str(j)] = nn.Linear(*(widths if project == "teacher" else widths[::-1]))

    def sides(self, j: int, student_BH: Tensor, teacher_BKH: Tensor) -> tuple[Tensor, Tensor]:
        target, project = teacher_BKH.flatten(1), self.projections[str(j)]
        return (student_BH, project(target)) if self.project == "teacher" else (project(student_BH), target)


class Attend(Combination):
    """Mean of the teacher layers, weighted by their similarity to the student layer (ALP-KD Eqs. 5 and 6).

    Gradients flow through the weights into the student. With ``kqv`` every student layer has separate projections, like
    every decoder layer in Vaswani et al.
    """

    def __init__(self, layers: list[list[int]], width_student: int, width_teacher: int, attention: Attention) -> None:
        self.same_width = attention.kind == "dot"
        self.name = f"attention={attention.kind}"
        super().__init__(layers, width_student, width_teacher)
        self.attention = attention
        own = self.layers.items() if attention.kind == "kqv" else ()
        self.projections = nn.ModuleDict(
            {str(j): KeysQueriesValues(width_student, width_teacher, len(entry), attention) for j, entry in own}
        )

    def sides(self, j: int, student_BH: Tensor, teacher_BKH: Tensor) -> tuple[Tensor, Tensor]:
        query_BAD, key_BAKD, value_BAKD = student_BH[:, None], teacher_BKH[:, None], teacher_BKH[:, None]
        if self.projections:
            query_BAD, key_BAKD, value_BAKD = self.projections[str(j)](student_BH, teacher_BKH)
        alpha_BAK = attention_weights(query_BAD, key_BAKD, self.attention.scale, self.attention.normalize)
        self.alpha[j] = alpha_BAK.detach()
        return student_BH, (alpha_BAK[..., None] * value_BAKD).sum(dim=2).flatten(1)


def attention_weights(query_BAD: Tensor, key_BAKD: Tensor, scale: str, normalize: bool) -> Tensor:
    """Softmax over the keys of the dot products, which ``scale`` can divide by sqrt(D): (B, A, K), rows sum to 1."""
    if normalize:
        query_BAD, key_BAKD = functional.normalize(query_BAD, dim=-1), functional.normalize(key_BAKD, dim=-1)
    # A matmul would run in low precision under autocast, and its rounding could depend on the batch.
    scores_BAK = (query_BAD[:, :, None] * key_BAKD).sum(dim=-1)
    if scale == "sqrt_dim":
        scores_BAK = scores_BAK / query_BAD.shape[-1] ** 0.5
    return functional.softmax(scores_BAK, dim=-1)


class HiddenStateLoss(LayeredTerm):
    """Distance between the [CLS] states of student layers and combinations of the teacher's [CLS] states.

    Args:
        mapping: which teacher layers belong to which student layer.
        combine: ``select`` the single layer (PKD), ``concatenate`` and project (CKD), or ``attend`` (ALP).
        distance: ``normalized`` (PKD; ALP-KD Eq. 3), ``mse`` (ALP-KD Eq. 7), ``normalized_mse`` (PKD's code) or
            ``cosine`` (internal representations, Eq. 3).
        over_layers: ``sum`` (ALP-KD) or ``mean`` (PKD's code) over the supervised student layers.
        attention: options of ``attend``; the parameter-free dot product by default. No other combination takes it.
        project: which side ``concatenate`` projects; the teacher by default. No other combination takes it.

    ``observed`` has ``alpha_entropy_<j>`` in nats for each student layer j that attends. A value near 0 means that the
    dot products saturate the softmax, and that one teacher layer has all the weight.
    """

    def __init__(
        self,
        mapping: LayerMapping,
        combine: Annotated[
            Literal["select", "concatenate", "attend"],
            Reading("a separate projection for each student layer", "ALP-KD Eq. 4", "concatenate"),
        ],
        distance: Literal["normalized", "mse", "normalized_mse", "cosine"],
        over_layers: Literal["sum", "mean"] = "sum",
        attention: Attention | None = None,
        project: Literal["teacher", "student"] | None = None,
    ) -> None:
        super().__init__(mapping, over_layers)
        for key, value, owner in (("attention", attention, "attend"), ("project", project, "concatenate")):
            if value is not None and combine != owner:
                problem = f"combine={combine} does not use it"
                raise UserError(f".{key}", value if key == "project" else None, problem, f"Only combine={owner} does.")
        self.attention = attention or Attention()
        self.combine, self.project = combine, project or "teacher"
        self.distance = DISTANCES[distance]

    def build(self, layers: list[list[int]], student: EncoderShape, teacher: EncoderShape) -> None:
        self.combination = self._combination(layers, student.width, teacher.width)

    def needs_of(self, layers: Mapping[int, list[int]]) -> tuple[FeatureRequest, FeatureRequest]:
        return FeatureRequest(cls=frozenset(layers)), FeatureRequest(
            cls=frozenset(k for entry in layers.values() for k in entry)
        )

    def _combination(self, layers: list[list[int]], width_student: int, width_teacher: int) -> Combination:
        match self.combine:
            case "select":
                return Select(layers, width_student, width_teacher)
            case "concatenate":
                return Concatenate(layers, width_student, width_teacher, self.project)
            case "attend":
                return Attend(layers, width_student, width_teacher, self.attention)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        sides = self.combination({j: student.cls[j] for j in self.supervised}, teacher.cls)
        alphas = self.combination.alpha.items()
        self.observed = {f"alpha_entropy_{j}": attention_entropy(alpha) for j, alpha in alphas}
        return self.reduced([self.distance(mine, target) for mine, target in sides.values()])
