"""Scores on test splits: predicted once, after training, by models that other data have chosen.

The predictions are artifacts of their own, made from a stage and the data of a test split. A stage's key knows no test
split, so a split that is added later is scored without training anything.
"""

import json
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from distill_runner.datasets.splits import Split
from distill_runner.models.build import load_model
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.planning import METRICS
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.status import write_json
from distill_runner.pipeline.store import SCHEMA, Spec
from distill_runner.training.data import predict

_OUTPUTS = "outputs.npy"
"""File with the outputs of the stage's head for a test split, in the order of the split."""


class FinalScores:
    """Predictions and scores of a stage's model on the test splits of its task that have labels.

    Raises:
        UserError: a split cannot be read, or only some of its examples have labels.
    """

    def __init__(self, stage: Stage, pipeline: Pipeline) -> None:
        self.stage, self.pipeline, self.task = stage, pipeline, stage.config.task
        self.models = stage.members or (stage,)

    @cached_property
    def splits(self) -> dict[str, Split]:
        """The test splits that have labels, by name; they are read into the store if they are not there."""
        if self.task is None:
            return {}
        names = self.task.test
        splits = {name: self.pipeline.inputs.split(self.models[0], split) for name, split in names.items()}
        return {name: split for name, split in splits.items() if self.task.has_labels(names[name], split)}

    def spec(self, name: str) -> Spec:
        """Return the spec of the predictions for a test split."""
        assert self.task is not None
        tokens = self.models[0].split_spec(self.task.test[name])
        return {"kind": "test", "schema": SCHEMA, "stage": self.stage.key, "tokens": tokens}

    def outputs(self, name: str) -> np.ndarray:
        """Return the outputs for a test split, (``split.num_outputs``, C)."""
        outputs: np.ndarray = np.load(self._folder(name) / _OUTPUTS)
        return outputs

    def scores(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each test split, in the order of ``task.metrics``.

        Splits that nobody has predicted are left out if the model has been deleted from the store.
        """
        store, scores = self.pipeline.store, {}
        for name, split in self.splits.items():
            assert self.task is not None
            if not store.has(self.spec(name)) and not all(store.has(model.spec) for model in self.models):
                continue
            metrics: dict[str, float] = json.loads((self._folder(name) / METRICS).read_text(encoding="utf-8"))
            if set(self.task.metrics) - metrics.keys():  # the run that predicted the split asked for other metrics
                metrics = self.task.score(self.outputs(name), split)
            scores[name] = {metric: metrics[metric] for metric in self.task.metrics}
        return scores

    def _folder(self, name: str) -> Path:
        """Return the folder of the predictions for a test split, which are computed if they are missing."""

        def write(folder: Path) -> None:
            assert self.task is not None
            pipeline, outputs = self.pipeline, []
            for stage in self.models:
                model = pipeline.device.place(load_model(pipeline.build(stage) / "model", stage.head))
                split = pipeline.inputs.split(stage, self.task.test[name])
                outputs.append(torch.from_numpy(predict(model, split, pipeline.device)))
            mean = (self.stage.ensemble_mean(outputs) if self.stage.members else outputs[0]).numpy()
            np.save(folder / _OUTPUTS, mean)
            write_json(folder / METRICS, self.task.score(mean, self.splits[name]))

        return self.pipeline.store.get(self.spec(name), write)
