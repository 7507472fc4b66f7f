"""What the points of a grid share: it is typed and resolved once, however many points read it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distill_runner.common.schema import LARGEST
from distill_runner.compose.composed import command, typed_run
from distill_runner.compose.config import RunConfig
from distill_runner.kinds import Task
from distill_runner.pipeline.config import StageConfig
from distill_runner.pipeline.resolving import resolve
from distill_runner.pipeline.stages import Stage
from distill_runner.sweeping.composing import Composed


@dataclass(frozen=True)
class Known:
    """A point that can run: its typed configuration, its names as in its result, and its resolved stage."""

    run: RunConfig
    described: Mapping[str, Any]
    stage: Stage

    def with_seeds(self, seeds: Sequence[int], given: str) -> "Known":
        """Return the point that differs only in the ``seeds`` of the run and of its stage, and in its command."""
        run_seed, stage_seed = seeds
        config = self.run.stages[self.run.stage].model_copy(update={"seed": stage_seed})
        changed = {"seed": run_seed, "command": given}
        run = self.run.model_copy(update={**changed, "stages": {**self.run.stages, self.run.stage: config}})
        return Known(run, {**self.described, **changed}, self.stage.with_seed(stage_seed))


class Alike:
    """Cache of the points that differ only in their seeds, and of the stages and tasks that other points share."""

    def __init__(self) -> None:
        self.known: dict[str, Known] = {}
        self.tasks: dict[str, Task] = {}
        self.typed: dict[str, StageConfig] = {}
        self.resolved: dict[tuple[str, ...], dict[str, Stage]] = {}

    def find(self, point: Composed) -> Known | None:
        """Return ``point`` if it differs from an earlier point only in its seeds; else None."""
        text, seeds = _without_seeds(point)
        known = self.known.get(text)
        valid = all(type(seed) is int and 0 <= seed <= LARGEST for seed in seeds)  # others are left to the schema
        return known.with_seeds(seeds, command(point.given)) if known and valid else None

    def keep(self, point: Composed, known: Known) -> None:
        """Keep a point for ``find``."""
        text, _ = _without_seeds(point)
        if text and known.stage.config.given is None:  # the members of an ensemble have its seed
            self.known[text] = known

    def run(self, point: Composed) -> RunConfig:
        """Return the typed configuration of ``point``.

        Raises:
            UserError: the schema refuses a value.
        """
        if point.resolved is None:
            return typed_run(point.config, point.given)
        stages = {name: self.typed.get(point.stages[name], stage) for name, stage in point.resolved["stages"].items()}
        run = typed_run(point.config, point.given, {**point.resolved, "stages": stages})
        self.typed.update({point.stages[name]: stage for name, stage in run.stages.items()})
        return run

    def stage(self, run: RunConfig, point: Composed) -> Stage:
        """Return the resolved stage that ``run`` builds.

        Raises:
            UserError: models, data or methods do not fit each other.
        """
        others = (f"{name}: {text}" for name, text in point.stages.items() if name != run.stage)
        known = self.resolved.setdefault((run.runtime.precision, *others), {}) if point.stages else None
        stages = dict(run.stages)
        if (config := stages.get(run.stage)) and config.task:
            text = config.task.model_dump_json()
            if text not in self.tasks:
                self.tasks[text] = config.task.resolved()
            stages[run.stage] = config.model_copy(update={"task": self.tasks[text]})
        return resolve(stages, run.stage, run.runtime.precision, known=known)


def _without_seeds(point: Composed) -> tuple[str, list[Any]]:
    """Return all that determines a point, but for its seeds, as text; and the seeds of the run and of its stage.

    The text is empty if the point could not be resolved.
    """
    found = point.resolved or {"stages": {}, "stage": None}
    if not isinstance(stage := found["stages"].get(found["stage"]), Mapping):
        return "", []
    parts = {key: value for key, value in found.items() if key not in ("template", "stages", "seed")}
    stages = {**found["stages"], found["stage"]: {**stage, "seed": None}}
    text = json.dumps([point.config.method.name, parts, stages], default=str)
    return text, [found.get("seed"), stage.get("seed")]
