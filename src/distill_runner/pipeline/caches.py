"""Which cache of a teacher's outputs serves a stage: its own, or one that holds more of the same teacher."""

from collections.abc import Iterable
from typing import Any

from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Spec, Store, key_of


def serving(stage: Stage, checkpoint: int | None, store: Store) -> Spec:
    """The spec of the cache that the stage reads, whether it is there or not."""
    own = stage.targets_spec(checkpoint)
    if store.has(own):
        return own
    return larger(own, (spec for spec in store.specs("targets") if store.has(spec)), _depth(stage))


def larger(own: Spec, others: Iterable[Spec], depth: int) -> Spec:
    """The first of ``others`` that has all of ``own``, bit for bit; ``own`` if none has.

    Args:
        depth: layers of the teacher. One that is run less far computes its last layer in another way, for [CLS] alone.
    """
    asked, of = own["needs"], _but_needs(own)
    for other in others:
        has = other["needs"]
        enough = has["logits"] >= asked["logits"] and set(has["cls"]) >= set(asked["cls"])
        if enough and _run_to(has, depth) == _run_to(asked, depth) and _but_needs(other) == of:
            return other
    return own


def _but_needs(spec: Spec) -> str:
    return key_of({name: value for name, value in spec.items() if name != "needs"})


def _run_to(needs: dict[str, Any], depth: int) -> int:
    return depth if needs["logits"] else max(needs["cls"], default=0)


def _depth(stage: Stage) -> int:
    assert stage.teacher is not None
    return stage.teacher.shape.num_layers
