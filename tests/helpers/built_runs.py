"""Runs that are built through the pipeline."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store


def student(run: RunConfig) -> Stage:
    return resolve_stage(run.stages, "student", run.runtime.precision)


def share_texts(run: RunConfig, folder: Path) -> RunConfig:
    """Let the run's own store keep vocabularies and tokens in ``folder``, so that runs train anew, but encode once."""
    for kind in ("vocabulary", "tokens"):
        (folder / kind).mkdir(exist_ok=True)
        if not (own := Path(run.store.dir) / kind).exists():
            own.parent.mkdir(exist_ok=True)
            own.symlink_to(folder / kind)
    return run


class Run:
    """A run's pipeline, and the stages that it trained."""

    def __init__(self, run: RunConfig) -> None:
        self.stage, self.trained = student(run), list[str]()
        self.pipeline = Pipeline(Store(run.store.dir), run.runtime, self.report)
        self.store = self.pipeline.store

    def report(self, name: str) -> Callable[[Mapping[str, Any], int, float], None]:
        self.trained.append(name)
        return lambda values, step, epoch: None

    def build(self) -> dict[str, bytes]:
        """The student's files that must not differ by a bit."""
        folder = self.pipeline.build(self.stage)
        names = ["model/model.safetensors", "model/tokenizer.json", "predictions-validation.npy"]
        return {name: (folder / name).read_bytes() for name in names}
