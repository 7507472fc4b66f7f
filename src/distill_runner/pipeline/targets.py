"""Outputs of a stage's teacher: whether they can be cached, which cache serves a stage, and what training reads."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from distill_runner.common.errors import UserError
from distill_runner.datasets.splits import Split
from distill_runner.models.build import load_model
from distill_runner.models.features import EncoderShape, FeatureRequest
from distill_runner.pipeline.inputs import Inputs
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import SCHEMA, Spec, Store, key_of
from distill_runner.tasks.decoding import fitted_temperature
from distill_runner.tasks.scores import training_scores
from distill_runner.tasks.splits import HELD_OUT
from distill_runner.training.config import Runtime
from distill_runner.training.data import select_share
from distill_runner.training.devices import Device
from distill_runner.training.teachers import (
    CachedTargets,
    CheckpointTargets,
    LiveTargets,
    MeanTargets,
    NoTeacher,
    RoundedTargets,
    ScaledTargets,
    TeacherTargets,
)
from distill_runner.training.train import EPOCH, PREDICTIONS

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
        views = "Set augment.views=8, for 8 fixed views of each image, or" if endless else "Set"
        raise UserError("runtime.targets", mode, reason, f"{views} runtime.targets to auto or live.")
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


class Builder(Protocol):
    """Interface of the ``Pipeline`` that builds the teacher."""

    store: Store
    runtime: Runtime
    inputs: Inputs

    @property
    def device(self) -> Device: ...

    def build(self, stage: Stage) -> Path: ...

    def checkpoints(self, stage: Stage) -> Path: ...

    def untrained(self, stage: Stage) -> Any: ...


def decide_cached(stage: Stage, builder: Builder) -> tuple[bool, str]:
    """Return whether the outputs of the stage's teacher are read from a cache, and the reason."""
    mode, store = builder.runtime.targets, builder.store
    if reason := live_reason(stage, mode):
        return False, f"live ({reason})"
    assert stage.teacher is not None
    if stage.teacher.has_columns:
        return True, "read from columns of the data"
    new = [spec for number in stage.teacher_checkpoints if not store.has(spec := usable_cache(stage, number, store))]
    split, share = builder.inputs.split(stage, stage.train_split).teacher_inputs, cached_share(stage)
    size = cache_bytes(stage.teacher_needs, stage.teacher.shape, split, len(new), stage.teacher_outputs, share)
    return choose_cache(mode, size, store.folder)


def teacher_targets(stage: Stage, builder: Builder) -> TeacherTargets:
    """Return the outputs of the stage's teacher, cached or live, whichever fits; both give the same numbers."""
    if stage.teacher is None:
        return NoTeacher()
    cached, reason = decide_cached(stage, builder)
    log.info("stage %s: teacher targets %s", stage.name, reason)
    teacher = _Teacher(stage, stage.teacher, builder)
    open_targets: Callable[[int | None], TeacherTargets]
    if cached:
        caches = {checkpoint: teacher.from_cache(checkpoint) for checkpoint in stage.teacher_checkpoints}
        open_targets = caches.__getitem__
    else:
        teacher.folder()  # built now, not between two steps of training
        rounded = stage.teacher_outputs == "float16"
        open_targets = (lambda checkpoint: RoundedTargets(teacher.live(checkpoint))) if rounded else teacher.live
    if stage.route:
        return CheckpointTargets(stage.route, open_targets)
    if not stage.config.calibrate_teacher:
        return open_targets(None)
    temperature = teacher_temperature(stage, builder)
    log.info("stage %s: teacher logits divided by %.4g, fitted on the validation split", stage.name, temperature)
    return ScaledTargets(open_targets(None), temperature)


def teacher_temperature(stage: Stage, builder: Builder) -> float:
    """Return the temperature that fits the teacher's logits to the labels of the first validation split best.

    The teacher is built first if it is missing.
    """
    task, teacher = stage.config.task, stage.teacher
    assert task is not None
    assert teacher is not None
    name, split = next(iter(task.validation.items()))
    outputs = np.load(builder.build(teacher) / PREDICTIONS.format(name)).astype(np.float64)
    labels = np.asarray(builder.inputs.split(teacher.members[0] if teacher.members else teacher, split).labels)
    return fitted_temperature(outputs, labels)


def column_outputs(stage: Stage) -> np.ndarray:
    """Return the outputs (N, C) in columns of the data for the training examples of the stage.

    Raises:
        UserError: the columns do not exist, or do not hold predictions.
    """
    task, transfer = stage.config.task, stage.config.transfer
    assert task is not None
    scores = training_scores(task, transfer)
    return scores.outputs[scores.is_used]


class _Teacher:
    """Outputs of a stage's teacher, or of one of its checkpoints."""

    def __init__(self, stage: Stage, teacher: Stage, builder: Builder) -> None:
        self.stage, self.teacher, self.builder = stage, teacher, builder
        self.needs = stage.teacher_needs
        self.folder = cache(lambda: (builder.checkpoints if stage.route else builder.build)(teacher))
        """Returns the folder of the teacher, which is built first if it is missing."""

    def live(self, checkpoint: int | None) -> LiveTargets | MeanTargets:
        if self.teacher.members:
            folders = ((member, self.builder.build(member) / "model") for member in self.teacher.members)
            return MeanTargets([self._live_model(*member) for member in folders], self.teacher.ensemble_mean)
        if checkpoint == 0:
            return self._live_model(self.teacher, None)
        name = "model" if checkpoint is None else EPOCH.format(checkpoint)
        return self._live_model(self.teacher, self.folder() / name)

    def _live_model(self, model: Stage, folder: Path | None) -> LiveTargets:
        """Return the live outputs of ``model`` as saved in ``folder``; before its first epoch if ``folder`` is None."""
        split = self.builder.inputs.split(with_teacher_tokenizer(self.stage, model), self.stage.train_split)
        network = load_model(folder, self.stage.head) if folder else self.builder.untrained(model)
        return LiveTargets(network, split, self.needs, self.builder.device)

    def from_cache(self, checkpoint: int | None) -> CachedTargets:
        store, own = self.builder.store, targets_spec(self.stage, checkpoint)
        usable = usable_cache(self.stage, checkpoint, store)
        folder = store.find(usable) if usable != own else None  # a larger cache may be damaged, or just deleted
        folder = folder or store.get(own, partial(self._write, checkpoint=checkpoint))
        return CachedTargets(folder, self.builder.device, self.needs)

    def _write(self, folder: Path, checkpoint: int | None) -> None:
        if self.teacher.has_columns:
            logits = column_outputs(self.stage)
            np.save(folder / "logits.npy", np.tile(logits, (self.stage.views or 1, 1)))
        else:
            teacher, share = self.live(checkpoint), cached_share(self.stage)
            split = teacher.split
            examples = split.teacher_numbers(select_share(len(split), share)) if share < 1 else None
            CachedTargets.write(folder, teacher, self.stage.teacher_outputs, examples)
