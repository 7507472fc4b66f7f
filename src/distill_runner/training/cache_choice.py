"""Decide whether a teacher's outputs are cached: what can be cached, how large the cache is, how much disk is free."""

import shutil
from pathlib import Path
from typing import Literal

import numpy as np

from distill_runner.common.errors import UserError
from distill_runner.datasets.split import Split
from distill_runner.models.encoders import EncoderShape
from distill_runner.models.features import FeatureRequest


def why_live(
    mode: Literal["auto", "cached", "live"], needs: FeatureRequest, text: bool, endless: bool = False
) -> str | None:
    """Return why ``needs`` cannot be cached; None if they can.

    Args:
        text: whether the examples come from a corpus, not from a task.
        endless: whether examples look different in each epoch.

    Raises:
        UserError: ``mode`` is ``cached``, but ``needs`` cannot be cached.
    """
    if needs.projections:
        why = "queries, keys and values are not cached: they take about as much as the teacher's states of all tokens"
    elif needs.states:
        why = "the states of all tokens are not cached: each token has as many numbers as the teacher's width"
    elif text:
        why = "nothing is cached for a corpus: few of its examples are read twice"
    elif endless:
        why = "training images look different in each epoch"
    else:
        return None
    if mode == "cached":
        fixed = "Take augment.views=8, for 8 fixed views of each image, or" if endless else "Take"
        raise UserError("runtime.targets", mode, why, f"{fixed} runtime.targets=auto or live.")
    return f"live ({why})"


def cache_bytes(
    needs: FeatureRequest,
    teacher: EncoderShape,
    split: Split,
    num_checkpoints: int = 1,
    dtype: str = "float32",
    share: float = 1.0,
) -> int:
    """Return the size in bytes of the caches of ``needs`` for a share of ``split``, one cache for each checkpoint."""
    logits = split.num_outputs * teacher.num_labels if needs.logits else 0
    numbers = num_checkpoints * share * (logits + len(split) * len(needs.cls) * teacher.width)
    return np.dtype(dtype).itemsize * round(numbers)


def choose(mode: Literal["auto", "cached", "live"], size: int, folder: Path, there: bool = False) -> tuple[bool, str]:
    """Return whether to cache targets of ``size`` bytes in ``folder``, and why.

    ``auto`` caches targets that take less than half of the free disk space, or are already cached.

    Args:
        there: whether the targets are already cached.
    """
    free = shutil.disk_usage(folder).free
    what = f"{size / 2**20:.1f} MiB, {free / 2**30:.0f} GiB free"
    if mode != "auto":
        return mode == "cached", f"{mode} (runtime.targets={mode}; {what})"
    cached = there or size < free / 2
    return cached, f"{'cached' if cached else 'live'} ({what})"
