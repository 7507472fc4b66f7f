"""Stages that yield predictions instead of a model: the mean of several models, or columns of the data."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distill_runner.datasets.split import Split
from distill_runner.pipeline.stages import Stage
from distill_runner.training.train import PREDICTIONS


def mean_of(stage: Stage) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return the function that averages the outputs of an ensemble's members."""
    assert stage.config.given is not None
    return partial(stage.outputs.mean, weights=stage.config.given.shares)


def judge_mean(stage: Stage, folder: Path, members: Sequence[Path], split: Callable[[str], Split]) -> None:
    """Save the predictions of an ensemble for the validation splits, and their scores in ``metrics.json``.

    A stage whose predictions are columns of the data has no members, and gets neither predictions nor scores.

    Args:
        folder: the folder of the ensemble's artifact.
        members: the folders of the members' artifacts.
        split: returns a split of the task, given its name.
    """
    task, scores = stage.config.task, dict[str, dict[str, float]]()
    assert task is not None
    for name, split_name in task.validation.items() if members else ():
        of = [torch.from_numpy(np.load(member / PREDICTIONS.format(name))) for member in members]
        outputs = mean_of(stage)(of).numpy()
        np.save(folder / PREDICTIONS.format(name), outputs)
        scores[name] = task.score(outputs, split(split_name))
    metrics = task.named(scores) if scores else {}
    (folder / "metrics.json").write_text(json.dumps({"metrics": metrics}, indent=1))
