"""Plan of a build: the artifacts that building a stage would read or create, known before anything is trained."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from distill_runner.models.features import FeatureRequest
from distill_runner.pipeline.caches import serving, why_live
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Spec, Store, key_of


@dataclass(frozen=True)
class Planned:
    """Line of the plan: an artifact, whether it is in the store (``hit``), and what it is made from."""

    name: str
    key: str
    hit: bool
    what: str

    def __str__(self) -> str:
        return f"{'hit' if self.hit else 'build':5} {self.name:8} {self.key}  {self.what}"


def plan(stage: Stage, store: Store, targets: Literal["auto", "cached", "live"] = "auto") -> list[Planned]:
    """Return the artifacts that building ``stage`` would read or create, in build order, ``stage`` itself last.

    A stage that is in the store needs no other artifact.

    Args:
        targets: as in ``Runtime``.
    Raises:
        UserError: ``targets`` is ``cached`` for outputs that cannot be cached.
    """
    lines = []
    if not (hit := store.has(stage.spec)):
        lines = [line for upstream in stage.upstream for line in plan(upstream, store, targets)]
        if stage.teacher:
            lines += _targets(stage, stage.teacher, store, targets)
    return list(dict.fromkeys([*lines, Planned(stage.name, stage.key, hit, describe(stage))]))


def describe(stage: Stage) -> str:
    """Return the data, model size, origin and loss terms of a stage in a few words."""
    config = stage.config
    data = config.task.name if config.task else f"corpus {config.corpus.name}" if config.corpus else ""
    data += f" on {config.transfer.name}" if config.transfer else ""
    if config.given is not None:
        of = ", ".join(config.given.sources)
        return f"{data}: {f'mean of {of}' if of else 'columns of the data'}"
    origin = stage.source.name if stage.source else config.model.source or "fresh"
    terms = ", ".join(config.method.terms)
    return f"{data}: {stage.shape.num_layers} layers x {stage.shape.width} from {origin}; {terms or 'not trained'}"


def missing(stage: Stage, store: Store) -> list[Stage]:
    """Return the stages to build for ``stage``, in build order, each once; empty if ``stage`` is in the store."""
    if store.has(stage.spec):
        return []
    found = {part.key: part for upstream in stage.upstream for part in missing(upstream, store)}
    return [*(found | {stage.key: stage}).values()]


def fillable(
    stage: Stage, store: Store, targets: Literal["auto", "cached", "live"] = "auto"
) -> Iterator[tuple[Stage, list[Spec]]]:
    """Yield each stage to build whose teacher is in the store, with the specs of the missing caches."""
    if store.has(stage.spec):
        return
    for upstream in stage.upstream:
        yield from fillable(upstream, store, targets)
    teacher = stage.teacher
    if teacher is None or targets == "live" or why_live(stage, "auto"):
        return
    if store.has(teacher.checkpoints_spec if stage.route else teacher.spec):
        specs = (serving(stage, checkpoint, store) for checkpoint in stage.followed)
        missing = [spec for spec in specs if not store.has(spec)]
        if missing:
            yield stage, missing


def _targets(stage: Stage, teacher: Stage, store: Store, mode: Literal["auto", "cached", "live"]) -> list[Planned]:
    _, needs = stage.needs
    what = _read(needs)
    if why := why_live(stage, mode):
        return [Planned("targets", "-" * 16, False, f"{what} of {teacher.name}, {why}")]
    remark = "" if mode == "auto" else f" (runtime.targets={mode})"
    lines = []
    for checkpoint in stage.followed:
        of = _followed(teacher.name, checkpoint)
        lines.append(_planned("targets", serving(stage, checkpoint, store), store, f"{what} of {of}{remark}"))
    if stage.route and not all(line.hit for line in lines):
        kept = teacher.checkpoints_spec
        again = "; trains the teacher again" if store.has(teacher.spec) and not store.has(kept) else ""
        lines.insert(0, _planned("checkpoints", kept, store, f"of {teacher.name}{again}"))
    return lines


def _followed(teacher: str, checkpoint: int | None) -> str:
    if checkpoint is None:
        return teacher
    return f"{teacher} after its epoch {checkpoint}" if checkpoint else f"{teacher} before its first epoch"


def _read(needs: FeatureRequest) -> str:
    """Return ``needs`` as text, shortened if there are more than three entries."""
    read = [
        *(["logits"] if needs.logits else []),
        *(f"[CLS] of layer {layer}" for layer in sorted(needs.cls)),
        *(f"states of layer {layer}" for layer in sorted(needs.states)),
        *(
            f"{name} of layer {layer}"
            for name, layer in sorted(needs.projections, key=lambda place: (place[1], place[0]))
        ),
    ]
    return ", ".join(read if len(read) <= 3 else [*read[:2], "...", read[-1]])


def _planned(name: str, spec: Spec, store: Store, what: str) -> Planned:
    return Planned(name, key_of(spec), store.has(spec), what)
