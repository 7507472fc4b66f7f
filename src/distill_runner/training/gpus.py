"""Claim GPUs for a process by file locks, so that workers of any launcher, and of several sweeps, do not collide."""

import logging
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)

_HELD: list[FileLock] = []
"""Locks of this process. The kernel frees them when the process ends, however it ends."""
SECONDS_BETWEEN_TRIES = 2.0


def claim(gpus: Sequence[str], workers_per_gpu: int, folder: Path) -> int:
    """Claim a place on a GPU until this process ends, and return the GPU's index; wait while all places are taken.

    The emptiest GPU is taken first.

    Args:
        gpus: names of the GPUs, equal in all processes of the machine.
        folder: folder of the lock files, shared by all processes of the machine.
    """
    while True:
        for place in range(workers_per_gpu):
            for index, gpu in enumerate(gpus):
                lock = FileLock(folder / f"distill-run-{gpu}-{place}.lock")
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    continue
                _HELD.append(lock)
                return index
        log.info("waiting for a GPU: all are in use (runtime.device=cuda:0 does not wait)")
        time.sleep(SECONDS_BETWEEN_TRIES)


def claim_several(gpus: Sequence[str], count: int, folder: Path) -> list[int]:
    """Claim the first place on each of ``count`` GPUs, for processes that train together; return the GPUs' indices."""
    with FileLock(folder / "distill-run-several.lock"):  # without it, two callers could wait for each other's GPUs
        return [claim(gpus, 1, folder) for _ in range(count)]


@cache
def claim_visible(workers_per_gpu: int) -> int:
    """Claim one of the GPUs that torch sees; later calls in this process return the same GPU."""
    return claim(_visible(), workers_per_gpu, Path(tempfile.gettempdir()))


@cache
def claim_several_visible(count: int) -> list[int]:
    """Claim several of the GPUs that torch sees; later calls in this process return the same GPUs."""
    return claim_several(_visible(), count, Path(tempfile.gettempdir()))


def _visible() -> list[str]:
    import torch

    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
