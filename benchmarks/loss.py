"""ALP-KD's loss as a first script would compute it, without the package's losses.

B: examples. C: classes or, for spans, padded tokens. L: padded tokens. H: features.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax, mse_loss, softmax

from benchmarks.setting import BETA, ETA, LAMBDA, TEMPERATURE

INPUTS = ("input_ids", "token_type_ids", "attention_mask")


def logits_of(output: Any, mask_BL: Tensor) -> Tensor:
    """Return logits of classes (B, C), or of a span's start and end (2B, L) with the lowest float32 on padding."""
    if "logits" in output:
        return torch.as_tensor(output["logits"])
    ends = [output[f"{end}_logits"].masked_fill(mask_BL == 0, torch.finfo(torch.float32).min) for end in ENDS]
    return torch.cat(ends)


ENDS = ("start", "end")


def labels_of(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the labels in the order of ``logits_of``."""
    return batch["labels"] if "labels" in batch else torch.cat([batch[f"{end}_positions"] for end in ENDS])


def divergence(student_BC: Tensor, teacher_BC: Tensor, temperature: float) -> Tensor:
    """KL divergence of the softened predictions from the teacher's, mean over the examples."""
    student, teacher = (log_softmax(logits / temperature, -1) for logits in (student_BC, teacher_BC))
    return kl_div(student, teacher, reduction="batchmean", log_target=True)


def loss_of(student_BC: Tensor, teacher_BC: Tensor, labels_B: Tensor, intermediate: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum of cross entropy, divergence from the teacher and distances of the student's layers."""
    soft = divergence(student_BC, teacher_BC, TEMPERATURE)
    hard = cross_entropy(student_BC, labels_B)
    return BETA * hard + ETA * TEMPERATURE**2 * soft + LAMBDA * torch.stack(list(intermediate)).sum()


def layer_distance(student_BH: Tensor, teacher_BH: Sequence[Tensor]) -> Tensor:
    """Squared error of a student layer's [CLS] states to the teacher's, averaged by similarity (Eqs. 5-7)."""
    states = torch.stack(list(teacher_BH), 1)
    alpha = softmax((states @ student_BH[:, :, None]).squeeze(-1), -1)
    return mse_loss(student_BH, (alpha[:, :, None] * states).sum(1))
