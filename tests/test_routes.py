"""Which checkpoint, and which temperature, each epoch of a student goes by."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_runner.common.errors import UserError
from distill_runner.compose.resolvers import phase_epochs
from distill_runner.methods.schedules import CheckpointSchedule, EpochsPerStep


@pytest.mark.parametrize(
    ("steps", "items", "num_epochs", "expected"),
    [
        # Pro-KD's recipe for DistilRoBERTa, and that for BERT-small (its section 5.2).
        ({"epochs": 2, "warmup": 2}, "12345", 12, "111122334455"),
        ({"epochs": 1, "warmup": 1}, "1234567", 8, "11234567"),
        ({"epochs": [1, 3, 2]}, "abc", 6, "abbbcc"),
        ({"epochs": [1, 3, 2], "warmup": 2}, "abc", 8, "aaabbbcc"),
        # Shared out: floor(E / steps) epochs each, as in the code of Annealing-KD, the rest to the last.
        ({}, "abc", 6, "aabbcc"),
        ({}, "abc", 8, "aabbcccc"),
        ({"warmup": 2}, "abc", 9, "aaaabbccc"),
        ({}, "abc", 2, "abc"),
        ({}, "a", 4, "aaaa"),
    ],
)
def test_steps_by_hand(steps: dict[str, Any], items: str, num_epochs: int, expected: str) -> None:
    assert "".join(EpochsPerStep(**steps).spread(items, num_epochs)) == expected


lengths = st.one_of(st.integers(1, 5), st.lists(st.integers(1, 5), min_size=1, max_size=8))


@given(epochs=lengths, warmup=st.integers(0, 4), number=st.integers(1, 8))
def test_every_checkpoint_has_its_epochs_and_the_first_its_warmup(
    epochs: int | list[int], warmup: int, number: int
) -> None:
    each = [epochs] * number if isinstance(epochs, int) else epochs
    total = phase_epochs(len(each), epochs, warmup)
    route = CheckpointSchedule(epochs=epochs, warmup=warmup).epoch_checkpoints(len(each), total)
    assert len(route) == total == sum(each) + warmup
    runs = [(checkpoint, len(list(group))) for checkpoint, group in itertools.groupby(route)]
    assert runs == [(i, n + warmup * (i == 1)) for i, n in enumerate(each, start=1)]


@pytest.mark.parametrize(
    ("route", "teacher_epochs", "student_epochs", "message"),
    [
        ({"checkpoints": [1, 4]}, 3, 6, "route.checkpoints=4: the teacher trains 3 epochs"),
        ({"checkpoints": [0]}, 3, 6, "route.checkpoints=0: the teacher trains 3 epochs"),
        ({}, 0, 6, "route: the teacher trains for no epoch"),
        ({"epochs": 2}, 3, 5, "route: its 3 checkpoints take 6 epochs; the student trains 5"),
        ({"epochs": 1, "warmup": 1}, 3, 6, "route: its 3 checkpoints take 4 epochs; the student trains 6"),
        ({}, 3, 2, "route: its 3 checkpoints take 3 epochs; the student trains 2"),
        ({"epochs": [1, 2]}, 3, 3, r"route.epochs=\[1, 2\]: has 2 numbers for 3 steps"),
        ({"epochs": [0, 2, 1]}, 3, 3, r"route.epochs=\[0, 2, 1\]: each step needs at least 1 epoch"),
    ],
)
def test_a_route_that_cannot_be_walked_is_refused(
    route: dict[str, Any], teacher_epochs: int, student_epochs: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        CheckpointSchedule(**route).epoch_checkpoints(teacher_epochs, student_epochs)


def test_the_teacher_at_the_beginning_of_its_epochs() -> None:
    """Pro-KD's theta(i) by the words of Eqs. 2 and 3: one epoch less behind it, at first none."""
    schedule = CheckpointSchedule(checkpoints=[1, 3], epochs=2, warmup=1, moment="beginning")
    assert schedule.epoch_checkpoints(3, 5) == (0, 0, 0, 2, 2)
    assert CheckpointSchedule(epochs=1).epoch_checkpoints(3, 3) == (1, 2, 3)
    assert CheckpointSchedule(epochs=1, moment="beginning").epoch_checkpoints(3, 3) == (0, 1, 2)
