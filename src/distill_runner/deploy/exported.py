"""Exports of finished stages as artifacts of the store: ONNX files with their predictions on a validation split.

A sweep that was interrupted finds them again, and no model is exported or scored twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distill_runner.common.files import file_sha256
from distill_runner.deploy.measure import EXACT, PaddedSplit, checked_difference
from distill_runner.deploy.onnx import (
    FOLDER,
    PLAIN,
    OnnxEngine,
    TorchEngine,
    export,
    processor,
    quantize,
    quantize_static,
)
from distill_runner.report.compare import Predictions

if TYPE_CHECKING:
    from distill_runner.pipeline.build import Pipeline
    from distill_runner.pipeline.stages import Stage
    from distill_runner.pipeline.store import Spec
    from distill_runner.tasks import Task

SCHEMA = 1
INT8, STATIC = "ONNX int8", "ONNX int8 static"
CHECKED, CALIBRATION = 64, 128
"""Numbers of validation examples on which ONNX is compared with torch, and of training examples that calibrate."""
PREDICTIONS = "predictions.npz"
PROGRAMS = ("onnx", "onnxruntime", "onnxscript", "torch", "transformers")
"""Packages that write and run the files."""
MODULES = ("exported.py", "measure.py", "onnx.py")
"""Modules of this package that write and score the files."""


@dataclass(frozen=True)
class Export:
    """One stage's model in one form: its ONNX file, and its predictions on the validation split."""

    form: str
    file: Path
    predictions: Predictions


@dataclass(frozen=True)
class Exporter:
    """Exports the model of a stage.

    Attributes:
        stage: a finished stage, a student or its teacher.
        task: the student's task, by whose first metric both are scored.
        split: the validation split, as for ``Task.examples``.
    """

    stage: "Stage"
    pipeline: "Pipeline"
    task: "Task"
    split: str

    @cached_property
    def model(self) -> Path:
        return self.pipeline.build(self.stage) / "model"

    @cached_property
    def examples(self) -> PaddedSplit:
        """The validation split as this model reads it."""
        return self._padded(self.split)

    def export(self, form: str) -> Export:
        """Return the model in the form ``ONNX``, ``ONNX int8`` or ``ONNX int8 static``; export it if it is missing.

        Raises:
            UserError: the model cannot be exported, or ONNX gives other outputs than torch.
        """
        makers: dict[str, Callable[[Path], Path]] = {EXACT: self._plain, INT8: self._dynamic, STATIC: self._static}
        make = makers[form]

        def write(folder: Path) -> None:
            path = make(folder / FOLDER)
            scored = self.pipeline.inputs.split(self.stage, self.split)
            outputs = self.examples.outputs(OnnxEngine(path, self.pipeline.runtime.threads or 1))
            self.task.save_predictions(folder / PREDICTIONS, outputs, scored)

        folder = self.pipeline.store.get(self._spec(form), write)
        (file,) = (folder / FOLDER).glob("*.onnx")
        return Export(form, file, Predictions.read(folder / PREDICTIONS, self.task.metrics[0]))

    def _spec(self, form: str) -> "Spec":
        return {
            "kind": "onnx",
            "schema": SCHEMA,
            "stage": self.stage.key,
            "tokens": self.stage.split_spec(self.split),
            "metrics": self.task.metrics[:1],
            "form": form,
            "versions": {name: version(name) for name in PROGRAMS},
            "code": _code(),
            "processor": None if form == EXACT else list(processor()),
        }

    def _plain(self, folder: Path) -> Path:
        from distill_runner.models.build import load_model

        network = load_model(self.model, self.stage.head)
        path = export(network, self.examples.inputs(self.examples.samples()), folder / PLAIN)
        onnx, torch = OnnxEngine(path, 1), TorchEngine(network)
        for start in range(0, min(CHECKED, len(self.examples)), 8):
            inputs = self.examples.inputs(range(start, min(start + 8, len(self.examples))))
            checked_difference(onnx(inputs), torch(inputs), self.stage.name)
        return path

    def _dynamic(self, folder: Path) -> Path:
        return quantize(self.export(EXACT).file, folder)

    def _static(self, folder: Path) -> Path:
        examples = self._padded(self.task.train)
        numbers = np.random.default_rng(0).permutation(len(examples))[:CALIBRATION]
        batches = [examples.inputs([int(number)]) for number in numbers]
        return quantize_static(self.export(EXACT).file, folder, batches)

    def _padded(self, split: str) -> PaddedSplit:
        tokenizer: Any = self.pipeline.inputs.tokenizer(self.stage)
        return PaddedSplit(self.pipeline.inputs.split(self.stage, split).teacher_inputs, tokenizer)


@cache
def _code() -> list[str]:
    """Return the hashes of ``MODULES``."""
    return [file_sha256(Path(__file__).with_name(name)) for name in MODULES]
