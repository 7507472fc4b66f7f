"""Random numbers that depend on the seed and the stage, never on what was in the store before."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def stage_seed(seed: int, stage: str) -> int:
    """Return a separate 32-bit seed for each stage of a run."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{stage}".encode()).digest()[:4], "big")


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch on all devices."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_state(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of all random number generators, in types that ``torch.load`` reads without running code.

    Args:
        device: keep the state of this GPU alone, for another process, which may get another GPU.
    """
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
        "cuda": _states_of_gpus(device) if torch.cuda.is_available() else [],
    }


def _states_of_gpus(device: torch.device | None) -> list[torch.Tensor]:
    if device is None:
        return torch.cuda.get_rng_state_all()
    return [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []


def restore_random_state(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Restore what ``random_state`` returned; ``device`` gets the state of the GPU whose state was kept."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device is not None:
        states = state["cuda"]  # one; older versions kept those of all GPUs, by index
        if device.type == "cuda" and states:
            torch.cuda.set_rng_state(states[min(device.index or 0, len(states) - 1)], device)
    elif state["cuda"]:
        num_gpus = torch.cuda.device_count()  # the state may come from a machine with more GPUs
        torch.cuda.set_rng_state_all(state["cuda"][:num_gpus])


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the state of all random number generators at the end of this context."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)
