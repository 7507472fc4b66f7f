"""Distillation of intermediate layers: PKD, CKD and ALP-KD as one term with different data (Eqs. 3-7).

``conf/method/{pkd,ckd,alp,pkd_original}.yaml`` say which mapping, combination and distance make which method; the
``cos`` term of ``internal.yaml`` is one more.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from torch import Tensor

from distill_runner.common.errors import UserError
from distill_runner.common.readings import Reading
from distill_runner.datasets.batches import Batch
from distill_runner.methods import losses
from distill_runner.methods.base import Progress
from distill_runner.methods.combinations import Attend, Combination, Concatenate, Select
from distill_runner.methods.layer_mapping import Attention, LayerMapping
from distill_runner.methods.layered import LayeredTerm
from distill_runner.models.encoders import EncoderShape
from distill_runner.models.features import FeatureRequest, Features

DISTANCES = {
    "normalized": losses.normalized_squared_distance,
    "mse": losses.mean_squared_error,
    "normalized_mse": losses.normalized_mean_squared_error,
    "cosine": losses.cosine_distance,
}


class HiddenStateLoss(LayeredTerm):
    """Distance between the [CLS] states of student layers and combinations of the teacher's.

    Args:
        mapping: which teacher layers belong to which student layer.
        combine: ``select`` the one layer (PKD), ``concatenate`` and project (CKD), or ``attend`` (ALP).
        distance: ``normalized`` is PKD's Eq. 3, ``mse`` that of Eq. 7; ``normalized_mse`` that of PKD's code;
            ``cosine`` that of internal representations (Eq. 3).
        over_layers: ``sum`` over the supervised student layers (the paper) or their ``mean`` (PKD's code).
        attention: for ``attend`` only; the parameter-free dot product by default.
        project: for ``concatenate`` only, which side is projected; the teacher's by default.

    ``observed`` has ``alpha_entropy_<j>`` in nats for each student layer that attends: near 0, the raw dot
    product has saturated the softmax, and one teacher layer takes all.
    """

    def __init__(
        self,
        mapping: LayerMapping,
        combine: Annotated[
            Literal["select", "concatenate", "attend"],
            Reading("a projection of its own for each student layer", "ALP-KD Eq. 4", "concatenate"),
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
        self.observed = {f"alpha_entropy_{j}": losses.attention_entropy(alpha) for j, alpha in alphas}
        return self.reduced([self.distance(mine, target) for mine, target in sides.values()])
