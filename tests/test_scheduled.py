"""Schedules of layers: when a layer is left, what is computed meanwhile, identities, and resuming within a layer."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from distill_runner.common.errors import UserError
from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import Progress
from distill_runner.methods.config import parse_method
from distill_runner.methods.outputs import Classes
from distill_runner.methods.schedules import LayerSchedule, ScheduledMethod
from distill_runner.models.features import EncoderShape, FeatureRequest, Features

TOP = {"rule": "group_top", "supervise_last": True}
COS = {"term": "hidden_states", "mapping": TOP, "combine": "select", "distance": "cosine"}
KL = {"term": "attention_relations", "mapping": TOP, "pairs": ["QK"]}
SOFT = {"term": "soft_labels", "temperature": 1.0}
TERMS = {"soft": SOFT, "kl": KL, "cos": COS}
STUDENT, TEACHER = EncoderShape(3, 8, 2, 2, 9, "bert"), EncoderShape(6, 8, 2, 2, 9, "bert")
NOTHING = torch.zeros(0, dtype=torch.long)
BATCH = Batch(NOTHING, NOTHING, NOTHING, NOTHING, torch.arange(2), ())


def node(schedule: Mapping[str, Any] | None, terms: Mapping[str, Any] | None = None) -> dict[str, Any]:
    chosen = TERMS if terms is None else terms
    return {"terms": chosen, "weights": dict.fromkeys(chosen, 1.0)} | ({"schedule": schedule} if schedule else {})


def method(terms: Mapping[str, Any] | None = None, **schedule: Any) -> ScheduledMethod:
    made = parse_method(node(schedule, terms)).make().bind(STUDENT, TEACHER, Classes())
    assert isinstance(made, ScheduledMethod)
    return made


def at(epoch: int, num_epochs: int = 10) -> Progress:
    return Progress(epoch, epoch * 5, num_epochs, num_epochs * 5)


def layers_by_epoch(made: ScheduledMethod, num_epochs: int) -> list[tuple[int, str]]:
    """The layer of each epoch, and the initials of the terms that run."""
    states = []
    for epoch in range(num_epochs):
        made.begin_epoch(at(epoch, num_epochs))
        states.append((made.layer, "".join(name[0] for name in made.current_terms())))
    return states


def test_layers_follow_their_limits() -> None:
    internal, soft = "kc", "s"
    expected = [(1, internal)] * 2 + [(2, internal)] * 2 + [(3, internal)] * 2 + [(0, soft)] * 2
    assert layers_by_epoch(method(rule="pid", limits=2), 8) == expected
    always = [(layer, soft + (internal if layer else "")) for layer, _ in expected]
    assert layers_by_epoch(method(rule="sid", limits=[2, 2, 2], classification="always"), 8) == always
    left_out = [(1, internal), (3, internal), (3, internal), (0, soft)]
    assert layers_by_epoch(method(rule="pid", limits=[1, 0, 2]), 4) == left_out
    assert layers_by_epoch(method(rule="pid", limits=0), 2) == [(0, soft)] * 2
    assert layers_by_epoch(method(rule="together", limits=2), 3) == [(3, internal)] * 2 + [(0, soft)]


def test_the_lowest_layer_with_gradients() -> None:
    """One layer too low, and PID optimizes two layers at a time; after the last one, the head is above them all."""

    def lowest(**schedule: Any) -> list[int]:
        made, found = method(limits=1, **schedule), []
        for epoch in range(4):
            made.begin_epoch(at(epoch, 4))
            found.append(made.student_needs.first_trained)
        return found

    assert lowest(rule="pid", trains="supervised") == [1, 2, 3, 4]
    assert lowest(rule="sid", trains="supervised") == [1, 1, 1, 4]
    assert lowest(rule="pid", trains="all") == [0, 0, 0, 4]
    assert lowest(rule="pid", trains="supervised", trains_at_end="all") == [1, 2, 3, 0]


def test_layers_together_are_all_supervised_in_every_epoch() -> None:
    """The control would be another method if a layer were missing, or came later."""
    made = method(rule="together", limits=2)
    for epoch, supervised in enumerate([[1, 2, 3], [1, 2, 3], []]):
        made.begin_epoch(at(epoch, 3))
        assert sorted(made.terms["kl"].current_layers) == supervised  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_layers", "num_epochs", "limits"),
    [
        (6, 50, [6, 7, 7, 6, 7, 7]),
        (3, 10, [2, 3, 3]),
        (6, 5, [0, 1, 1, 0, 1, 1]),
        (1, 10, [8]),
        (2, 2, [0, 1]),
        (2, 0, [0, 0]),
    ],
)
def test_without_limits_layers_share_four_fifths(num_layers: int, num_epochs: int, limits: list[int]) -> None:
    assert LayerSchedule(rule="pid").step_limits(num_layers, num_epochs) == limits


def test_only_what_is_supervised_is_read() -> None:
    def needs(rule: str, layers: range) -> tuple[FeatureRequest, FeatureRequest]:
        student, teacher = (
            FeatureRequest(
                cls=frozenset(times * j for j in layers),
                projections=frozenset((name, times * j) for j in layers for name in ("query", "key")),
            )
            for times in (1, 2)
        )
        return student, teacher

    for rule, in_second in (("pid", range(2, 3)), ("sid", range(1, 3))):
        made = method(rule=rule, limits=1, trains_at_end="all")
        logits = FeatureRequest(logits=True)
        everything = tuple(need | logits for need in needs(rule, range(1, 4)))
        assert (made.student_needs, made.teacher_needs) == everything
        seen = []
        for epoch in range(4):
            made.begin_epoch(at(epoch))
            seen.append((made.student_needs, made.teacher_needs))
        assert seen[0] == needs(rule, range(1, 2))
        assert seen[1] == needs(rule, in_second)
        assert seen[3] == (logits, logits)


def states(angle: float) -> tuple[Features, Features]:
    """Of two examples, whose [CLS] states are all at a distance of 1 - cos(angle)."""
    student, teacher = torch.tensor([[1.0, 0.0]] * 2), torch.tensor([[1.0, 0.0]] * 2)
    student[:, 0], student[:, 1] = torch.cos(torch.tensor(angle)), torch.sin(torch.tensor(angle))
    logits = torch.zeros(2, 2)
    return Features(logits, dict.fromkeys(range(1, 4), student)), Features(logits, dict.fromkeys(range(1, 7), teacher))


def update(made: ScheduledMethod, epoch: int, angle: float) -> None:
    made.end_update(made(*states(angle), BATCH, at(epoch)), BATCH.size)


def test_a_layer_is_left_below_its_threshold() -> None:
    shapes = EncoderShape(3, 2, 2, 2, 9, "bert"), EncoderShape(6, 2, 2, 2, 9, "bert")
    schedule = {"rule": "sid", "limits": 4, "thresholds": 0.5}
    made = parse_method(node(schedule, {"soft": SOFT, "cos": COS}) | {"weights": {"soft": 1, "cos": 7}}).make()
    assert isinstance(made, ScheduledMethod)
    made.bind(*shapes, Classes())
    layers = []
    # In each epoch two batches; the mean of their distances is what counts: 1 - cos of these angles.
    for epoch, angles in enumerate(
        [(1.5, 1.5), (1.4, 0.3), (0.3, 1.4), (0.1, 0.2), (0.1, 0.1), (3.0, 3.0), (0.5, 0.5)]
    ):
        made.begin_epoch(at(epoch))
        layers.append(made.layer)
        for angle in angles:
            update(made, epoch, angle)
        assert made.diagnostics()["schedule/layer"].item() == made.layer
    # Layer 1 at (0.93), then (0.83 + 0.04) / 2 < 0.5; layer 2 stacked: twice that, 0.87, then 0.02; layer 3 likewise.
    assert layers == [1, 1, 2, 2, 3, 0, 0]


def test_a_schedule_is_taken_up_within_an_epoch() -> None:
    shapes = EncoderShape(3, 2, 2, 2, 9, "bert"), EncoderShape(6, 2, 2, 2, 9, "bert")

    def fresh() -> ScheduledMethod:
        made = parse_method(node({"rule": "pid", "limits": 3, "thresholds": 0.5}, {"soft": SOFT, "cos": COS})).make()
        assert isinstance(made, ScheduledMethod)
        made.bind(*shapes, Classes())
        return made

    def run(made: ScheduledMethod, epoch: int, angles: tuple[float, ...]) -> None:
        made.begin_epoch(at(epoch))
        for angle in angles:
            update(made, epoch, angle)

    def summary(made: ScheduledMethod) -> list[Any]:
        return [value.item() if isinstance(value, Tensor) else value for value in made.get_extra_state().values()]

    whole = fresh()
    for epoch, angles in enumerate([(0.1, 0.1), (2.0, 0.7, 0.3)]):
        run(whole, epoch, angles)
    first = fresh()
    run(first, 0, (0.1, 0.1))
    run(first, 1, (2.0,))
    second = fresh()
    second.load_state_dict(first.state_dict())
    run(second, 1, (0.7, 0.3))
    assert summary(second) == summary(whole)
    assert second.student_needs == whole.student_needs == FeatureRequest(cls=frozenset({2}))
    assert second.teacher_needs == whole.teacher_needs == FeatureRequest(cls=frozenset({4}))


def test_a_schedule_is_part_of_what_determines_a_method() -> None:
    def spec(given: dict[str, Any] | None) -> dict[str, Any]:
        return parse_method(node(given)).spec(Classes())

    plain = spec(None)
    assert plain == parse_method(node(None) | {"schedule": None}).spec(Classes())
    assert set(plain) == set(TERMS)
    specs = [spec(given) for given in ({"rule": "pid"}, {"rule": "sid"}, {"rule": "pid", "limits": 3})]
    assert all(one != other for one, other in itertools.combinations([plain, *specs], 2))
    assert spec({"rule": "pid", "limits": 3}) == spec({"rule": "pid", "limits": [3]})


@pytest.mark.parametrize(
    ("schedule", "terms", "message"),
    [
        ({"rule": "pad"}, None, ".method.schedule.rule=pad: there is no such choice"),
        ({"rule": "pid", "limit": 3}, None, ".method.schedule.limit: there is no such key"),
        ({"rule": "pid", "limits": -1}, None, ".method.schedule.limits.0=-1: must be at least 0"),
        ({"rule": "pid", "limits": [1, 2]}, None, ".method.schedule.limits=[1, 2]: has 2 entries, but 3 layers are"),
        (
            {"rule": "together", "limits": [1, 2]},
            None,
            ".method.schedule.limits=[1, 2]: has 2 entries, but 3 layers are",
        ),
        ({"rule": "pid", "thresholds": 0.1, "watch": "soft"}, None, ".method.schedule.watch=soft: is not a term of"),
        ({"rule": "sid"}, {"soft": SOFT}, ".method.schedule.rule=sid: none of the method's terms (soft) supervises"),
        ({"rule": "sid"}, {"cos": COS}, ".method.schedule.rule=sid: none of the method's terms (cos) reads the"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(schedule: Any, terms: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        method(terms, **schedule)
    assert str(caught.value).startswith(message.removeprefix("."))


# Trainings, from the configuration to the artifact.
