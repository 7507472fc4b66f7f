"""The model of a stage: before its first epoch, and as it was kept."""

from pathlib import Path
from typing import Any

from distill_runner.common.seeds import seed_all, stage_seed
from distill_runner.models.build import build
from distill_runner.models.config import ModelConfig
from distill_runner.pipeline.stages import Stage


def initial_model(stage: Stage, source: Path | None, vocab_size: int | None) -> Any:
    """The model to train; seeds all random numbers, from which the method then draws its own parameters.

    Args:
        source: the folder of the model that it starts from, if a stage yields that.
        vocab_size: of a model that is made new.
    """
    # Nothing before may leave a trace in the random numbers below: it may have come from the store.
    seed_all(stage_seed(stage.config.seed, stage.name))
    model = stage.config.model
    if source is not None:
        model = model.model_copy(update={"source": str(source)})
    return build(model, stage.head, vocab_size)


def kept_model(stage: Stage, folder: Path) -> Any:
    """A model of the stage's task as it was saved, with its head."""
    return build(ModelConfig(source=str(folder), head="keep"), stage.head)
