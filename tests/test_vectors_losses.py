"""Terms on vectors of texts: float64 references, gradients, numbers by hand, and what the options mean."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from distill_runner.common.errors import UserError
from distill_runner.methods import vectors as terms
from distill_runner.methods.base import Method, Progress
from distill_runner.models.features import EncoderShape, Features
from distill_runner.tasks.vectors.texts import Vectors

PROGRESS = Progress(0, 0, 1, 1)
BATCH: Any = SimpleNamespace(example_weights=None)


def shape(vector_width: int) -> EncoderShape:
    return EncoderShape(2, 16, 2, vector_width, 100, "bert")


def drawn(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def value(term: Any, student: torch.Tensor, teacher: torch.Tensor, batch: Any = BATCH) -> torch.Tensor:
    loss: torch.Tensor = term.double()(Features(student), Features(teacher), batch, PROGRESS)
    return loss if student.requires_grad else loss.detach()


def bound(term: Any, own: int, other: int) -> Any:
    term.bind(shape(own), shape(other), Vectors())
    return term


def test_numbers_by_hand() -> None:
    student, teacher = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    assert terms.vector_distance(student, teacher, "squared") == pytest.approx((2 + 1) / 2)
    assert terms.vector_distance(student, teacher, "cosine") == pytest.approx((1 + 0) / 2)
    # Three texts, of which the teacher finds the first two equal and the third at a right angle; the student finds all
    # at right angles. Rows of the teacher: (e/(e+1), 1/(e+1)) twice, and (1/2, 1/2); the student's are (1/2, 1/2).
    teacher, student = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.eye(3)
    p = math.e / (math.e + 1)
    row = p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p))
    assert terms.similarity_kl(student, teacher, 1.0) == pytest.approx(2 * row / 3, abs=1e-6)
    assert terms.margin_error(torch.tensor([[0.9, 0.1]]), torch.tensor([0.5])) == pytest.approx(0.09)
    assert terms.margin_error(torch.tensor([[0.9], [0.1]]), torch.tensor([0.5, 0.2])) == pytest.approx(0.25)


@given(st.integers(3, 9), st.integers(1, 6), st.floats(0.02, 5), st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_similarities_row_by_row(size: int, width: int, temperature: float, seed: int) -> None:
    student, teacher = drawn(size, width, seed=seed), drawn(size, width + 2, seed=seed + 1)
    total = 0.0
    for i in range(size):
        rows = []
        for side in (student.numpy(), teacher.numpy()):
            unit = side / np.linalg.norm(side, axis=1, keepdims=True)
            scores = np.array([unit[i] @ unit[j] for j in range(size) if j != i]) / temperature
            powers = np.exp(scores - scores.max())
            rows.append(powers / powers.sum())
        total += float((rows[1] * np.log(rows[1] / rows[0])).sum()) if (rows[0] > 0).all() else 0.0
    assert terms.similarity_kl(student, teacher, temperature) == pytest.approx(total / size, rel=1e-7, abs=1e-9)
    student, teacher = (torch.cat([side, side.flip(0)[:2]]) for side in (student, teacher))
    weights = torch.tensor([(size + 2) / size] * size + [0.0] * 2)  # as batches of graphs are filled up
    assert terms.similarity_kl(student, teacher, temperature, weights) == pytest.approx(
        total / size, rel=1e-6, abs=1e-9
    )


@given(st.integers(2, 9), st.integers(0, 99))
@settings(deadline=None, max_examples=20)
def test_margins_are_those_of_all_pairs(size: int, seed: int) -> None:
    similarity, score = drawn(size, 1, seed=seed), drawn(size, seed=seed + 1)
    pairs = [(i, j) for i in range(size) for j in range(size) if i != j]
    errors = [float((similarity[i, 0] - similarity[j, 0]) - (score[i] - score[j])) ** 2 for i, j in pairs]
    assert terms.margin_error(similarity, score) == pytest.approx(np.mean(errors))


@pytest.mark.parametrize("distance", ["squared", "cosine"])
def test_gradients(distance: Any) -> None:
    teacher = drawn(4, 3, seed=5)
    student = drawn(4, 3).requires_grad_()
    scores = drawn(4, seed=8)
    for function in (
        lambda x: terms.vector_distance(x, teacher, distance),
        lambda x: terms.similarity_kl(x, teacher, 0.3),
        lambda x: terms.margin_error(x[:, :2], scores),
        lambda x: terms.margin_error(x[:, :1], scores),
        lambda x: value(bound(terms.VectorLoss(distance, prefixes=[1, 2]), 3, 3), x, teacher),
    ):
        assert torch.autograd.gradcheck(function, (student,))


@pytest.mark.parametrize("splits", [1, 3])
def test_principal_components_are_scikit_learn_s(splits: int) -> None:
    vectors = drawn(50, 6) * torch.tensor([5, 4, 3, 2, 1, 0.5]) + 2
    own = terms.principal_components(vectors.chunk(splits), 3).numpy()
    reference = PCA(3).fit(vectors.numpy()).components_
    assert own == pytest.approx(np.sign((own * reference).sum(1, keepdims=True)) * reference, abs=1e-9)
    assert all(row[np.abs(row).argmax()] > 0 for row in own)


def test_a_narrower_student_learns_the_components() -> None:
    term = bound(terms.VectorLoss(widths="pca"), 2, 4)
    teacher = drawn(20, 4)
    Method({"vectors": term}, {"vectors": 1.0}).fit(lambda: iter([Features(teacher[:9]), Features(teacher[9:])]))
    components = terms.principal_components([teacher], 2)
    student = drawn(20, 2, seed=4)
    expected = (student - teacher @ components.T).square().sum(1).mean()
    assert value(term, student, teacher) == pytest.approx(float(expected), rel=1e-6)
    assert "components" in term.state_dict()


def test_a_projection_is_trained_but_is_no_part_of_the_student() -> None:
    torch.manual_seed(0)
    term = bound(terms.VectorLoss(widths="project"), 2, 4)
    student, teacher = drawn(5, 2), drawn(5, 4, seed=1)
    expected = (student @ term.projection.weight.double().T - teacher).square().sum(1).mean()
    assert value(term, student, teacher) == pytest.approx(expected.item())
    assert [name for name, _ in term.named_parameters()] == ["projection.weight"]


def test_prefixes_are_normalized_and_averaged() -> None:
    student, teacher = drawn(5, 4), drawn(5, 4, seed=1)

    def part(size: int) -> float:
        sides = [side[:, :size] / side[:, :size].norm(dim=1, keepdim=True) for side in (student, teacher)]
        return float((sides[0] - sides[1]).square().sum(1).mean())

    assert value(bound(terms.VectorLoss(prefixes=[2, 4]), 4, 4), student, teacher) == pytest.approx(
        (part(2) + part(4)) / 2
    )
    mean = (terms.similarity_kl(student[:, :1], teacher, 0.05) + terms.similarity_kl(student, teacher, 0.05)) / 2
    assert value(bound(terms.SimilarityLoss(prefixes=[1, 4]), 4, 4), student, teacher) == pytest.approx(float(mean))


def test_a_margin_reads_the_rows_of_the_batch() -> None:
    vectors = drawn(6, 3)
    rows, scores = torch.tensor([[4, 0, 2], [1, 5, 3]]), torch.tensor([0.3, -0.2])
    term = bound(terms.MarginLoss("dot", scale=2.0), 3, 3)
    loss = value(term, vectors, vectors, SimpleNamespace(texts_of_rows=rows, labels=scores))
    margins = [2 * float(vectors[q] @ vectors[p] - vectors[q] @ vectors[n]) for q, p, n in rows.tolist()]
    assert loss == pytest.approx(np.mean([(m - float(s)) ** 2 for m, s in zip(margins, scores, strict=True)]))
    with pytest.raises(UserError, match="two or three texts with a score"):
        value(term, vectors, vectors, SimpleNamespace(texts_of_rows=None, labels=None))


@pytest.mark.parametrize(
    ("term", "widths", "problem"),
    [
        (terms.VectorLoss(), (2, 4), "2 numbers, the teacher's 4"),
        (terms.VectorLoss(widths="pca"), (5, 4), "more than the teacher's 4"),
        (terms.VectorLoss(prefixes=[5]), (4, 4), "between 1 and 4"),
        (terms.SimilarityLoss(prefixes=[0]), (4, 9), "between 1 and 4"),
    ],
)
def test_what_does_not_fit_is_refused(term: Any, widths: tuple[int, int], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        bound(term, *widths)


def test_the_mean_of_an_ensemble_has_length_1() -> None:
    first, second = (torch.nn.functional.normalize(drawn(4, 3, seed=seed), dim=1) for seed in (0, 1))
    mean = Vectors().ensemble_mean([first, second], [0.25, 0.75])
    expected = 0.25 * first + 0.75 * second
    assert torch.allclose(mean, expected / expected.norm(dim=1, keepdim=True))
