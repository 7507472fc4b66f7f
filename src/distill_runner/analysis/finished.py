"""A finished run: its student and its teacher, read from the store, and their outputs on validation examples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import OmegaConf

from distill_runner.common.errors import UserError
from distill_runner.compose.composed import typed_run

if TYPE_CHECKING:
    from torch import Tensor

    from distill_runner.kinds.task import Task
    from distill_runner.kinds.verdicts import Verdicts
    from distill_runner.methods.hidden_states import Attend
    from distill_runner.models.features import FeatureRequest, Features, Projection
    from distill_runner.pipeline.build import Pipeline
    from distill_runner.pipeline.stages import Stage


@dataclass
class FinishedRun:
    """A finished run: its folder, its student's stage, and the pipeline that finds its artifacts in the store.

    ``name`` is the method with its mapping, and the student's depth.
    """

    folder: Path
    name: str
    stage: "Stage"
    pipeline: "Pipeline"

    @classmethod
    def read(cls, folder: Path) -> "FinishedRun":
        """Read a finished run from its folder.

        Raises:
            UserError: the folder holds no run, or the artifacts of student or teacher are not in the store.
        """
        from distill_runner.pipeline import status
        from distill_runner.pipeline.build import Pipeline
        from distill_runner.pipeline.resolving import resolve
        from distill_runner.pipeline.store import Store
        from distill_runner.report.cells import label
        from distill_runner.report.result import described_by

        if not (folder / "config.yaml").is_file():
            raise UserError("run", folder, "is not the folder of a run", "Give folders in outputs/runs.")
        config: Any = OmegaConf.load(folder / "config.yaml")
        run = typed_run(config)
        stage = resolve(run.stages, "student", run.runtime.precision)
        pipeline = Pipeline(Store(run.store.dir), run.runtime)
        for needed in (stage, stage.teacher):
            if needed is not None and not pipeline.store.has(needed.spec):
                problem = f"its stage {needed.name} is not in the store {run.store.dir}"
                then = (status.read(folder) or {}).get("key")
                if needed is stage and then is not None and then != stage.key:
                    problem = "its data, its teacher's files or this package have changed since it ran"
                raise UserError("run", folder, problem, "Repeat the run, from the folder that it was started in.")
        return cls(folder, f"{label(described_by(run))}, {stage.shape.num_layers} layers", stage, pipeline)

    @property
    def teacher(self) -> "Stage":
        if self.stage.teacher is None:
            raise UserError("run", self.folder, "has no teacher to compare it with")
        return self.stage.teacher

    def verdicts(self, stage: "Stage") -> "Verdicts":
        """Return the verdicts of a stage's model on the examples of the first validation split."""
        from distill_runner.training.train import PREDICTIONS

        if stage.has_columns:
            raise UserError(
                "run", self.folder, "its teacher is columns of the training data, without predictions for others"
            )
        outputs = np.load(self.pipeline.build(stage) / PREDICTIONS.format(self.split))
        return self._task.verdicts(outputs, self.tokens)

    @property
    def _task(self) -> "Task":
        assert self.stage.config.task is not None
        return self.stage.config.task

    @property
    def split(self) -> str:
        return next(iter(self._task.validation))

    @property
    def tokens(self) -> Any:
        return self.pipeline.inputs.split(self.stage, self._task.validation[self.split])

    def texts(self, examples: Sequence[int]) -> list[str]:
        """Return validation examples as readable text."""
        return self._task.as_texts(self._task.validation[self.split], self.tokens, examples)

    def words(self, example: int) -> list[str]:
        """Return the tokens of a validation example."""
        from distill_runner.models.sources import read_tokenizer

        tokenizer = read_tokenizer(str(self.pipeline.build(self.stage) / "model"))
        words: list[str] = tokenizer.convert_ids_to_tokens(self.tokens.batch([example]).input_ids.tolist())
        return words

    def attention(self, stage: "Stage", example: int) -> dict[int, np.ndarray]:
        """Return the attention probabilities (heads, L, L) of one example by layer, for every layer."""
        from distill_runner.models.features import FeatureRequest

        names: tuple[Projection, ...] = ("query", "key")
        places = frozenset((name, layer) for layer in range(1, stage.shape.num_layers + 1) for name in names)
        read = self._features(stage, self.tokens.batch([example]), FeatureRequest(projections=places))
        heads = {
            place: states.unflatten(1, (stage.shape.num_heads, -1)).transpose(0, 1)
            for place, states in read.projections.items()
        }
        return {
            k: (heads["query", k] @ heads["key", k].mT / heads["key", k].shape[-1] ** 0.5).softmax(-1).numpy()
            for k in range(1, stage.shape.num_layers + 1)
        }

    def states(self, stage: "Stage", layers: Sequence[int], examples: np.ndarray) -> dict[int, np.ndarray]:
        """Return the [CLS] outputs (n, H) by layer for n examples, in the order of ``examples``."""
        return {layer: cls.numpy() for layer, cls in self._cls(stage, layers, examples).items()}

    def _cls(self, stage: "Stage", layers: Sequence[int], examples: np.ndarray) -> "dict[int, Tensor]":
        from distill_runner.models.features import FeatureRequest

        batch = self.tokens.batch(examples)
        cls = self._features(stage, batch, FeatureRequest(cls=frozenset(layers))).cls
        row = {example: number for number, example in enumerate(batch.index.tolist())}
        return {layer: cls[layer][[row[example] for example in examples.tolist()]] for layer in layers}

    def alpha(self, layers: Sequence[int], examples: np.ndarray) -> dict[int, np.ndarray]:
        """Return the weights of the n teacher layers in each student layer's target: (examples, n) by student layer.

        The weights come from the run's own combination (ALP-KD Eq. 6), for the student at the end of training. They
        are NaN for teacher layers that the mapping does not give to the student layer.

        Raises:
            UserError: the run does not attend to teacher layers, its attention has trained projections, which are not
                kept, or it does not supervise one of ``layers``.
        """
        combination, depth = self._attending(), self.teacher.shape.num_layers
        for layer in layers:
            if layer not in combination.layers:
                known = ", ".join(map(str, combination.layers))
                raise UserError("--layers", layer, f"{self.name} does not supervise it", f"It supervises {known}.")
        read = sorted({k for layer in layers for k in combination.layers[layer]})
        combination(self._cls(self.stage, layers, examples), self._cls(self.teacher, read, examples))
        weights = {layer: np.full((len(examples), depth), np.nan) for layer in layers}
        for layer, filled in weights.items():
            filled[:, np.array(combination.layers[layer]) - 1] = combination.alpha[layer][:, 0]
        return weights

    def _attending(self) -> "Attend":
        from distill_runner.methods.hidden_states import Attend, HiddenStateLoss

        terms = [term for term in self.stage.method().active() if isinstance(term, HiddenStateLoss)]
        for combination in (term.combination for term in terms):
            if isinstance(combination, Attend):
                if combination.attention.kind == "kqv":
                    problem = "its attention has trained projections, which are not kept with the student"
                    raise UserError("run", self.folder, problem, "Give runs of attention=dot.")
                return combination
        problem = f"{self.name} does not weight the teacher's layers"
        raise UserError("run", self.folder, problem, "Give runs of method=alp.")

    @property
    def matched(self) -> dict[int, int]:
        """Teacher layer by student layer, from the first loss term that compares single layers; empty if none does."""
        from distill_runner.methods.base import LayeredTerm

        for term in self.stage.method().active():
            if isinstance(term, LayeredTerm) and all(len(entry) == 1 for entry in term.layers.values()):
                return {j: entry[0] for j, entry in term.layers.items()}
        return {}

    def _features(self, stage: "Stage", batch: Any, needs: "FeatureRequest") -> "Features":
        import torch

        from distill_runner.models.build import build
        from distill_runner.models.config import ModelConfig
        from distill_runner.models.extract import extract

        source = ModelConfig(source=str(self.pipeline.build(stage) / "model"), head="keep")
        with torch.inference_mode():
            return extract(build(source, stage.head).eval(), batch, needs)
