"""A finished run: its student and its teacher, read from the store, and their outputs on validation examples."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from distill_runner.common.errors import UserError, override, quantity
from distill_runner.compose.run_config import typed_run
from distill_runner.methods.base import LayeredTerm
from distill_runner.methods.hidden_states import Attend, HiddenStateLoss
from distill_runner.models.build import load_model
from distill_runner.models.extract import extract
from distill_runner.models.families import Projection
from distill_runner.models.features import FeatureRequest, Features
from distill_runner.models.sources import resolve_source
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.planning import needed_specs
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store
from distill_runner.pipeline.targets import with_teacher_tokenizer
from distill_runner.report.collect import label
from distill_runner.report.result import describe_run
from distill_runner.tasks.task import ExamplePredictions
from distill_runner.training.train import PREDICTIONS


@dataclass
class FinishedRun:
    """A finished run: its folder, its student's stage, and the pipeline that finds its artifacts in the store.

    ``name`` is the method with its mapping, and the student's depth.
    """

    folder: Path
    name: str
    stage: Stage
    pipeline: Pipeline

    @classmethod
    def read(cls, folder: Path, stack: ExitStack | None = None) -> "FinishedRun":
        """Read a finished run from its folder.

        Args:
            stack: if it is not None, the artifacts of the run cannot be deleted as long as it is open.
        Raises:
            UserError: the folder holds no run, or the artifacts of student or teacher are not in the store.
        """
        if not (folder / "config.yaml").is_file():
            raise UserError("run", folder, "is not the folder of a run", "Give folders in outputs/runs.")
        config: Any = OmegaConf.load(folder / "config.yaml")
        run = typed_run(config)
        stage = resolve_stage(run.stages, "student", run.runtime.precision)
        pipeline = Pipeline(Store(run.store.dir), run.runtime)
        if stack is not None:
            stack.enter_context(pipeline.store.protected())
            pipeline.store.protect(*needed_specs(stage))
        for required in (stage, stage.teacher):
            if required is not None and not pipeline.store.has(required.spec):
                problem = f"its stage {required.name} is not in {run.store.dir}, or what it was made from has changed"
                raise UserError("run", folder, problem, "Repeat the run, from the folder that it was started in.")
        return cls(folder, f"{label(describe_run(run))}, {quantity(stage.shape.num_layers, 'layer')}", stage, pipeline)

    @property
    def teacher(self) -> Stage:
        if self.stage.teacher is None:
            raise UserError("run", self.folder, "has no teacher to compare it with")
        return self.stage.teacher

    def example_predictions(self, stage: Stage) -> ExamplePredictions:
        """Return the predictions of a stage's model on the examples of the first validation split."""
        if stage.has_columns:
            problem = "its teacher is columns of the training data, without predictions for other examples"
            raise UserError("run", self.folder, problem)
        outputs = np.load(self.pipeline.build(stage) / PREDICTIONS.format(self.split))
        return self.stage.task.example_predictions(outputs, self.tokens)

    @property
    def split(self) -> str:
        return next(iter(self.stage.task.validation))

    @property
    def tokens(self) -> Any:
        return self._tokens_of(self.stage)

    def _tokens_of(self, stage: Stage) -> Any:
        """Return the validation examples as the tokenizer of the student or of its teacher encodes them."""
        split = self.stage.task.validation[self.split]
        return self.pipeline.inputs.split(with_teacher_tokenizer(self.stage, stage), split)

    def texts(self, examples: Sequence[int]) -> list[str]:
        """Return validation examples as readable text."""
        return self.stage.task.example_texts(self.stage.task.validation[self.split], self.tokens, examples)

    def words(self, example: int) -> list[str]:
        """Return the tokens of a validation example."""
        tokenizer = resolve_source(str(self.pipeline.build(self.stage) / "model")).tokenizer()
        words: list[str] = tokenizer.convert_ids_to_tokens(self.tokens.batch([example]).input_ids.tolist())
        return words

    def attention(self, stage: Stage, example: int) -> dict[int, np.ndarray]:
        """Return the attention probabilities (heads, L, L) of one example by layer, for every layer."""
        names: tuple[Projection, ...] = ("query", "key")
        requested = frozenset((name, layer) for layer in range(1, stage.shape.num_layers + 1) for name in names)
        features = self._features(stage, self._tokens_of(stage).batch([example]), FeatureRequest(projections=requested))
        maps = dict[int, np.ndarray]()
        for k in range(1, stage.shape.num_layers + 1):
            sides = (features.projections[name, k].unflatten(1, (stage.shape.num_heads, -1)) for name in names)
            query, key = (side.transpose(0, 1) for side in sides)
            maps[k] = (query @ key.mT / key.shape[-1] ** 0.5).softmax(-1).numpy()
        return maps

    def states(self, stage: Stage, layers: Sequence[int], examples: np.ndarray) -> dict[int, np.ndarray]:
        """Return the [CLS] outputs (n, H) by layer for n examples, in the order of ``examples``."""
        batch = self._tokens_of(stage).batch(examples)
        cls = self._features(stage, batch, FeatureRequest(cls=frozenset(layers))).cls
        row = {example: number for number, example in enumerate(batch.index.tolist())}
        return {layer: cls[layer][[row[example] for example in examples.tolist()]].numpy() for layer in layers}

    def alpha(self, layers: Sequence[int], examples: np.ndarray) -> dict[int, np.ndarray]:
        """Return the weights of the n teacher layers in each student layer's target: (examples, n) by student layer.

        The weights come from the run's own combination (ALP-KD Eq. 6), for the student at the end of training. They
        are NaN for teacher layers that the mapping does not give to the student layer.

        Raises:
            UserError: the run does not attend to teacher layers, its attention has trained projections, which are not
                kept, or it does not supervise one of ``layers``.
        """
        for term in self.stage.build_method().named_terms().values():
            if isinstance(term, HiddenStateLoss) and isinstance(term.combination, Attend):
                combination = term.combination
                break
        else:
            problem = f"{self.name} does not weight the teacher's layers"
            raise UserError("run", self.folder, problem, "Give runs of " + override("method", "alp") + ".")
        if combination.attention.type == "kqv":
            problem = "its attention has trained projections, which are not kept with the student"
            raise UserError("run", self.folder, problem, "Give runs of " + override("attention", "dot") + ".")
        for layer in layers:
            if layer not in term.layers:
                remedy = f"It supervises {', '.join(map(str, term.layers))}."
                raise UserError("--layers", layer, f"{self.name} does not supervise it", remedy)
        pairs = {layer: term.layers[layer] for layer in layers}
        teacher_layers = sorted({k for entry in pairs.values() for k in entry})
        states = self.states(self.stage, layers, examples), self.states(self.teacher, teacher_layers, examples)
        combination(pairs, *({k: torch.from_numpy(cls) for k, cls in layers.items()} for layers in states))
        weights = {layer: np.full((len(examples), self.teacher.shape.num_layers), np.nan) for layer in layers}
        for layer, weights_NK in weights.items():
            weights_NK[:, np.array(pairs[layer]) - 1] = combination.alpha[layer][:, 0]
        return weights

    @property
    def layer_pairs(self) -> dict[int, int]:
        """Teacher layer by student layer, from the first loss term that compares single layers; empty if none does."""
        for term in self.stage.build_method().named_terms().values():
            if isinstance(term, LayeredTerm) and all(len(entry) == 1 for entry in term.layers.values()):
                return {j: entry[0] for j, entry in term.layers.items()}
        return {}

    def _features(self, stage: Stage, batch: Any, needs: FeatureRequest) -> Features:
        model = load_model(self.pipeline.build(stage) / "model", stage.head).eval()
        with torch.inference_mode():
            return extract(model, batch, needs)
