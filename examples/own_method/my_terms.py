"""Relational distillation (Park et al. 2019, Eq. 4): distances between examples, whatever the widths of the models."""

import torch
from torch.nn import functional

from distill_runner.methods.base import LossTerm
from distill_runner.models.features import FeatureRequest


class PairwiseDistances(LossTerm):
    """Huber loss between the distances of all pairs of [CLS] states of a batch, each side over its mean distance.

    Args:
        delta: where the loss turns from squared to linear.
    """

    def __init__(self, delta: float = 1.0) -> None:
        super().__init__()
        self.delta = delta

    def bind(self, student, teacher, outputs) -> None:
        self.student_needs = FeatureRequest(cls=frozenset({student.num_layers}))
        self.teacher_needs = FeatureRequest(cls=frozenset({teacher.num_layers}))

    def forward(self, student, teacher, batch, progress) -> torch.Tensor:
        states = (next(iter(side.cls.values())) for side in (student, teacher))
        mine, target = (distances / distances.mean() for distances in map(functional.pdist, states))
        return functional.huber_loss(mine, target, delta=self.delta)
