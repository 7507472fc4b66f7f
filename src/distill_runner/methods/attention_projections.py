"""Trained query, key and value projections for a student layer that attends to teacher layers.

``hidden_states.Attend`` uses them. Shapes: B examples, H features, K teacher layers, A attention heads of D features.
"""

import torch
from torch import Tensor, nn

from distill_runner.common.errors import UserError
from distill_runner.methods.layer_mapping import Attention


class KeysQueriesValues(nn.Module):
    """Trained projections to the student's width, without bias, split into attention heads (ALP-KD, appendix).

    **reading**: there is no output projection after the concatenated heads, unlike in Vaswani et al. The paper mentions
    only keys, queries and "a dedicated value vector for each key".

    Args:
        width_student, width_teacher: number of features of the states of the two models.
        num_keys: number of teacher layers that the student layer attends to.
        attention: number of heads, and whether each teacher layer has a separate value projection.
    Raises:
        UserError: the number of heads does not divide the student's width.
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
