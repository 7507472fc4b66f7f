"""The typed configuration of a whole run."""

from distill_runner.common.schema import Schema
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
