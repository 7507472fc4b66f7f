"""Plan of a build: the artifacts that building a stage would read or create, known before anything is trained."""

from dataclasses import dataclass

from distill_runner.common.errors import override, quantity
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Spec, Store, key_of
from distill_runner.pipeline.targets import Mode, live_reason, targets_spec


@dataclass(frozen=True)
class PlannedArtifact:
    """Line of the plan: an artifact, whether it is in the store (``hit``), and what it is made from."""

    name: str
    key: str
    hit: bool
    summary: str

    def __str__(self) -> str:
        return f"{'hit' if self.hit else 'build':5} {self.name:8} {self.key}  {self.summary}"


def plan(stage: Stage, store: Store, targets: Mode = "auto") -> list[PlannedArtifact]:
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
            lines += _plan_targets(stage, stage.teacher, store, targets)
    return list(dict.fromkeys([*lines, PlannedArtifact(stage.name, stage.key, hit, stage_summary(stage))]))


def stage_summary(stage: Stage) -> str:
    """Return the data, model size, origin and loss terms of a stage in a few words."""
    config = stage.config
    data = f"corpus {config.corpus.name}" if config.corpus else stage.task.name
    data += f" on {config.transfer.name}" if config.transfer else ""
    if config.prediction_source is not None:
        members = ", ".join(config.prediction_source.sources)
        return f"{data}: {f'mean of {members}' if members else 'columns of the data'}"
    origin = stage.source_stage.name if stage.source_stage else config.model.source or "fresh"
    size = f"{quantity(stage.shape.num_layers, 'layer')} x {stage.shape.width}"
    trimmed = ", vocabulary trimmed" if config.model.vocabulary == "trim" else ""
    return f"{data}: {size} from {origin}{trimmed}; {', '.join(config.method.terms) or 'not trained'}"


def position_warnings(stage: Stage) -> list[str]:
    """Return a line for each stage of a build that reads positions which no earlier stage trained.

    Text of a corpus is what positions are trained on, so a stage that pre-trains is never among them.
    """
    lines: list[str] = []
    for part in stage.in_build_order:
        length, trained = part.config.num_positions, part.num_trained_positions
        if part.is_corpus or trained is None or length <= trained:
            continue
        names = ", ".join(earlier.name for earlier in reversed(part.earlier))
        lines.append(
            f"stage {part.name} reads {length} positions, of which its weights ({names}) have trained {trained}: "
            + override("corpus.max_length", length)
            + " trains all, "
            + override("task.max_length", trained)
            + " reads no more"
        )
    return lines


def stages_to_build(stage: Stage, store: Store) -> list[Stage]:
    """Return the stages to build for ``stage``, in build order, each once; empty if ``stage`` is in the store."""
    if store.has(stage.spec):
        return []
    upstream_stages = {part.key: part for upstream in stage.upstream for part in stages_to_build(upstream, store)}
    return [*(upstream_stages | {stage.key: stage}).values()]


def needed_specs(stage: Stage) -> list[Spec]:
    """Return the specs of ``stage`` and of the stages that it needs, and of the checkpoints that these read."""
    stages = [stage, *stage.all_upstream]
    return [
        *(part.spec for part in stages),
        *(part.teacher.checkpoints_spec for part in stages if part.route and part.teacher),
    ]


def _plan_targets(stage: Stage, teacher: Stage, store: Store, mode: Mode) -> list[PlannedArtifact]:
    needs = stage.teacher_needs
    projections = sorted(needs.projections, key=lambda projection: (projection[1], projection[0]))
    features = [
        *(["logits"] if needs.logits else []),
        *[f"[CLS] of layer {layer}" for layer in sorted(needs.cls)],
        *[f"states of layer {layer}" for layer in sorted(needs.states)],
        *[f"{name} of layer {layer}" for name, layer in projections],
    ]
    text = ", ".join(features if len(features) <= 3 else [*features[:2], "...", features[-1]])
    if reason := live_reason(stage, mode):
        return [PlannedArtifact("targets", "-" * 16, False, f"{text} of {teacher.name}, live ({reason})")]
    remark, lines = "" if mode == "auto" else f" (runtime.targets={mode})", []
    for checkpoint in stage.teacher_checkpoints:
        name = teacher.name
        if checkpoint is not None:
            name += f" after its epoch {checkpoint}" if checkpoint else " before its first epoch"
        spec = targets_spec(stage, checkpoint)
        lines.append(PlannedArtifact("targets", key_of(spec), store.has(spec), f"{text} of {name}{remark}"))
    if stage.route and not all(line.hit for line in lines):
        hit = store.has(spec := teacher.checkpoints_spec)
        again = "; trains the teacher again" if store.has(teacher.spec) and not hit else ""
        lines.insert(0, PlannedArtifact("checkpoints", key_of(spec), hit, f"of {teacher.name}{again}"))
    return lines
