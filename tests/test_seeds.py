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


def test_a_resumed_run_gets_the_state_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` may take another GPU, whose dropout would begin again at the seed."""
    states = [torch.tensor([10])]
    for name in ("is_available", "is_initialized"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: states[-1])
    monkeypatch.setattr(torch.cuda, "set_rng_state", states.append)
    state = random_state()
    states.append(torch.tensor([0]))
    restore_random_state(state)
    assert states[-1] == 10
