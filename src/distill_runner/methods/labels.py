"""Well-read students (Turc et al. 2019): what pre-training needs beside the terms of ``base``; the rest is stages."""

from torch import Tensor

from distill_runner.common.errors import UserError
from distill_runner.datasets.batches import Batch
from distill_runner.methods import losses
from distill_runner.methods.base import Kind, LossTerm, Progress
from distill_runner.models.encoders import EncoderShape
from distill_runner.models.features import FeatureRequest, Features


class HardLabels(LossTerm):
    """Cross entropy with the gold labels (ALP-KD Eq. 1); squared error of the output for regression."""

    reads_teacher = False
    reads_labels = frozenset({"labels"})
    mean_over = "output"

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, kind: Kind) -> None:
        self.loss = losses.squared_error if kind == "regression" else losses.cross_entropy
        self.student_needs = FeatureRequest(logits=True)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        assert student.logits is not None
        assert batch.labels is not None
        return self.loss(student.logits, batch.labels)


class NextSentence(LossTerm):
    """Cross entropy of "does the second segment follow the first?" (BERT, section 3.1, task 2).

    With masked language modelling it is the paper's MLM+.
    """

    reads_teacher = False
    reads_labels = frozenset({"is_next"})

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, kind: Kind) -> None:
        if student.model_type != "bert":
            problem = f"a model of the type {student.model_type} has no head for next sentence prediction"
            raise UserError(".", None, problem, "pretraining=mlm pre-trains without it.")
        self.student_needs = FeatureRequest(next_sentence=True)

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        assert student.next_sentence is not None
        assert batch.is_next is not None
        return losses.cross_entropy(student.next_sentence, batch.is_next)
