"""PKD, CKD and ALP as terms: float64 NumPy references, numbers by hand, identities, gradients, errors."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill_runner.common.errors import UserError
from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import LossTerm, Method, Progress
from distill_runner.methods.config import TermConfig
from distill_runner.methods.hidden_states import Attention, HiddenStateLoss
from distill_runner.methods.layer_mapping import LayerMapping
from distill_runner.methods.outputs import Classes
from distill_runner.methods.predictions import HardLabels, SoftLabels, SoftLabelsPerClass
from distill_runner.models.features import EncoderShape, FeatureRequest, Features

Array = NDArray[np.float64]
PROGRESS = Progress(epoch=0, step=0, num_epochs=1, num_steps=1)
KQV = {"type": "kqv", "heads": 2, "values": "per_layer", "scale": "sqrt_dim", "normalize": False}


def shape(num_layers: int, width: int = 6) -> EncoderShape:
    return EncoderShape(num_layers=num_layers, width=width, num_heads=2, num_labels=3, vocab_size=9, model_type="bert")


def features(num_layers: int, width: int = 6, seed: int = 0, batch: int = 5) -> Features:
    rng = np.random.default_rng(seed)
    states = {k: torch.from_numpy(rng.normal(size=(batch, width))) for k in range(1, num_layers + 1)}
    return Features(logits=torch.from_numpy(rng.normal(size=(batch, 3))), cls=states)


def batch(labels: Tensor | None = None) -> Batch:
    nothing = torch.zeros(0, dtype=torch.long)
    return Batch(nothing, nothing, nothing, nothing, torch.arange(5), (), labels)


def term(m: int = 4, n: int = 12, widths: tuple[int, int] = (6, 6), **options: Any) -> HiddenStateLoss:
    torch.manual_seed(0)
    bound = TermConfig.parse({"term": "hidden_states", "distance": "mse", **options}).make()
    assert isinstance(bound, HiddenStateLoss)
    bound.bind(shape(m, widths[0]), shape(n, widths[1]), Classes())
    return bound.double()


def value(bound: LossTerm, student: Features, teacher: Features) -> Tensor:
    return bound(student, teacher, batch(), PROGRESS)


def arrays(states: Features) -> dict[int, Array]:
    return {k: state.detach().numpy() for k, state in states.cls.items()}


def softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


PO = [[1, 2, 3, 4, 5], [5, 6, 7, 8, 9], [9, 10, 11, 12], []]


def test_pkd_equals_the_reference() -> None:
    student, teacher = features(4), features(12, seed=1)
    s, t = arrays(student), arrays(teacher)
    expected = 0.0
    for j, k in ((1, 1), (2, 5), (3, 9)):
        for i in range(5):
            difference = s[j][i] / np.linalg.norm(s[j][i]) - t[k][i] / np.linalg.norm(t[k][i])
            expected += difference @ difference / 5
    pkd = term(mapping={"rule": "skip"}, combine="select", distance="normalized")
    assert value(pkd, student, teacher).item() == pytest.approx(expected, rel=1e-12)
    original = term(mapping={"rule": "skip"}, combine="select", distance="normalized_mse", over_layers="mean")
    assert value(original, student, teacher).item() == pytest.approx(expected / (3 * 6), rel=1e-12)


@pytest.mark.parametrize(("scale", "normalize"), [("none", False), ("sqrt_dim", False), ("none", True)])
def test_alp_equals_the_reference(scale: str, normalize: bool) -> None:
    student, teacher = features(4), features(12, seed=1)
    s, t = arrays(student), arrays(teacher)
    expected = 0.0
    for j, entry in enumerate(PO[:3], start=1):
        for i in range(5):
            scores = np.array([s[j][i] @ t[k][i] for k in entry])
            if normalize:
                scores /= np.linalg.norm(s[j][i]) * np.array([np.linalg.norm(t[k][i]) for k in entry])
            alpha = softmax(scores / (math.sqrt(6) if scale == "sqrt_dim" else 1))
            combined = sum(a * t[k][i] for a, k in zip(alpha, entry, strict=True))
            expected += np.mean((s[j][i] - combined) ** 2) / 5
    attention = {"type": "dot", "scale": scale, "normalize": normalize}
    alp = term(mapping={"rule": "po"}, combine="attend", attention=attention)
    assert value(alp, student, teacher).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("values", ["per_layer", "shared"])
def test_keys_queries_values_equal_the_reference(values: str) -> None:
    student, teacher = features(4), features(12, width=10, seed=1)
    s, t = arrays(student), arrays(teacher)
    alp = term(mapping={"rule": "po"}, combine="attend", attention=KQV | {"values": values}, widths=(6, 10))
    weights = {name: parameter.detach().numpy() for name, parameter in alp.combination.named_parameters()}
    expected = 0.0
    for j, entry in enumerate(PO[:3], start=1):
        for i in range(5):
            query = weights[f"projections.{j}.query.weight"] @ s[j][i]
            keys = [weights[f"projections.{j}.key.weight"] @ t[k][i] for k in entry]
            own = [
                weights[f"projections.{j}.values.{0 if values == 'shared' else at}.weight"] @ t[k][i]
                for at, k in enumerate(entry)
            ]
            heads = []
            for head in (slice(0, 3), slice(3, 6)):
                alpha = softmax(np.array([query[head] @ key[head] for key in keys]) / math.sqrt(3))
                heads.append(sum(a * v[head] for a, v in zip(alpha, own, strict=True)))
            expected += np.mean((s[j][i] - np.concatenate(heads)) ** 2) / 5
    assert value(alp, student, teacher).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("project", ["teacher", "student"])
def test_ckd_equals_the_reference(project: str) -> None:
    student, teacher = features(4), features(12, width=10, seed=1)
    s, t = arrays(student), arrays(teacher)
    ckd = term(mapping={"rule": "po"}, combine="concatenate", project=project, widths=(6, 10))
    expected = 0.0
    for j, entry in enumerate(PO[:3], start=1):
        linear: Any = ckd.combination.get_submodule(f"projections.{j}")
        weight, bias = linear.weight.detach().numpy(), linear.bias.detach().numpy()
        assert weight.shape == ((6, len(entry) * 10) if project == "teacher" else (len(entry) * 10, 6))
        block = np.concatenate([t[k] for k in entry], axis=1)
        left, right = (s[j], block @ weight.T + bias) if project == "teacher" else (s[j] @ weight.T + bias, block)
        expected += float(((left - right) ** 2).mean())
    assert value(ckd, student, teacher).item() == pytest.approx(expected, rel=1e-12)


def test_alp_by_hand() -> None:
    # Scores ln 3 and 0 weigh the teacher layers 3/4 and 1/4: C = (0.75 ln 3, 0.5); the student is (1, 0).
    student = Features(cls={1: torch.tensor([[1.0, 0.0]])})
    teacher = Features(cls={1: torch.tensor([[math.log(3), 0.0]]), 2: torch.tensor([[0.0, 2.0]])})
    options: Any = {"mapping": {"rule": "all", "supervise_last": True}, "combine": "attend"}
    alp = term(m=1, n=2, widths=(2, 2), **options)
    expected = ((1 - 0.75 * math.log(3)) ** 2 + 0.5**2) / 2
    assert value(alp, student, teacher).item() == pytest.approx(expected)
    torch.testing.assert_close(alp.combination.alpha[1], torch.tensor([[[0.75, 0.25]]]))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert alp.diagnostics["alpha_entropy_1"].item() == pytest.approx(entropy)


@pytest.mark.parametrize(
    "options",
    [
        {"mapping": {"rule": "skip"}, "combine": "select", "distance": "normalized"},
        {"mapping": {"rule": "skip"}, "combine": "select", "distance": "normalized_mse", "over_layers": "mean"},
        {"mapping": {"rule": "no"}, "combine": "concatenate"},
        {"mapping": {"rule": "no"}, "combine": "concatenate", "project": "student", "distance": "normalized"},
        {"mapping": {"rule": "all"}, "combine": "attend"},
        {"mapping": {"rule": "all"}, "combine": "attend", "attention": {"type": "dot", "normalize": True}},
        {"mapping": {"rule": "all"}, "combine": "attend", "attention": KQV},
    ],
    ids=["pkd", "pkd_original", "ckd", "ckd_student", "alp", "alp_cosine", "alp_kqv"],
)
def test_gradient(options: dict[str, Any]) -> None:
    bound = term(m=3, n=4, **options)
    teacher = features(4, seed=1, batch=2)
    states = [state.requires_grad_() for state in features(3, batch=2).cls.values()]
    parameters = list(bound.parameters())

    def loss(*leaves: Tensor) -> Tensor:
        return value(bound, Features(cls=dict(enumerate(leaves[:3], start=1))), teacher)

    assert torch.autograd.gradcheck(loss, (*states, *parameters))


def test_alp_over_one_layer_is_pkd_without_normalisation() -> None:
    student, teacher = features(4), features(12, seed=1)
    one = {"rule": "explicit", "layers": [[2], [7], [12], []]}
    alp = term(mapping=one, combine="attend")
    pkd = term(mapping=one, combine="select", distance="mse")
    assert torch.equal(value(alp, student, teacher), value(pkd, student, teacher))
    assert {entropy.item() for entropy in alp.diagnostics.values()} == {0.0}


def test_needs_are_the_layers_that_are_compared() -> None:
    pkd = term(mapping={"rule": "skip"}, combine="select")
    assert pkd.student_needs == FeatureRequest(cls=frozenset({1, 2, 3}))
    assert pkd.teacher_needs == FeatureRequest(cls=frozenset({1, 5, 9}))
    holes = term(mapping={"rule": "explicit", "layers": [[], [3, 4], [], [12]]}, combine="attend")
    assert holes.student_needs == FeatureRequest(cls=frozenset({2, 4}))
    assert holes.teacher_needs == FeatureRequest(cls=frozenset({3, 4, 12}))
    assert pkd.diagnostics == {}


def method(weights: dict[str, float]) -> Method:
    return Method({"ce": HardLabels(), "kd": SoftLabels(5.0)}, weights)


def test_rkd_with_eta_zero_is_nkd() -> None:
    student, teacher = features(4), features(12, seed=1)
    labelled = batch(torch.tensor([0, 2, 1, 1, 0]))
    rkd, nkd = method({"ce": 1 - 0.0, "kd": 0.0}), method({"ce": 1})
    for one in (rkd, nkd):
        one.bind(shape(4), shape(12), Classes())
    theirs, ours = (one(student, teacher, labelled, PROGRESS) for one in (nkd, rkd))
    assert list(ours) == list(theirs) == ["ce"]
    assert torch.equal(ours["ce"], theirs["ce"])
    assert rkd.teacher_needs == FeatureRequest()


def test_pkds_own_soft_labels_are_a_mean_over_classes_too() -> None:
    student, teacher = features(4), features(12, seed=1)
    paper, code = SoftLabels(5.0), SoftLabelsPerClass(5.0)
    for one in (paper, code):
        one.bind(shape(4), shape(12), Classes())
    torch.testing.assert_close(value(code, student, teacher), value(paper, student, teacher) / 3)


def refusal(m: int = 4, n: int = 12, widths: tuple[int, int] = (6, 6), **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        term(m=m, n=n, widths=widths, **options)
    return str(caught.value)


def test_impossible_pairs_are_refused() -> None:
    assert refusal(mapping={"rule": "all"}, combine="select") == (
        "mapping=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]: "
        "this method compares student layer 1 with one teacher layer, not with 12\n"
        "  mapping=skip, or a method that combines layers: method=ckd"
    )
    widths = "student: its states have 6 features, the teacher's 10; "
    for combine in ("select", "attend"):
        message = refusal(mapping={"rule": "skip"}, widths=(6, 10), combine=combine)
        assert message.startswith(widths)
        assert "method=ckd" in message
    assert refusal(mapping={"rule": "all"}, combine="attend", attention=Attention(type="kqv", heads=4)) == (
        "attention.heads=4: must divide the student's width, 6"
    )
    assert "mapping.supervise_last=true" in refusal(m=1, mapping={"rule": "all"}, combine="attend")
    assert refusal(m=12, mapping={"rule": "all"}, combine="attend").startswith("student.num_layers=12: ")
    with pytest.raises(UserError, match="teacher: an intermediate loss needs a teacher"):
        HiddenStateLoss(LayerMapping(rule="skip"), "select", "mse").bind(shape(4), None, Classes())


def test_wrong_options_are_refused() -> None:
    assert refusal(mapping={"rule": "skip"}, combine="sum") == (
        "combine=sum: there is no such choice\n  Known: attend, concatenate, select."
    )
    assert refusal(mapping={"rule": "skip"}, combine="select", distance="l1").startswith(
        "distance=l1: there is no such choice"
    )
    assert refusal(mapping={"rule": "skip"}, combine="select", attention={}).startswith(
        "attention: combine=select does not use it"
    )
    assert refusal(mapping={"rule": "skip"}, combine="attend", project="teacher").startswith(
        "project=teacher: combine=attend does not use it"
    )
    every = refusal(mapping={"rule": "every"}, combine="attend")
    assert every.startswith("mapping.rule=every: there is no such choice")
    assert refusal(mapping={"rule": "skip"}, combine="attend", attention={"type": "dog"}).startswith(
        "attention.type=dog: there is no such choice"
    )
