"""Well-read students (Turc et al. 2019): what pre-training needs beside the terms of ``base``; the rest is stages."""

from torch import Tensor

from distill_runner.common.errors import UserError
from distill_runner.datasets.batches import Batch
from distill_runner.methods import losses
from distill_runner.methods.base import LossTerm, Progress
from distill_runner.methods.outputs import Outputs
from distill_runner.models.encoders import EncoderShape
from distill_runner.models.features import FeatureRequest, Features


class HardLabels(LossTerm):
    """The loss against the gold labels: cross entropy of classes (ALP-KD Eq. 1), squared error of a score."""

    reads_teacher = False
    reads_labels = frozenset({"labels"})

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        self.outputs, self.mean_over = outputs, outputs.unit
        self.student_needs = FeatureRequest(logits=True)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        assert student.logits is not None
        return self.outputs.gold(student.logits, batch)


class NextSentence(LossTerm):
    """Cross entropy of "does the second segment follow the first?" (BERT, section 3.1, task 2).

    With masked language modelling it is the paper's MLM+.
    """

    reads_teacher = False
    reads_labels = frozenset({"is_next"})

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        if student.model_type != "bert":
            problem = f"a model of the type {student.model_type} has no head for next sentence prediction"
            raise UserError(".", None, problem, "pretraining=mlm pre-trains without it.")
        self.student_needs = FeatureRequest(next_sentence=True)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        assert student.next_sentence is not None
        assert batch.is_next is not None
        return losses.cross_entropy(student.next_sentence, batch.is_next)
