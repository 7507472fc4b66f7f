"""Distillation of the states of all tokens: TinyBERT's hidden states and embeddings, DistilBERT's cosine loss.

``conf/method/{tinybert,distilbert}.yaml`` choose the layers and the distance of each method.
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
    """Distance between student layers and their teacher layers, over the states of all tokens (TinyBERT, Eq. 8).

    Args:
        mapping: which teacher layer belongs to which student layer.
        distance: ``mse``, mean over tokens and features (TinyBERT), or ``cosine``, 1 minus the cosine (DistilBERT).
        project: whether to train a linear map from the student's to the teacher's width. All layers share one map, as
            in TinyBERT's code; its paper has one symbol for it. Without a map both widths must be equal.
        over_layers: ``sum`` (TinyBERT, Eq. 11 and Algorithm) or ``mean`` over the supervised layers.
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
    """Distance between the embeddings: the inputs of the first layers, after positions and norm (TinyBERT, Eq. 9).

    Args:
        distance, project: as in ``TokenStateLoss``, but with a separate linear map.
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
