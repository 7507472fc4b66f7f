"""Well-read students (Turc et al. 2019): what pre-training needs beside the terms of ``base``; the rest is stages."""

from torch import Tensor

from distill_runner import losses
from distill_runner.batches import Batch
from distill_runner.encoders import Shape
from distill_runner.errors import UserError
from distill_runner.features import Features, Needs
from distill_runner.methods.base import Kind, Progress, Term


class NextSentence(Term):
    """Cross entropy of "does the second segment follow the first?" (BERT, section 3.1, task 2).

    With masked language modelling it is the paper's MLM+.
    """

    reads_teacher = False
    reads_labels = frozenset({"is_next"})

    def bind(self, student: Shape, teacher: Shape | None, kind: Kind) -> None:
        if student.model_type != "bert":
            problem = f"a model of the type {student.model_type} has no head for next sentence prediction"
            raise UserError(".", None, problem, "pretraining=mlm pre-trains without it.")
        self.student_needs = Needs(next_sentence=True)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        assert student.next_sentence is not None
        assert batch.is_next is not None
        return losses.cross_entropy(student.next_sentence, batch.is_next)
