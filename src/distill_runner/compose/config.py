"""The typed configuration of a whole run."""

from typing import Any

from pydantic import ValidationInfo, field_validator

from distill_runner.common.errors import within
from distill_runner.common.schema import Schema, typed
from distill_runner.pipeline.config import StageConfig, StoreConfig, TeacherConfig
from distill_runner.tracking import TrackerConfig
from distill_runner.training.config import Runtime


class RunConfig(Schema):
    """A run: ``stage`` is what is asked for; the others are there for it."""

    teacher: TeacherConfig
    stages: dict[str, StageConfig]
    runtime: Runtime
    store: StoreConfig
    tracker: TrackerConfig
    method: str
    command: str
    seed: int
    stage: str
    plan: bool

    @field_validator("stages", mode="before")
    @classmethod
    def _by_name(cls, stages: Any, before: ValidationInfo) -> Any:
        """Each stage by itself, so that a fault is told with the stage's name; one of the teacher goes first."""
        found: dict[str, StageConfig] = {}
        if "teacher" not in before.data:
            return found
        for name, stage in stages.items():
            with within(f"stages.{name}"):
                found[name] = typed(StageConfig, stage, ".")
        return found
