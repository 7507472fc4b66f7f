"""Caches of a teacher's outputs: whether a cache is possible, what determines it, and which cache serves a stage."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from distill_runner.kinds.splits import HELD_OUT
from distill_runner.pipeline.stage_data import SCHEMA
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Spec, Store, key_of
from distill_runner.training import cache_choice


def why_live(stage: Stage, mode: Literal["auto", "cached", "live"]) -> str | None:
    """Return why the teacher's outputs cannot be cached; None if they can.

    Raises:
        UserError: they cannot be cached, and ``mode`` is ``cached``.
    """
    if stage.teacher is not None and stage.teacher.has_columns:
        return None
    task = stage.config.task
    endless = task is not None and task.is_endless(stage.data.views)
    return cache_choice.why_live(mode, stage.needs[1], text=stage.data.is_corpus, endless=endless)


def read_by(stage: Stage, teacher: Stage) -> Stage:
    """Return the stage with its data tokenised by the teacher's tokenizer."""
    same = teacher.config.given is not None or teacher.tokenizer == stage.tokenizer
    return stage if same else replace(stage, tokenizer=teacher.tokenizer)


def cached_share(stage: Stage) -> float:
    """Return the share of the training split whose outputs the stage's cache holds: what the stage trains on.

    All of it where a held-out set or fixed views of images decide which outputs a share reads, and where the outputs
    are columns of the data.
    """
    task, teacher = stage.config.task, stage.teacher
    of_all = stage.data.views is not None or (task is not None and task.select_on == HELD_OUT)
    return 1.0 if of_all or (teacher is not None and teacher.has_columns) else stage.data.share


def targets_spec(stage: Stage, checkpoint: int | None) -> Spec:
    """Return the spec of the cached features of the teacher, or of one of its checkpoints, on the training split."""
    assert stage.teacher is not None
    assert stage.config.task is not None
    _, needs = stage.needs
    return {
        "kind": "targets",
        "schema": SCHEMA,
        "layout": "by example",
        "teacher": stage.teacher.key,
        "tokens": read_by(stage, stage.teacher).data.split_spec(stage.data.train_split),
        "needs": {"logits": needs.logits, "cls": sorted(needs.cls)},
        "precision": stage.precision,
        **({"dtype": stage.teacher_outputs} if stage.teacher_outputs != "float32" else {}),
        **({"checkpoint": checkpoint} if checkpoint is not None else {}),
        **({"share": share} if (share := cached_share(stage)) < 1 else {}),
        **({"shown": {**shown, "views": stage.data.views}} if (shown := stage.config.task.shown) else {}),
    }


def serving(stage: Stage, checkpoint: int | None, store: Store) -> Spec:
    """Return the spec of the cache that the stage reads, whether or not the cache exists."""
    own = targets_spec(stage, checkpoint)
    if store.has(own):
        return own
    return larger(own, (spec for spec in store.specs("targets") if store.has(spec)), _depth(stage))


def larger(own: Spec, others: Iterable[Spec], depth: int) -> Spec:
    """Return the first of ``others`` that contains all of ``own``, bit for bit; ``own`` if there is none.

    Args:
        depth: number of layers of the teacher. A teacher that is run to fewer layers computes the last of them in
            another way, for [CLS] alone, so the bits may differ.
    """
    asked, of = own["needs"], _but_extent(own)
    for other in others:
        has = other["needs"]
        enough = has["logits"] >= asked["logits"] and set(has["cls"]) >= set(asked["cls"])
        enough = enough and other.get("share", 1.0) >= own.get("share", 1.0)
        if enough and _run_to(has, depth) == _run_to(asked, depth) and _but_extent(other) == of:
            return other
    return own


def _but_extent(spec: Spec) -> str:
    return key_of({name: value for name, value in spec.items() if name not in ("needs", "share")})


def _run_to(needs: dict[str, Any], depth: int) -> int:
    return depth if needs["logits"] else max(needs["cls"], default=0)


def _depth(stage: Stage) -> int:
    assert stage.teacher is not None
    return stage.teacher.shape.num_layers
