"""Distillation of the states of all tokens: TinyBERT's hidden states and embeddings, DistilBERT's cosine.

``conf/method/{tinybert,distilbert}.yaml`` say which layers and which distance make which method.
"""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor, nn

from distill_runner.common.errors import UserError
from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import LayeredTerm, LossTerm, Progress
from distill_runner.methods.hidden_states import cosine_distance, mean_squared_error
from distill_runner.methods.layer_mapping import LayerMapping, single
from distill_runner.methods.outputs import Outputs
from distill_runner.models.encoders import EncoderShape
from distill_runner.models.features import FeatureRequest, Features

DISTANCES = {"mse": mean_squared_error, "cosine": cosine_distance}


class TokenStateLoss(LayeredTerm):
    """Distance between the states of all tokens of student layers and of their teacher layers (TinyBERT, Eq. 8).

    Args:
        mapping: which teacher layer belongs to which student layer.
        distance: ``mse`` is a mean over features too (TinyBERT); ``cosine`` is 1 minus the cosine (DistilBERT).
        project: train one linear map of the student's states to the teacher's width, for all layers (TinyBERT's code;
            its paper has one symbol for it), or compare states as they are, which takes equal widths.
        over_layers: ``sum`` (TinyBERT, Eq. 11 and Algorithm) or ``mean``.
    """

    mean_over = "token"

    def __init__(
        self,
        mapping: LayerMapping,
        distance: Literal["mse", "cosine"] = "mse",
        project: bool = True,
        over_layers: Literal["sum", "mean"] = "sum",
    ) -> None:
        super().__init__(mapping, over_layers)
        self.distance, self.projects = DISTANCES[distance], project

    def build(self, layers: list[list[int]], student: EncoderShape, teacher: EncoderShape) -> None:
        single(layers)
        self.project = _projection(student, teacher, self.projects)

    def needs_of(self, layers: Mapping[int, list[int]]) -> tuple[FeatureRequest, FeatureRequest]:
        return FeatureRequest(states=frozenset(layers)), FeatureRequest(
            states=frozenset(k for entry in layers.values() for k in entry)
        )

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        pairs = [(student.states[j], teacher.states[k]) for j, (k,) in self.supervised.items()]
        return self.reduced([self.distance(self.project(mine), target) for mine, target in pairs])


class EmbeddingLoss(LossTerm):
    """Distance between what the first layers read, positions and norm included (TinyBERT, Eq. 9).

    Args:
        distance, project: as of ``TokenStateLoss``; the linear map is another one than the layers'.
    """

    mean_over = "token"

    def __init__(self, distance: Literal["mse", "cosine"] = "mse", project: bool = True) -> None:
        super().__init__()
        self.distance, self.projects = DISTANCES[distance], project

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        assert teacher is not None
        self.project = _projection(student, teacher, self.projects)
        self.student_needs = self.teacher_needs = FeatureRequest(states=frozenset({0}))

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        return self.distance(self.project(student.states[0]), teacher.states[0])


def _projection(student: EncoderShape, teacher: EncoderShape, trained: bool) -> nn.Module:
    if trained:
        return nn.Linear(student.width, teacher.width)
    if student.width != teacher.width:
        problem = f"its states have {student.width} features, the teacher's {teacher.width}"
        raise UserError("student", None, problem, "Take a student of the teacher's width, or project=true.")
    return nn.Identity()
