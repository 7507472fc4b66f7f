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


@pytest.mark.parametrize(("saved", "resumed"), [(1, 0), (0, 1), (1, 1)])
def test_a_resumed_run_gets_the_state_of_its_own_gpu(saved: int, resumed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` may take another GPU, whose dropout would begin again at the seed."""
    states = {0: torch.tensor([10]), 1: torch.tensor([11])}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device.index].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device.index: state}))
    state = random_state(torch.device("cuda", saved))
    states[0], states[1] = torch.tensor([0]), torch.tensor([0])
    restore_random_state(state, torch.device("cuda", resumed))
    assert states == {resumed: torch.tensor([10 + saved]), 1 - resumed: torch.tensor([0])}
