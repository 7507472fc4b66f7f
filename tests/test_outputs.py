"""Losses and means of each meaning of a head's outputs, by hand."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import Progress
from distill_runner.methods.outputs import Classes, LabelSets, Outputs, Score
from distill_runner.methods.predictions import HardLabels, SoftLabels, SoftLabelsPerClass
from distill_runner.models.features import Features

NOTHING = torch.zeros(0, dtype=torch.long)
LOG3 = math.log(3)  # softmax of (log 3, 0) is (3/4, 1/4), and sigmoid of log 3 is 3/4


def batch(labels: Tensor | None = None) -> Batch:
    return Batch(NOTHING, NOTHING, NOTHING, NOTHING, torch.arange(2), (), labels=labels)


def test_classes_may_have_weights() -> None:
    """Examples count by the weight of their label, and the mean is over the examples, not over the weights."""
    logits, labels = torch.tensor([[LOG3, 0.0], [LOG3, 0.0]]), torch.tensor([0, 1])
    right, wrong = math.log(4 / 3), math.log(4)
    assert Classes().label_loss(logits, batch(labels)).item() == pytest.approx((right + wrong) / 2)
    weighted = Classes([0.5, 3.0]).label_loss(logits, batch(labels))
    assert weighted.item() == pytest.approx((0.5 * right + 3 * wrong) / 2)


def test_smoothed_labels_are_those_of_torch() -> None:
    logits, labels = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 1, 0])
    term = HardLabels(smoothing=0.1)
    term.outputs = Classes()
    loss = term(Features(logits), Features(), batch(labels), Progress(0, 0, 1, 1))
    torch.testing.assert_close(loss, functional.cross_entropy(logits, labels, label_smoothing=0.1))


def test_label_sets_are_means_over_examples_and_labels() -> None:
    logits = torch.tensor([[LOG3, 0.0], [-LOG3, LOG3]])
    labels = torch.tensor([[1, 0], [1, 1]])
    expected = (math.log(4 / 3) + math.log(2) + math.log(4) + math.log(4 / 3)) / 4
    assert LabelSets().label_loss(logits, batch(labels)).item() == pytest.approx(expected)


def test_soft_labels_of_label_sets_by_hand() -> None:
    """At T = 3 the teacher's 3 log 3 is 3/4 and the student's -3 log 3 is 1/4: 3/4 log 4 + 1/4 log 4/3."""
    student, teacher = torch.tensor([[-3 * LOG3, -3 * LOG3]]), torch.tensor([[3 * LOG3, 3 * LOG3]])
    expected = 3 / 4 * math.log(4) + 1 / 4 * math.log(4 / 3)
    assert LabelSets().soft_label_loss(student, teacher, batch(), 3.0).item() == pytest.approx(expected)


def test_soft_labels_of_scores_and_classes_by_hand() -> None:
    score = Score().soft_label_loss(torch.tensor([[1.0], [4.0]]), torch.tensor([[3.0], [5.0]]), batch(), 5.0)
    assert score.item() == (4 + 1) / 2
    assert Score().label_loss(torch.tensor([[1.0], [4.0]]), batch(torch.tensor([3.0, 3.0]))).item() == (4 + 1) / 2
    student, teacher = torch.zeros(1, 2), torch.tensor([[2 * LOG3, 0.0]])
    assert Classes().soft_label_loss(student, teacher, batch(), 2.0).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize(("outputs", "factor"), [(Classes(), 9), (LabelSets(), 9), (Score(), 1)])
@pytest.mark.parametrize("term", [SoftLabels, SoftLabelsPerClass])
def test_soft_labels_are_multiplied_by_t2_where_outputs_have_a_temperature(
    term: type[SoftLabels], outputs: Outputs, factor: int
) -> None:
    width, losses = 1 if isinstance(outputs, Score) else 2, list[float]()
    student, teacher = torch.zeros(2, width), torch.tensor([[1.0, 2.0], [3.0, 5.0]])[:, :width]
    for scale_by_t2 in (True, False):
        loss = term(3.0, scale_by_t2)
        loss.outputs = outputs
        losses.append(loss(Features(student), Features(teacher), batch(), Progress(0, 0, 1, 1)).item())
    assert losses[0] == pytest.approx(factor * losses[1])
    assert losses[1] > 0


@pytest.mark.parametrize(("outputs", "classes"), [(Classes(), 3), (LabelSets(), 1), (Score(), 1)])
def test_the_squared_distance_of_logits(outputs: Outputs, classes: int) -> None:
    student, teacher = torch.zeros(2, 3), torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 2.0]])
    assert outputs.logit_loss(student, teacher, batch(), "sum").item() == pytest.approx((14 + 4) / 2)
    assert outputs.logit_loss(student, teacher, batch(), "mean").item() == pytest.approx((14 + 4) / 2 / 3)
    assert outputs.num_summed_classes(student) == classes


@pytest.mark.parametrize("outputs", [Classes(), LabelSets(), Score()])
def test_an_ensemble_is_the_weighted_mean_of_its_members(outputs: Outputs) -> None:
    """Of probabilities for classes and labels, and of the outputs themselves for scores."""
    draw = torch.Generator().manual_seed(0)
    width = 1 if isinstance(outputs, Score) else 3
    members = [torch.randn(4, width, generator=draw, dtype=torch.float64) for _ in range(3)]
    weights = [0.5, 0.2, 0.3]

    def probabilities(logits: Tensor) -> Tensor:
        match outputs:
            case Classes():
                return logits.softmax(-1)
            case LabelSets():
                return logits.sigmoid()
        return logits

    expected = sum(weight * probabilities(one) for weight, one in zip(weights, members, strict=True))
    mean = outputs.ensemble_mean(members, weights)
    torch.testing.assert_close(probabilities(mean), expected)
    if isinstance(outputs, Classes):  # logarithms of probabilities, not only logits up to a constant
        torch.testing.assert_close(mean.exp(), expected)
    with pytest.raises(ValueError, match="zip"):
        outputs.ensemble_mean(members, weights[:2])
