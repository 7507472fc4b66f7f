"""Losses on ragged windows against the padded computation in float64, numbers by hand, and their gradients."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from distill_runner.tasks.questions import losses

LENGTHS = [5, 3, 9, 1]
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0)
LABELS = torch.tensor([[0, 4], [2, 2], [3, 7], [0, 0]])


def numbers(seed: int) -> Tensor:
    return 3 * torch.randn(int(BOUNDS[-1]), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


STUDENT, TEACHER = numbers(0), numbers(1)


def padded(values: Tensor, fill: float) -> Tensor:
    """(B, L, 2)"""
    return torch.nn.utils.rnn.pad_sequence(values.split(LENGTHS), batch_first=True, padding_value=fill)


def reference_gold(student: Tensor) -> Tensor:
    logits = padded(student, -torch.inf)
    return (cross_entropy(logits[..., 0], LABELS[:, 0]) + cross_entropy(logits[..., 1], LABELS[:, 1])) / 2


def reference_soft(student: Tensor, temperature: float) -> Tensor:
    """Cross entropy of start and end, mean over the windows and both ends."""
    ours = (padded(student, -torch.inf) / temperature).log_softmax(1)
    theirs = (padded(TEACHER, -torch.inf) / temperature).softmax(1)
    return -(theirs * ours.masked_fill(theirs == 0, 0)).sum(1).mean()


def reference_match(student: Tensor) -> Tensor:
    error = (padded(student, 0.0) - padded(TEACHER, 0.0)).square().mean(-1)
    return (error.sum(1) / torch.tensor(LENGTHS)).mean()


def batch_of(bounds: Tensor, labels: Tensor | None = None) -> Any:
    return SimpleNamespace(bounds=bounds, gold=labels, example_weights=None)


SPANS, BATCH = losses.Spans(), batch_of(BOUNDS, LABELS)
CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "gold": (lambda s: SPANS.label_loss(s, BATCH), reference_gold),
    "soft": (lambda s: SPANS.soft_label_loss(s, TEACHER, BATCH, 4.0), lambda s: reference_soft(s, 4.0)),
    "soft, sum of the ends": (
        lambda s: losses.Spans("sum").soft_label_loss(s, TEACHER, BATCH, 2.0),
        lambda s: reference_soft(s, 2.0) * 2,
    ),
    "match": (lambda s: SPANS.logit_loss(s, TEACHER, BATCH, "mean"), reference_match),
    "match, sum": (
        lambda s: SPANS.logit_loss(s, TEACHER, BATCH, "sum"),
        lambda s: (padded(s, 0.0) - padded(TEACHER, 0.0)).square().sum() / 8,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ragged_losses_are_the_padded_ones(name: str) -> None:
    ragged, reference = CASES[name]
    torch.testing.assert_close(ragged(STUDENT), reference(STUDENT), rtol=1e-12, atol=1e-12)
    ours, theirs = (function(STUDENT.clone().requires_grad_()) for function in (ragged, reference))
    assert ours.ndim == theirs.ndim == 0
    gradients: list[Any] = []
    for function in (ragged, reference):
        student = STUDENT.clone().requires_grad_()
        gradients += torch.autograd.grad(function(student), student)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    assert torch.autograd.gradcheck(CASES[name][0], STUDENT.clone().requires_grad_())


def test_the_losses_of_one_window_by_hand() -> None:
    """Two tokens, start logits 0 and ln 3, end logits both 0: probabilities 1/4, 3/4 and 1/2, 1/2."""
    student = torch.tensor([[0.0, 0.0], [torch.tensor(3.0).log(), 0.0]], dtype=torch.float64)
    batch = batch_of(torch.tensor([0, 2]), torch.tensor([[1, 0]]))
    gold = SPANS.label_loss(student, batch)
    assert gold.item() == pytest.approx((torch.tensor(4 / 3).log() + torch.tensor(2.0).log()).item() / 2)
    teacher = torch.zeros(2, 2, dtype=torch.float64)
    assert SPANS.logit_loss(student, teacher, batch, "mean").item() == pytest.approx(3**0 * 1.2069489608 / 4)
    soft = SPANS.soft_label_loss(student, teacher, batch, 1.0).item()
    assert soft == pytest.approx((-(0.5 * torch.tensor(3 / 16).log()) + torch.tensor(2.0).log()).item() / 2)


def test_large_logits_do_not_overflow() -> None:
    values = torch.tensor([[1e4, -1e4], [0.0, 0.0], [1e4, 1e4]])
    log = losses.segment_log_softmax(values, torch.tensor([0, 2, 3]))
    assert torch.isfinite(log).all()
    assert log[2].tolist() == [0.0, 0.0]


def test_a_window_does_not_see_the_others() -> None:
    moved = STUDENT.clone()
    moved[BOUNDS[2] :] += 100
    log, other = (losses.segment_log_softmax(values, BOUNDS) for values in (STUDENT, moved))
    assert torch.equal(log[: BOUNDS[2]], other[: BOUNDS[2]])
