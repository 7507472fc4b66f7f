"""Outputs of a stage's teacher: whether they can be cached, which cache serves a stage, and what training reads."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from distill_runner.common.errors import UserError, override
from distill_runner.datasets.splits import Split
from distill_runner.models.features import EncoderShape, FeatureRequest
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import SCHEMA, Spec, Store, key_of
from distill_runner.tasks.scores import training_scores
from distill_runner.tasks.splits import HELD_OUT

log = logging.getLogger(__name__)

Mode = Literal["auto", "cached", "live"]
"""Where outputs come from, as in ``Runtime.targets``."""


def uncacheable_reason(needs: FeatureRequest, corpus: bool, endless: bool = False) -> str | None:
    """Return why the features ``needs`` of a teacher cannot be cached; None if they can.

    Args:
        corpus: whether the examples come from a corpus, not from a task.
        endless: whether the examples look different in each epoch.
    """
    if needs.projections:
        return "queries, keys and values are not cached: they take about as much as the teacher's states of all tokens"
    if needs.states:
        return "the states of all tokens are not cached: each token has as many numbers as the teacher's width"
    if corpus:
        return "nothing is cached for a corpus: few of its examples are read twice"
    return "training images look different in each epoch" if endless else None


def live_reason(stage: Stage, mode: Mode) -> str | None:
    """Return why the outputs of the stage's teacher cannot be cached; None if they can.

    Raises:
        UserError: they cannot be cached, and ``mode`` is ``cached``.
    """
    if stage.teacher is not None and stage.teacher.has_columns:
        return None
    task = stage.config.task
    endless = task is not None and task.is_endless(stage.views)
    reason = uncacheable_reason(stage.teacher_needs, stage.is_corpus, endless)
    if reason and mode == "cached":
        views = "For 8 fixed views of each image: " + override("augment.views", 8) + ". Or " if endless else "Set "
        raise UserError("runtime.targets", mode, reason, views + override("runtime.targets", "live"))
    return reason


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


def choose_cache(mode: Mode, size: int, folder: Path) -> tuple[bool, str]:
    """Return whether to cache targets of ``size`` bytes in ``folder``, and the reason.

    ``auto`` caches targets that take less than half of the free disk space.
    """
    free = shutil.disk_usage(folder).free
    cached = size < free / 2 if mode == "auto" else mode == "cached"
    reason = "" if mode == "auto" else f"runtime.targets={mode}; "
    return cached, f"{'cached' if cached else 'live'} ({reason}{size / 2**20:.1f} MiB, {free / 2**30:.0f} GiB free)"


def with_teacher_tokenizer(stage: Stage, teacher: Stage) -> Stage:
    """Return the stage with its data tokenized by the teacher's tokenizer."""
    same = teacher.config.prediction_source is not None or teacher.tokenizer == stage.tokenizer
    return stage if same else replace(stage, tokenizer=teacher.tokenizer)


def cached_share(stage: Stage) -> float:
    """Return the share of the training split whose outputs the stage's cache holds: what the stage trains on.

    All of it where a held-out set or fixed views of images decide which outputs a share reads, and where the outputs
    are columns of the data.
    """
    task, teacher = stage.config.task, stage.teacher
    of_all = stage.views is not None or (task is not None and task.select_on == HELD_OUT)
    return 1.0 if of_all or (teacher is not None and teacher.has_columns) else stage.share


def targets_spec(stage: Stage, checkpoint: int | None) -> Spec:
    """Return the spec of the cached features of the teacher, or of one of its checkpoints, on the training split."""
    assert stage.teacher is not None
    assert stage.config.task is not None
    needs = stage.teacher_needs
    return {
        "kind": "targets",
        "schema": SCHEMA,
        "teacher": stage.teacher.key,
        "checkpoint": checkpoint,
        "tokens": with_teacher_tokenizer(stage, stage.teacher).split_spec(stage.train_split),
        "inputs": {**stage.config.task.input_settings, "views": stage.views},
        "needs": {"logits": needs.logits, "cls": sorted(needs.cls)},
        "share": cached_share(stage),
        "precision": stage.precision,
        "dtype": stage.teacher_outputs,
    }


def usable_cache(stage: Stage, checkpoint: int | None, store: Store) -> Spec:
    """Return the spec of the cache that the stage reads: its own, unless another one contains all of it."""
    assert stage.teacher is not None
    own = targets_spec(stage, checkpoint)
    if store.has(own):
        return own
    others = (spec for spec in store.specs("targets") if store.has(spec))
    return next((spec for spec in others if contains(spec, own, stage.teacher.shape.num_layers)), own)


def contains(cache: Spec, own: Spec, depth: int) -> bool:
    """Return whether a cache contains all of another one, bit for bit.

    Args:
        depth: number of layers of the teacher. A teacher that runs through fewer layers computes the last of them in
            another way, for [CLS] alone, so the bits may differ.
    """
    rest, own_rest = (key_of({**spec, "needs": None, "share": None}) for spec in (cache, own))
    if rest != own_rest:
        return False
    cached, needs = cache["needs"], own["needs"]
    last, own_last = (depth if part["logits"] else max(part["cls"], default=0) for part in (cached, needs))
    is_enough = cached["logits"] >= needs["logits"] and {*cached["cls"]} >= {*needs["cls"]}
    return is_enough and last == own_last and cache["share"] >= own["share"]


def column_outputs(stage: Stage) -> np.ndarray:
    """Return the outputs (N, C) in columns of the data for the training examples of the stage.

    Raises:
        UserError: the columns do not exist, or do not hold predictions.
    """
    task, transfer = stage.config.task, stage.config.transfer
    assert task is not None
    scores = training_scores(task, transfer)
    return scores.outputs[scores.is_used]
