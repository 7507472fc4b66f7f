"""Which GPU a process takes: by file locks, so that workers of any launcher, and of several sweeps, do not collide."""

import logging
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)

_HELD: list[FileLock] = []
"""Until the process ends: the kernel frees them then, however it ends."""
SECONDS_BETWEEN_TRIES = 2.0


def claim(gpus: Sequence[str], workers_per_gpu: int, folder: Path) -> int:
    """The index of a GPU with a free place, which is this process's until it ends; waits for one if there is none.

    The emptiest GPU is taken first.

    Args:
        gpus: names that all processes of the machine know them by.
        folder: of the locks, shared by those processes.
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
        log.info("waiting for a GPU: all are taken. Without waiting: runtime.device=cuda:0")
        time.sleep(SECONDS_BETWEEN_TRIES)


def claim_several(gpus: Sequence[str], count: int, folder: Path) -> list[int]:
    """As ``claim``, of several GPUs without anybody else in their first place, for processes that belong together."""
    with FileLock(folder / "distill-run-several.lock"):  # else two could wait for what the other one has
        return [claim(gpus, 1, folder) for _ in range(count)]


@cache
def claim_visible(workers_per_gpu: int) -> int:
    """``claim`` of the GPUs that torch sees; the same one for the rest of the process."""
    return claim(_visible(), workers_per_gpu, Path(tempfile.gettempdir()))


@cache
def claim_several_visible(count: int) -> list[int]:
    """``claim_several`` of the GPUs that torch sees; the same ones for the rest of the process."""
    return claim_several(_visible(), count, Path(tempfile.gettempdir()))


def _visible() -> list[str]:
    import torch

    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
