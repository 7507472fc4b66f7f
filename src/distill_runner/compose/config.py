"""Typed configuration of a whole run."""

from typing import Any

from pydantic import ValidationInfo, field_validator

from distill_runner.common.errors import within
from distill_runner.common.schema import Schema, typed
from distill_runner.pipeline.config import StageConfig, StoreConfig, TeacherConfig
from distill_runner.tracking import TrackerConfig
from distill_runner.training.config import Runtime


class RunConfig(Schema):
    """Configuration of a run. ``stage`` names the stage to build; other stages are built only if it needs them."""

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
        """Validate each stage separately, so that errors name the stage; an error in ``teacher`` is reported first."""
        found: dict[str, StageConfig] = {}
        if "teacher" not in before.data:
            return found
        for name, stage in stages.items():
            with within(f"stages.{name}"):
                found[name] = typed(StageConfig, stage, ".")
        return found
