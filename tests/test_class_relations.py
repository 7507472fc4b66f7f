"""DKD, DIST and standardized logits: float64 NumPy references, numbers by hand, gradients, and refusals."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill_runner.common.errors import UserError
from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import Method, Progress
from distill_runner.methods.config import TermConfig
from distill_runner.methods.outputs import Classes, LabelSets, Outputs, Score
from distill_runner.methods.predictions import correlation_over_classes, correlation_over_outputs, decoupled_divergences
from distill_runner.models.features import EncoderShape, Features
from distill_runner.tasks.questions.losses import Spans

Array = NDArray[np.float64]
NOTHING = torch.zeros(0, dtype=torch.long)
LABELS = torch.tensor([0, 2, 1, 2, 0])
BATCH = Batch(NOTHING, NOTHING, NOTHING, NOTHING, torch.arange(5), (), labels=LABELS)
DKD = {"term": "decoupled_soft_labels", "alpha": 0.7, "beta": 3.0, "temperature": 2.0}
DIST = {"term": "correlated_soft_labels", "over_classes": 0.7, "over_examples": 3.0, "temperature": 2.0}
STANDARDIZED = {"term": "soft_labels", "temperature": 2.0, "standardize": True}
SHAPE = EncoderShape(2, 8, 2, 3, 9, "bert")
TERMS = {"dkd": DKD, "dist": DIST, "standardized": STANDARDIZED}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def softmax(logits: Array) -> Array:
    powers = np.exp(logits)
    return powers / powers.sum(axis=-1, keepdims=True)


def kl(p: Array, q: Array) -> float:
    return float((p * np.log(p / q)).sum())


def reference_dkd(student: Array, teacher: Array) -> float:
    total = 0.0
    for z, t, y in zip(student, teacher, LABELS.tolist(), strict=True):
        q, p = softmax(z / 2), softmax(t / 2)
        target = kl(np.array([p[y], 1 - p[y]]), np.array([q[y], 1 - q[y]]))
        others = [np.delete(x, y) / (1 - x[y]) for x in (p, q)]
        total += 4 * (0.7 * target + 3 * kl(*others)) / len(student)
    return total


def reference_dist(student: Array, teacher: Array) -> float:
    q, p = softmax(student / 2), softmax(teacher / 2)

    def distance(a: Array, b: Array) -> float:
        return float(np.mean([1 - np.corrcoef(x, y)[0, 1] for x, y in zip(a, b, strict=True)]))

    return 4 * (0.7 * distance(q, p) + 3 * distance(q.T, p.T))


def reference_standardized(student: Array, teacher: Array) -> float:
    z, t = ((x - x.mean(axis=1, keepdims=True)) / (x.std(axis=1, keepdims=True) + 1e-7) for x in (student, teacher))
    return 4 * kl(softmax(t / 2), softmax(z / 2)) / len(student)


REFERENCES: dict[str, Callable[[Array, Array], float]] = {
    "dkd": reference_dkd,
    "dist": reference_dist,
    "standardized": reference_standardized,
}


def loss(node: dict[str, Any], outputs: Outputs | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    term = TermConfig.parse(node).make()
    term.bind(SHAPE, SHAPE, outputs or Classes())
    return lambda student, teacher: term(Features(student), Features(teacher), BATCH, Progress(0, 0, 1, 1))


def test_what_is_logged_keeps_no_graph_of_autograd() -> None:
    method = Method({"dkd": TermConfig.parse(DKD).make()}, {"dkd": 1.0}).bind(SHAPE, SHAPE, Classes())
    method(Features(numbers(5, 3).requires_grad_()), Features(numbers(5, 3, seed=1)), BATCH, Progress(0, 0, 1, 1))
    assert [value.requires_grad for value in method.diagnostics().values()] == [False, False]


@pytest.mark.parametrize("name", TERMS)
def test_equals_the_float64_reference(name: str) -> None:
    student, teacher = numbers(5, 3), numbers(5, 3, seed=1)
    expected = REFERENCES[name](student.numpy(), teacher.numpy())
    value = loss(TERMS[name])(student, teacher)
    assert value.item() == pytest.approx(expected, rel=1e-12)
    assert value.shape == ()
    assert loss(TERMS[name])(student.float(), teacher.float()).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", TERMS)
def test_gradient(name: str) -> None:
    leaves = tuple(values.requires_grad_() for values in (numbers(5, 3), numbers(5, 3, seed=1)))
    assert torch.autograd.gradcheck(loss(TERMS[name]), leaves)


def test_decoupled_parts_by_hand() -> None:
    # The teacher has (1/2, 1/4, 1/4) with label 0, the student (1/4, 1/2, 1/4).
    teacher, student = (torch.tensor([p]).log() for p in ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25]))
    target, others = decoupled_divergences(student, teacher, torch.tensor([0]), 1.0)
    assert target.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    # The others are (1/2, 1/2) and (2/3, 1/3).
    assert others.item() == pytest.approx(0.5 * math.log(3 / 4) + 0.5 * math.log(3 / 2))


def test_correlations_by_hand() -> None:
    # Over the classes: (1, 2, 3) with (2, 4, 6) is 1, and with (3, 2, 1) is -1.
    student, teacher = torch.tensor([[1.0, 2, 3], [1, 2, 3]]), torch.tensor([[2.0, 4, 6], [3, 2, 1]])
    assert correlation_over_classes(student, teacher).item() == pytest.approx((0 + 2) / 2)
    assert correlation_over_outputs(student.T, teacher.T).item() == pytest.approx(1)


def test_predictions_that_nearly_cancel_keep_their_digits() -> None:
    """Logits of a thousandth: in float32 the correlations were off by 1e-4."""
    student, teacher = ((1e-3 * numbers(5, 3, seed=seed)).float() for seed in (0, 1))
    expected = reference_dist(student.double().numpy(), teacher.double().numpy())
    assert loss(TERMS["dist"])(student, teacher).item() == pytest.approx(expected, rel=1e-6)


def test_the_parts_add_up_to_the_divergence() -> None:
    student, teacher = numbers(5, 3), numbers(5, 3, seed=1)
    target, others = decoupled_divergences(student, teacher, LABELS, 2.0)
    p, log_q = (teacher / 2).softmax(-1), (student / 2).log_softmax(-1)
    whole = torch.nn.functional.kl_div(log_q, p, reduction="none").sum(-1)
    rest = 1 - p.gather(1, LABELS[:, None])[:, 0]
    torch.testing.assert_close(target + rest * others, whole)


def test_a_sure_teacher_gives_finite_numbers() -> None:
    teacher, student = torch.tensor([[200.0, 0, 0]]).repeat(5, 1), numbers(5, 3).float().requires_grad_()
    for node in TERMS.values():
        value = loss(node)(student, teacher)
        (gradient,) = torch.autograd.grad(value, student)
        assert torch.isfinite(value)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("outputs", [Score(), LabelSets(), Spans()], ids=lambda outputs: type(outputs).__name__)
def test_outputs_that_are_no_classes_are_refused(name: str, outputs: Outputs) -> None:
    key, remedy = (".standardize", "loss.kd.standardize=false") if name == "standardized" else (".term", "method=rkd")
    with pytest.raises(UserError, match=f"this task's outputs are no classes\n  {remedy}$") as caught:
        loss(TERMS[name], outputs)
    assert caught.value.key == key
