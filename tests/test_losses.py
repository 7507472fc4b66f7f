"""Each loss against float64 NumPy written from the paper's formula, a number by hand, and its gradient."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill_runner.methods import hidden_states
from distill_runner.methods.outputs import soft_cross_entropy, squared_error

Array = NDArray[np.float64]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def unit(states: Array) -> Array:
    return states / np.sqrt((states**2).sum(axis=-1, keepdims=True))


def reference_soft_cross_entropy(student: Array, teacher: Array) -> float:
    return float(-(softmax(teacher / 5) * np.log(softmax(student / 5))).sum(axis=-1).mean())


def reference_squared_error(outputs: Array, targets: Array) -> float:
    return float(((outputs[:, 0] - targets) ** 2).mean())


def reference_distance(student: Array, teacher: Array) -> float:
    return float((2 - 2 * (unit(student) * unit(teacher)).sum(axis=-1)).mean())  # |a - b|² of unit vectors


def reference_mse(student: Array, target: Array) -> float:
    return float(((student - target) ** 2).sum() / student.size)


def reference_normalized_mse(student: Array, teacher: Array) -> float:
    return reference_distance(student, teacher) / student.shape[-1]


def reference_entropy(weights: Array) -> float:
    return float(np.mean([-sum(p * math.log(p) for p in row) for row in weights[:, 0]]))


soft_at_5 = partial(soft_cross_entropy, temperature=5.0)
CASES = [
    pytest.param(soft_at_5, reference_soft_cross_entropy, (numbers(5, 3), numbers(5, 3, seed=1)), id="kd"),
    pytest.param(squared_error, reference_squared_error, (numbers(5, 1), numbers(5, seed=1)), id="regression"),
    pytest.param(
        hidden_states.normalized_squared_distance, reference_distance, (numbers(5, 8), numbers(5, 8, seed=1)), id="pkd"
    ),
    pytest.param(hidden_states.mean_squared_error, reference_mse, (numbers(5, 8), numbers(5, 8, seed=1)), id="mse"),
    pytest.param(
        hidden_states.normalized_mean_squared_error,
        reference_normalized_mse,
        (numbers(5, 8), numbers(5, 8, seed=1)),
        id="pkd_original",
    ),
    pytest.param(
        hidden_states.attention_entropy, reference_entropy, (numbers(5, 4).softmax(-1)[:, None],), id="entropy"
    ),
]


@pytest.mark.parametrize(("loss", "reference", "inputs"), CASES)
def test_equals_the_float64_reference(
    loss: Callable[..., Tensor], reference: Callable[..., float], inputs: tuple[Tensor, ...]
) -> None:
    expected = reference(*(x.numpy() for x in inputs))
    assert loss(*inputs).item() == pytest.approx(expected, rel=1e-12)
    single = loss(*(x.float() if x.is_floating_point() else x for x in inputs))
    assert single.item() == pytest.approx(expected, rel=1e-5)
    assert single.shape == ()


@pytest.mark.parametrize(("loss", "reference", "inputs"), CASES)
def test_gradient(loss: Callable[..., Tensor], reference: Callable[..., float], inputs: tuple[Tensor, ...]) -> None:
    leaves = tuple(x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs)
    assert torch.autograd.gradcheck(loss, leaves)


def test_soft_cross_entropy_by_hand() -> None:
    # At T = 2 the teacher's (2 ln 3, 0) is (3/4, 1/4) and the student's (0, 0) is (1/2, 1/2): ln 2.
    teacher, student = torch.tensor([[2 * math.log(3), 0.0]]), torch.zeros(1, 2)
    assert soft_cross_entropy(student, teacher, 2.0).item() == pytest.approx(math.log(2))


def test_soft_cross_entropy_has_the_gradient_of_kl() -> None:
    student, teacher = numbers(5, 3).requires_grad_(), numbers(5, 3, seed=1)
    (ours,) = torch.autograd.grad(soft_cross_entropy(student, teacher, 3.0), student)
    kl = torch.nn.functional.kl_div((student / 3).log_softmax(-1), (teacher / 3).softmax(-1), reduction="batchmean")
    (theirs,) = torch.autograd.grad(kl, student)
    torch.testing.assert_close(ours, theirs)
