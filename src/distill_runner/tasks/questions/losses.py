"""Losses on start and end logits, over windows of different lengths that are concatenated without padding.

Shapes: T tokens of B windows; the two columns are start and end. ``bounds`` (B + 1,) holds the row of the first token
of each window, followed by T. Each loss is a mean over windows; a softmax is over the tokens of one window.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from distill_runner.datasets.batches import Batch, Unit
from distill_runner.methods.outputs import Outputs, weighted_mean

Reduction = Literal["mean", "sum"]


def segment_log_softmax(values_T2: Tensor, bounds: Tensor) -> Tensor:
    """Return the log-softmax over the rows of each window, separately for each column."""
    window_T = window_index(bounds, len(values_T2))
    index_T2 = window_T[:, None].expand_as(values_T2)
    shape = (len(bounds) - 1, values_T2.shape[1])
    highest_B2 = values_T2.new_full(shape, -torch.inf).scatter_reduce(0, index_T2, values_T2.detach(), "amax")
    shifted_T2 = values_T2 - highest_B2[window_T]
    return shifted_T2 - values_T2.new_zeros(shape).index_add(0, window_T, shifted_T2.exp()).log()[window_T]


def window_index(bounds: Tensor, num_rows: int) -> Tensor:
    """Return the index of the window of each row, (T,)."""
    return torch.arange(len(bounds) - 1, device=bounds.device).repeat_interleave(bounds.diff(), output_size=num_rows)


def window_sums(values_T: Tensor, bounds: Tensor) -> Tensor:
    """Return the sum over the tokens of each window, (B,)."""
    return values_T.new_zeros(len(bounds) - 1).index_add(0, window_index(bounds, len(values_T)), values_T)


class Spans(Outputs):
    """Start and end logits of the answer for every token of a window.

    Args:
        soft_ends: mean or sum of start and end in the loss on the teacher's predictions.
    """

    unit: ClassVar[Unit] = "example"

    def __init__(self, soft_ends: Reduction = "mean") -> None:
        self.soft_ends = soft_ends

    def label_loss(self, logits_OC: Tensor, batch: Batch) -> Tensor:
        """Return the cross entropy with the first and last token of the answer, mean of start and end.

        The labels (B, 2) count these tokens from the first token of the window.
        """
        bounds = batch.bounds
        log_T2 = segment_log_softmax(logits_OC, bounds)
        return weighted_mean(-log_T2.gather(0, bounds[:-1, None] + batch.gold).mean(-1), batch.example_weights)

    def soft_label_loss(self, student_OC: Tensor, teacher_OC: Tensor, batch: Batch, temperature: float) -> Tensor:
        """Return the cross entropy of the student's softmax over a window's tokens with the teacher's softmax.

        It is the mean of start and end (DistilBERT's script), or their sum (TextBrewer).
        """
        bounds = batch.bounds
        teacher_probs_T2 = segment_log_softmax(teacher_OC / temperature, bounds).exp()
        student_log_probs_T2 = segment_log_softmax(student_OC / temperature, bounds)
        loss_B = window_sums(-(teacher_probs_T2 * student_log_probs_T2).sum(-1), bounds)
        return weighted_mean(loss_B, batch.example_weights) / (2 if self.soft_ends == "mean" else 1)

    def logit_loss(self, student_OC: Tensor, target_OC: Tensor, batch: Batch, reduction: Reduction) -> Tensor:
        """Return the squared error of the logits (Pro-KD, Annealing-KD), mean of start and end.

        Args:
            reduction: mean over the tokens of a window, or their sum.
        """
        bounds = batch.bounds
        error_B = window_sums((student_OC - target_OC).square().mean(dim=-1), bounds)
        return weighted_mean(error_B / bounds.diff() if reduction == "mean" else error_B, batch.example_weights)
