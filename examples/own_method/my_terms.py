"""Relational distillation (Park et al. 2019, Eq. 4) compares distances between examples, so model widths may differ."""

import torch
from torch.nn import functional

from distill_runner.methods.base import LossTerm
from distill_runner.models.features import FeatureRequest


class PairwiseDistances(LossTerm):
    """Huber loss on the distances between all pairs of [CLS] states in a batch, divided by each model's mean distance.

    Args:
        delta: distance at which the loss changes from squared to linear.
    """

    def __init__(self, delta: float = 1.0) -> None:
        super().__init__()
        self.delta = delta

    def bind(self, student, teacher, outputs) -> None:
        self.student_needs = FeatureRequest(cls=frozenset({student.num_layers}))
        self.teacher_needs = FeatureRequest(cls=frozenset({teacher.num_layers}))

    def forward(self, student, teacher, batch, progress) -> torch.Tensor:
        states = (next(iter(side.cls.values())) for side in (student, teacher))
        source, target = (distances / distances.mean() for distances in map(functional.pdist, states))
        return functional.huber_loss(source, target, delta=self.delta)
