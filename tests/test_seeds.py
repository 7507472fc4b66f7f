"""Random numbers: what is saved of them, and put back."""

import random

import numpy as np
import pytest
import torch

from distill_runner.common.seeds import preserved_random_state, random_state, restore_random_state, seed_all


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_what_is_drawn_within_leaves_no_trace() -> None:
    seed_all(3)
    expected = drawn()
    seed_all(3)
    with preserved_random_state():
        assert drawn() == expected
    assert drawn() == expected


@pytest.mark.parametrize("there", [0, 1, 2, 3])
def test_a_state_of_two_gpus_goes_to_those_that_are_there(there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    states, restored = [torch.tensor([1]), torch.tensor([2])], list[torch.Tensor]()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restored.extend)
    restore_random_state({**random_state(), "cuda": states})
    assert restored == states[:there]
