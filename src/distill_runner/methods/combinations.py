"""How the states of teacher layers become one target for a student layer: select, concatenate, attend.

B examples, H features, K teacher layers, A attention heads of D features each.
"""

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from distill_runner.common.errors import UserError
from distill_runner.methods.layer_mapping import Attention, single


class Combination(nn.Module, ABC):
    """The two sides of the comparison for each supervised student layer j: its state and a target.

    Args:
        layers: a resolved mapping.
        width_student, width_teacher: features of the states of the two models.
    """

    name: str
    same_width = True

    def __init__(self, layers: list[list[int]], width_student: int, width_teacher: int) -> None:
        super().__init__()
        self.layers = {j: entry for j, entry in enumerate(layers, start=1) if entry}
        self.alpha: dict[int, Tensor] = {}
        """Weights of the last forward by student layer, (B, A, K), detached; empty without attention."""
        if self.same_width and width_student != width_teacher:
            raise UserError(
                "student",
                None,
                f"its states have {width_student} features, the teacher's {width_teacher}; "
                f"{self.name} compares them as they are",
                "Take a student of the teacher's width, or project: method=ckd or attention=kqv1.",
            )

    def forward(self, student: dict[int, Tensor], teacher: dict[int, Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
        """From states (B, H) by layer to the two sides of the comparison, for the student layers that are given."""
        self.alpha.clear()
        return {
            j: self.sides(j, student[j], torch.stack([teacher[k] for k in entry], dim=1))
            for j, entry in self.layers.items()
            if j in student
        }

    @abstractmethod
    def sides(self, j: int, student_BH: Tensor, teacher_BKH: Tensor) -> tuple[Tensor, Tensor]:
        """The two sides for student layer j: its state (B, H) and the K states (B, K, H) of its teacher layers."""


class Select(Combination):
    """The one teacher layer of each entry, as it is (PKD; ALP-KD Eq. 3)."""

    name = "combine=select"

    def __init__(self, layers: list[list[int]], width_student: int, width_teacher: int) -> None:
        super().__init__(layers, width_student, width_teacher)
        single(layers)

    def sides(self, j: int, student_BH: Tensor, teacher_BKH: Tensor) -> tuple[Tensor, Tensor]:
        return student_BH, teacher_BKH[:, 0]


class Concatenate(Combination):
    """The teacher layers side by side and a trained affine projection (CKD; ALP-KD Eq. 4). Widths may differ.

    **reading**: a projection of its own for each student layer, for ALP-KD says "a single projection layer" and not of
    how many buckets; and a plain mean squared error behind it (``distance``), for which ALP-KD names none.

    Args:
        project: ``teacher`` projects the concatenation to the student's width, ``W_j`` of shape (H, K * H),
            as the paper describes it; ``student`` projects the student to the concatenation's width, as the
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
    """A mean of the teacher layers, weighted by their similarity to the student layer (ALP-KD Eqs. 5 and 6).

    Gradients flow through the weights into the student. With ``kqv`` every student layer has projections of
    its own, as every layer of a decoder has in Vaswani et al.
    """

    def __init__(self, layers: list[list[int]], width_student: int, width_teacher: int, attention: Attention) -> None:
        self.same_width = attention.kind == "dot"
        self.name = f"attention={attention.kind}"
        super().__init__(layers, width_student, width_teacher)
        self.attention = attention
        self.projections = nn.ModuleDict()
        for j, entry in self.layers.items():
            self.projections[str(j)] = (
                KeysQueriesValues(width_student, width_teacher, len(entry), attention)
                if attention.kind == "kqv"
                else Plain()
            )

    def sides(self, j: int, student_BH: Tensor, teacher_BKH: Tensor) -> tuple[Tensor, Tensor]:
        query_BAD, key_BAKD, value_BAKD = self.projections[str(j)](student_BH, teacher_BKH)
        alpha_BAK = attention_weights(query_BAD, key_BAKD, self.attention.scale, self.attention.normalize)
        self.alpha[j] = alpha_BAK.detach()
        return student_BH, (alpha_BAK[..., None] * value_BAKD).sum(dim=2).flatten(1)


def attention_weights(query_BAD: Tensor, key_BAKD: Tensor, scale: str, normalize: bool) -> Tensor:
    """Softmax over the keys of the (optionally scaled) dot products: (B, A, K), rows sum to 1."""
    if normalize:
        query_BAD, key_BAKD = functional.normalize(query_BAD, dim=-1), functional.normalize(key_BAKD, dim=-1)
    # No matmul: elementwise products are summed in full precision under autocast, and alike in any batch.
    scores_BAK = (query_BAD[:, :, None] * key_BAKD).sum(dim=-1)
    if scale == "sqrt_dim":
        scores_BAK = scores_BAK / query_BAD.shape[-1] ** 0.5
    return functional.softmax(scores_BAK, dim=-1)


class Plain(nn.Module):
    """The states themselves as query, keys and values of a single head."""

    def forward(self, student_BH: Tensor, teacher_BKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return student_BH[:, None], teacher_BKH[:, None], teacher_BKH[:, None]


class KeysQueriesValues(nn.Module):
    """Trained projections to the student's width without bias, heads concatenated (ALP-KD, appendix).

    **reading**: no projection behind the concatenated heads, as Vaswani et al. have one; the paper speaks of keys,
    queries and "a dedicated value vector for each key" alone.
    """

    def __init__(self, width_student: int, width_teacher: int, num_keys: int, attention: Attention) -> None:
        super().__init__()
        self.heads = attention.heads or 1
        if width_student % self.heads:
            problem = f"must divide the student's width, {width_student}"
            raise UserError("attention.heads", self.heads, problem)
        self.query = nn.Linear(width_student, width_student, bias=False)
        self.key = nn.Linear(width_teacher, width_student, bias=False)
        num_values = num_keys if attention.values == "per_layer" else 1
        self.values = nn.ModuleList(nn.Linear(width_teacher, width_student, bias=False) for _ in range(num_values))

    def forward(self, student_BH: Tensor, teacher_BKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if len(self.values) == 1:
            value_BKH = self.values[0](teacher_BKH)
        else:
            value_BKH = torch.stack([v(teacher_BKH[:, k]) for k, v in enumerate(self.values)], dim=1)
        query_BAD = self.query(student_BH).unflatten(-1, (self.heads, -1))
        return query_BAD, self._split(self.key(teacher_BKH)), self._split(value_BKH)

    def _split(self, states_BKH: Tensor) -> Tensor:
        return states_BKH.unflatten(-1, (self.heads, -1)).transpose(1, 2)
