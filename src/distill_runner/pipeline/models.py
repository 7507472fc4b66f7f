"""Model of a stage: as it is before the first epoch, and as it was saved."""

from pathlib import Path
from typing import Any

from distill_runner.common.seeds import seed_all, stage_seed
from distill_runner.models.build import build
from distill_runner.models.config import ModelConfig
from distill_runner.pipeline.stages import Stage


def initial_model(stage: Stage, source: Path | None, vocab_size: int | None) -> Any:
    """Seed all random number generators, and return the model to train.

    The method draws its own parameters from the same generators afterwards.

    Args:
        source: the folder of the model to start from, if an upstream stage yields that model.
        vocab_size: the vocabulary size of a newly initialised model.
    """
    # Earlier results may have come from the store instead, so computing them must not change the numbers drawn here.
    seed_all(stage_seed(stage.config.seed, stage.name))
    model = stage.config.model
    if source is not None:
        model = model.model_copy(update={"source": str(source)})
    return build(model, stage.head, vocab_size)


def kept_model(stage: Stage, folder: Path) -> Any:
    """Return the model that was saved in ``folder``, with its head for the stage's task."""
    return build(ModelConfig(source=str(folder), head="keep"), stage.head)
