"""Outputs of a stage's teacher: whether they can be cached, the spec of their cache, and what training reads."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from distill_runner.common.errors import UserError, override
from distill_runner.datasets.splits import Split
from distill_runner.pipeline.inputs import StageInputs
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import SCHEMA, Spec
from distill_runner.tasks.task_splits import HELD_OUT

log = logging.getLogger(__name__)

Mode = Literal["auto", "cached", "live"]
"""Where outputs come from, as in ``Runtime.targets``."""


def live_reason(stage: Stage, mode: Mode) -> str | None:
    """Return why the outputs of the stage's teacher cannot be cached; None if they can.

    Raises:
        UserError: they cannot be cached, and ``mode`` is ``cached``.
    """
    if stage.teacher is not None and stage.teacher.has_columns:
        return None
    task, needs, remedy = stage.config.task, stage.teacher_needs, "Set "
    if needs.projections:
        reason = "queries, keys and values are not cached: they take about as much as the states of all tokens"
    elif needs.states:
        reason = "the states of all tokens are not cached: each token has as many numbers as the teacher's width"
    elif stage.is_corpus:
        reason = "nothing is cached for a corpus: few of its examples are read twice"
    elif task is not None and task.is_endless(stage.views):
        reason = "training images look different in each epoch"
        remedy = "For 8 fixed views of each image: " + override("augment.views", 8) + ". Or "
    else:
        return None
    if mode == "cached":
        raise UserError("runtime.targets", mode, reason, remedy + override("runtime.targets", "live"))
    return reason


def cache_decision(stage: Stage, inputs: StageInputs, mode: Mode) -> tuple[bool, str]:
    """Return whether the outputs of the stage's teacher are read from a cache, and the reason."""
    if reason := live_reason(stage, mode):
        return False, f"live ({reason})"
    if stage.teacher is not None and stage.teacher.has_columns:
        return True, "read from columns of the data"
    store, split = inputs.store, inputs.split(stage, stage.train_split).teacher_inputs
    new = [spec for number in stage.teacher_checkpoints if not store.has(spec := targets_spec(stage, number))]
    return cache_decision_by_size(mode, cache_bytes(stage, split, len(new), cached_share(stage)), store.folder)


def cache_bytes(stage: Stage, split: Split, num_checkpoints: int, share: float) -> int:
    """Return the size in bytes of the teacher's caches for a share of ``split``, one cache for each checkpoint."""
    assert stage.teacher is not None
    needs, shape = stage.teacher_needs, stage.teacher.shape
    logits = split.num_outputs * shape.num_labels if needs.logits else 0
    numbers = num_checkpoints * share * (logits + len(split) * len(needs.cls) * shape.width)
    return np.dtype(stage.teacher_outputs).itemsize * round(numbers)


def cache_decision_by_size(mode: Mode, size: int, folder: Path) -> tuple[bool, str]:
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
    are columns of the data, or those of words in the windows of another tokenizer.
    """
    task, teacher = stage.task, stage.teacher
    assert teacher is not None
    of_all = stage.views is not None or task.select_on == HELD_OUT or teacher.has_columns
    of_words = task.has_token_outputs and any(one.tokenizer != stage.tokenizer for one in teacher.members or [teacher])
    return 1.0 if of_all or of_words else stage.share


def targets_spec(stage: Stage, checkpoint: int | None) -> Spec:
    """Return the spec of the cached features of the teacher, or of one of its checkpoints, on the training split."""
    assert stage.teacher is not None
    needs = stage.teacher_needs
    return {
        "kind": "targets",
        "schema": SCHEMA,
        "teacher": stage.teacher.key,
        "checkpoint": checkpoint,
        "tokens": with_teacher_tokenizer(stage, stage.teacher).split_spec(stage.train_split),
        "inputs": {**stage.task.input_settings, "views": stage.views},
        "needs": {"logits": needs.logits, "cls": sorted(needs.cls)},
        "share": cached_share(stage),
        "precision": stage.precision,
        "dtype": stage.teacher_outputs,
    }
