"""From a model of ``transformers`` to files for ONNX Runtime, named as sentence-transformers names them on the hub."""

import logging
import platform
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from distill_runner.common.errors import UserError, brief

FOLDER, PLAIN = "onnx", "model.onnx"
EXTRA = "pip install 'distill-run[export]'"
Inputs = Mapping[str, np.ndarray]


def require_onnx() -> None:
    """
    Raises:
        UserError: a package of the extra ``export`` is not installed.
    """
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError("distill-run-export", None, f"{error.name} is not installed", EXTRA) from error
    del onnx, onnxruntime


def export(model: Any, inputs: Inputs, path: Path) -> Path:
    """Write ``model`` as one file, by the exporter of ``transformers``; batch and length may then vary.

    Args:
        inputs: of a few examples of more than one length, as its tokenizer gives them.
    Raises:
        UserError: the exporter cannot do it.
    """
    import torch

    with _quiet():
        import onnx_ir
        from transformers.exporters.configs import OnnxConfig
        from transformers.exporters.exporter_onnx import OnnxExporter

        tensors: Any = {name: torch.from_numpy(values) for name, values in inputs.items()}
        try:
            exported = OnnxExporter().export(model.eval(), tensors, config=OnnxConfig(dynamic=True))
        except Exception as error:
            problem = f"models of type {model.config.model_type} cannot be exported: {brief(error)}"
            raise UserError("distill-run-export", None, problem) from error
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx_ir.save(exported.program, str(path))
    return path


def quantise(path: Path) -> Path:
    """Write the weights of matrix products and embeddings in 8 bits beside ``path``; activations follow as it runs.

    The kind of integers, and with it the name, is that of this machine's processor.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    kind, target = processor()
    to = path.with_name(f"{path.stem}_{kind}_{target}.onnx")
    model = onnx.load(path)
    del model.graph.value_info[:]  # some of the exporter's shapes contradict those that are inferred here
    with _quiet():
        quantize_dynamic(
            model,
            to,
            weight_type=QuantType.QUInt8 if kind == "quint8" else QuantType.QInt8,
            per_channel=False,
            extra_options={"DefaultTensorType": 1},
        )
    return to


def processor() -> tuple[str, str]:
    """Kind of the 8-bit weights, and the instructions that they are for.

    Signed weights may overflow where AVX2 multiplies them with unsigned activations, so that it gets unsigned ones.
    """
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "qint8", "arm64"
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").is_file() else []
    for flag in ("avx512_vnni", "avx512f"):
        if flag in flags:
            return "qint8", flag.removesuffix("f")
    return "quint8", "avx2"


class OnnxEngine:
    """Outputs (N, C) of a file, on so many threads."""

    def __init__(self, path: Path, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.names = {given.name for given in self.session.get_inputs()}
        self.num_bytes = path.stat().st_size

    def __call__(self, inputs: Inputs) -> np.ndarray:
        read = {name: values for name, values in inputs.items() if name in self.names}
        outputs: np.ndarray = self.session.run(["logits"], read)[0]
        return outputs


class TorchEngine:
    """Outputs (N, C) of a model's own forward, padded, as a user of ``transformers`` runs it."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())

    def __call__(self, inputs: Inputs) -> np.ndarray:
        import torch

        with torch.inference_mode():
            outputs: np.ndarray = self.model(**{n: torch.from_numpy(v) for n, v in inputs.items()}).logits.numpy()
        return outputs


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress of the exporter, which prints and logs each of its steps."""
    import io
    from contextlib import redirect_stderr, redirect_stdout

    loggers = [logging.getLogger(name) for name in ("torch.onnx", "transformers", "onnxscript", "onnx_ir", "root")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
