"""Convert an ONNX file to OpenVINO's format and run it.

The files are named as sentence-transformers names them on the hub.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distill_runner.common.errors import UserError

FOLDER, PLAIN = "openvino", "openvino_model.xml"
EXTRA = "pip install 'distill-run[openvino]'"


def require_openvino() -> Any:
    """Import and return the package ``openvino``.

    Raises:
        UserError: the package is not installed.
    """
    try:
        import openvino
    except ImportError as error:
        raise UserError("--openvino", None, f"{error.name} is not installed", EXTRA) from error
    return openvino


def convert(onnx: Path, path: Path) -> Path:
    """Write the ONNX file ``onnx`` to ``path`` in OpenVINO's format, in float32.

    The weights are written to a second file, which has the suffix ``.bin``.
    """
    openvino = require_openvino()
    path.parent.mkdir(parents=True, exist_ok=True)
    openvino.save_model(openvino.convert_model(onnx), path, compress_to_fp16=False)
    return path


class OpenVinoEngine:
    """Engine that runs an OpenVINO file in float32 on ``threads`` CPU threads; its outputs are logits (N, C)."""

    def __init__(self, path: Path, threads: int) -> None:
        how = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
        self.model = require_openvino().Core().compile_model(path, "CPU", how)
        self.names = {given.get_any_name() for given in self.model.inputs}
        self.num_bytes = path.stat().st_size + path.with_suffix(".bin").stat().st_size

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        read = {name: values for name, values in inputs.items() if name in self.names}
        outputs: np.ndarray = self.model(read)["logits"]
        return outputs.copy()  # the array is the engine's own buffer, which the next call overwrites
