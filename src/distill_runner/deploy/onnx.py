"""Export a ``transformers`` model to ONNX files and run them.

The files are named as sentence-transformers names them on the hub.
"""

import platform
from collections.abc import Container, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill_runner.common.errors import UserError, command, override, root_cause
from distill_runner.common.process import suppressed_output
from distill_runner.models.features import reads_segments

FOLDER, PLAIN = "onnx", "model.onnx"
OUTPUTS = (("logits",), ("sentence_embedding",), ("start_logits", "end_logits"))
"""Names that the outputs of a model have; the second is that of sentence-transformers for vectors."""
PROGRAMS = ("onnx", "onnxruntime", "onnxscript", "torch", "transformers")
"""Packages that write and run the files."""
LARGEST_FILE = 2**31
"""Bytes that a file of ONNX cannot reach."""
AXES = {2: ("batch", "tokens"), 4: ("batch", "channels", "height", "width")}
"""Names of the axes of each input, of texts and of images."""
INPUTS = {"input_ids", "attention_mask", "token_type_ids", "pixel_values"}
Inputs = Mapping[str, np.ndarray]


def require_onnx() -> None:
    """Check that the packages of the extra ``export`` are installed.

    Raises:
        UserError: one of the packages is not installed.
    """
    for name in ("onnx", "onnxruntime", "onnxscript"):
        if find_spec(name) is None:
            remedy = command("pip install 'distill-run[export]'")
            raise UserError("distill-run export", None, f"{name} is not installed", remedy)


def input_names(model: Any) -> set[str]:
    """Return the names of the inputs that a model's family reads; of one segment, ``token_type_ids`` say nothing."""
    encoder = getattr(model, "base_model", model)
    names = {*signature(encoder.forward).parameters} & INPUTS
    return names if reads_segments(encoder.config) else names - {"token_type_ids"}


def export(model: Any, inputs: Inputs, path: Path) -> Path:
    """Write ``model`` as one ONNX file with the exporter of ``transformers``.

    The axes of its inputs have names, and any size that the model takes. Its metadata name the opset and the programs.

    Args:
        inputs: batch of a few examples, texts of different lengths, which the exporter traces.
    Raises:
        UserError: the exporter cannot export this type of model, it is too large, or its pooling leaves out the prompt.
    """
    if (num_bytes := sum(parameter.nbytes for parameter in model.parameters())) >= LARGEST_FILE:
        problem = f"its weights have {num_bytes / 1e9:.1f} GB, and a file of ONNX holds at most 2"
        raise UserError("distill-run export", None, problem, "Distill it first into a smaller model.")
    if getattr(model, "skips_prompt", False):
        problem = "the pooling leaves out tokens of the prompt, which an exported model cannot tell from the text"
        raise UserError("task.include_prompt", False, problem, "Train with " + override("task.include_prompt", True))

    with suppressed_output():
        import onnx_ir
        from onnx_ir.passes.common import ClearMetadataAndDocStringPass
        from transformers.exporters.configs import OnnxConfig
        from transformers.exporters.exporter_onnx import OnnxExporter

        names = input_names(model)
        tensors: Any = {name: torch.from_numpy(values) for name, values in inputs.items() if name in names}
        model.config.use_cache = False  # a decoder would return the keys and values of all layers
        try:
            program = OnnxExporter().export(model.eval(), tensors, config=OnnxConfig(dynamic=True)).program
        except Exception as error:
            problem = f"models of type {model.config.model_type} cannot be exported: {root_cause(error)}"
            raise UserError("distill-run export", None, problem) from error
        # The exporter records its stack traces, which name folders and users of this machine.
        ClearMetadataAndDocStringPass()(program)
        graph, axes = program.graph, dict[Any, str]()
        for value in graph.inputs:
            pairs = zip(value.shape, AXES[len(value.shape)], strict=True)
            axes |= {size: name for size, name in pairs if not isinstance(size, int)}
        for value in (*graph.inputs, *graph.outputs):
            value.shape = onnx_ir.Shape([axes.get(size, size) for size in value.shape])
        program.metadata_props.update({"opset": str(graph.opset_imports[""])} | versions())
        path.parent.mkdir(parents=True, exist_ok=True)
        content = onnx_ir.to_proto(program)
        del content.graph.value_info[:]  # some of these shapes contradict those that onnxruntime infers
        path.write_bytes(content.SerializeToString())
    return path


def versions() -> dict[str, str]:
    """Return the versions of the packages that write and run the files."""
    return {name: version(name) for name in PROGRAMS}


def quantize(path: Path, folder: Path | None = None) -> Path:
    """Write a copy of the ONNX file ``path``, with 8-bit weights of matrix products and embeddings.

    Activations are quantized dynamically, at run time. The integer type suits the processor of this machine. The file
    name contains the integer type and the instruction set.

    Args:
        folder: of the copy; None takes that of ``path``.
    Returns:
        Path of the quantized file.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    weight_type, instructions = processor()
    target = (folder or path.parent) / f"{path.stem}_{weight_type}_{instructions}.onnx"
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppressed_output():
        quantize_dynamic(
            path,
            target,
            weight_type=QuantType.QUInt8 if weight_type == "quint8" else QuantType.QInt8,
            per_channel=True,
            extra_options={"DefaultTensorType": 1},
        )
    return target


def processor() -> tuple[str, str]:
    """Return the type of the 8-bit weights, ``qint8`` or ``quint8``, and the processor's instruction set.

    AVX2 gets unsigned weights: its product of signed weights and unsigned activations may overflow.
    """
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "qint8", "arm64"
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split() if Path("/proc/cpuinfo").is_file() else []
    for flag in ("avx512_vnni", "avx512f"):
        if flag in flags:
            return "qint8", flag.removesuffix("f")
    return "quint8", "avx2"


class OnnxEngine:
    """Engine that runs an ONNX file with ONNX Runtime on ``threads`` CPU threads; its outputs are logits."""

    def __init__(self, path: Path, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.names = {node.name for node in self.session.get_inputs()}
        self.outputs = _output_names({node.name for node in self.session.get_outputs()})
        self.num_bytes = path.stat().st_size

    def __call__(self, inputs: Inputs) -> np.ndarray:
        arrays = {name: values for name, values in inputs.items() if name in self.names}
        return _as_one(self.session.run(self.outputs, arrays))


class TorchEngine:
    """Engine that runs a model's own ``forward`` on padded batches, as users of ``transformers`` do."""

    def __init__(self, model: Any) -> None:
        self.model, self.names = model.eval(), input_names(model)
        self.num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())

    def __call__(self, inputs: Inputs) -> np.ndarray:
        with torch.inference_mode():
            tensors = {name: torch.from_numpy(values) for name, values in inputs.items() if name in self.names}
            output = self.model(**tensors)
        return _as_one([output[name].numpy() for name in _output_names(output)])


def _output_names(names: Container[str]) -> list[str]:
    return next(list(group) for group in OUTPUTS if group[0] in names)


def _as_one(outputs: Sequence[np.ndarray]) -> np.ndarray:
    """Return the outputs of a head; several, such as those of start and end, are along a new last axis."""
    return outputs[0] if len(outputs) == 1 else np.stack(outputs, axis=-1)
