"""Losses as pure functions on tensors; each is a mean over the batch.

Shapes: B examples, C classes, H features, K teacher layers.
"""

import torch
from torch import Tensor
from torch.nn import functional


def cross_entropy(logits_BC: Tensor, labels_B: Tensor) -> Tensor:
    """Cross entropy with class indices (ALP-KD Eq. 1, as a mean instead of a sum over the examples)."""
    return functional.cross_entropy(logits_BC, labels_B)


def soft_cross_entropy(student_BC: Tensor, teacher_BC: Tensor, temperature: float, scale_by_t2: bool) -> Tensor:
    """Cross entropy of the student's softmax with the teacher's, both at T (ALP-KD Eq. 2), times T² if asked.

    It differs from the KL divergence by the teacher's entropy only, so the gradient is the same.
    """
    teacher = functional.softmax(teacher_BC / temperature, dim=-1)
    student = functional.log_softmax(student_BC / temperature, dim=-1)
    loss = -(teacher * student).sum(dim=-1).mean()
    return loss * temperature**2 if scale_by_t2 else loss


def squared_error(outputs_B1: Tensor, targets_B: Tensor) -> Tensor:
    """Squared error of a regression head's single output."""
    return (outputs_B1.squeeze(-1) - targets_B).square().mean()


def normalized_squared_distance(student_BH: Tensor, teacher_BH: Tensor) -> Tensor:
    """Squared distance of the L2-normalised states, summed over the features: 0 to 4 (ALP-KD Eq. 3, PKD).

    The minus sign that the paper prints before the sum is a slip: the distance is minimised.
    """
    return (_normalized(student_BH) - _normalized(teacher_BH)).square().sum(dim=-1).mean()


def mean_squared_error(student_BH: Tensor, target_BH: Tensor) -> Tensor:
    """Squared error, mean over the features (ALP-KD Eq. 7)."""
    return (student_BH - target_BH).square().mean()


def normalized_mean_squared_error(student_BH: Tensor, teacher_BH: Tensor) -> Tensor:
    """``normalized_squared_distance`` as PKD's published code has it: mean, not sum, over the features."""
    return mean_squared_error(_normalized(student_BH), _normalized(teacher_BH))


def cosine_distance(student_BH: Tensor, teacher_BH: Tensor) -> Tensor:
    """1 minus the cosine of the states: 0 to 2 (internal representations, Eq. 3)."""
    return (1 - functional.cosine_similarity(student_BH, teacher_BH, dim=-1)).mean()


def attention_entropy(alpha_BK: Tensor) -> Tensor:
    """Entropy of a row of weights in nats, 0 (one layer takes all) to ln K (uniform); mean over the rows."""
    return -torch.xlogy(alpha_BK, alpha_BK).sum(dim=-1).mean()


def _normalized(states_BH: Tensor) -> Tensor:
    return functional.normalize(states_BH, dim=-1)
