"""ALP-KD's loss as a first script would have it, written without the package's losses.

B examples, C classes, H features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss, softmax

from benchmarks.setting import BETA, ETA, LAMBDA, TEMPERATURE


def loss_of(mine_BC: Tensor, taught_BC: Tensor, labels_B: Tensor, intermediate: Sequence[Tensor]) -> Tensor:
    """Cross entropy, soft cross entropy and the distances of the student's layers, weighted."""
    taught = softmax(taught_BC / TEMPERATURE, -1)
    soft = -(taught * torch.log_softmax(mine_BC / TEMPERATURE, -1)).sum(-1).mean()
    hard = cross_entropy(mine_BC, labels_B)
    return BETA * hard + ETA * TEMPERATURE**2 * soft + LAMBDA * torch.stack(list(intermediate)).sum()


def layer_distance(mine_BH: Tensor, taught_BH: Sequence[Tensor]) -> Tensor:
    """Squared error of one student layer's [CLS] states to the teacher's, weighted by their similarity (Eqs. 5-7)."""
    states = torch.stack(list(taught_BH), 1)
    alpha = softmax((states @ mine_BH[:, :, None]).squeeze(-1), -1)
    return mse_loss(mine_BH, (alpha[:, :, None] * states).sum(1))
