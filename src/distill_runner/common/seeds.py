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


def random_state() -> dict[str, Any]:
    """Return the state of all random number generators, in types that ``torch.load`` reads without running code.

    Of several GPUs, it is that of the current one; a process that has not used a GPU has none.
    """
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore what ``random_state`` returned; the current GPU may be another one than then."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the state of all random number generators at the end of this context."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)
