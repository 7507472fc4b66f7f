"""Ten families with four heads, exported to ONNX: the largest difference to torch, and seconds.

Models are tiny, with random weights, so that a difference is one of the operations and not of rounding.

    python -m benchmarks.exported_families
"""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers

from distill_runner.common.terminal import markdown_table
from distill_runner.deploy.onnx import OnnxEngine, TorchEngine, export, input_names, quantize, versions
from distill_runner.models.vectors import SentenceEncoder, SentenceFolder

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
SIZES |= {"vocab_size": 100, "max_position_embeddings": 80}
NO_TOKENS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
ROBERTA = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1}
DEBERTA: dict[str, Any] = {"type_vocab_size": 0, "relative_attention": True, "position_biased_input": False}
DEBERTA |= {"pos_att_type": ["p2c", "c2p"], "position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": ROBERTA,
    "distilbert": {"n_layers": 2, "dim": 32, "n_heads": 4, "hidden_dim": 64},
    "modernbert": NO_TOKENS | {"cls_token_id": 2, "sep_token_id": 3, "local_attention": 16},
    "deberta-v2": DEBERTA,
    "xlm-roberta": ROBERTA,
    "mpnet": ROBERTA,
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 16},
    "qwen3": NO_TOKENS | {"num_key_value_heads": 2, "head_dim": 8},
}
HEADS = {"classes": "SequenceClassification", "words": "TokenClassification", "answers": "QuestionAnswering"}
LENGTHS = ([5], [70], [5, 7], [64, 3, 20, 11, 6], [2] * 9)
"""Numbers of tokens of the texts in each batch that is compared."""


def model_of(family: str, head: str) -> Any:
    """Return a model of a family with one of ``HEADS``, or with ``vectors`` by the mean of its states."""
    torch.manual_seed(1)
    names = {} if family == "distilbert" else SIZES
    sizes = names | {name: SIZES[name] for name in ("vocab_size", "max_position_embeddings")}
    num_labels = 2 if head == "answers" else 3
    options = {"initializer_range": 0.3, "num_labels": num_labels, **sizes, **FAMILIES[family]}
    config = transformers.AutoConfig.for_model(family, **options)
    if head in HEADS:
        return getattr(transformers, f"AutoModelFor{HEADS[head]}").from_config(config, dtype=torch.float32).eval()
    network: Any = transformers.AutoModel.from_config(config, dtype=torch.float32)
    return SentenceEncoder(network, SentenceFolder()).eval()


def batch(model: Any, lengths: list[int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return padded texts of random tokens, of which a pair has two segments."""
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.where(mask, rng.integers(5, 100, mask.shape), model.config.pad_token_id or 0)
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": (np.arange(max(lengths)) > 4) * mask}
    return {name: values for name, values in inputs.items() if name in input_names(model)}


def measure(family: str, head: str, folder: Path) -> list[str]:
    """Return a row of the table: family, head, largest difference relative to max(1, largest output), seconds."""
    model, rng, start = model_of(family, head), np.random.default_rng(0), time.perf_counter()
    path = export(model, batch(model, [3, 9, 17, 30], rng), folder / f"{family}-{head}.onnx")
    seconds, worst = time.perf_counter() - start, 0.0
    onnx, of_torch, int8 = OnnxEngine(path, 1), TorchEngine(model), OnnxEngine(quantize(path), 1)
    for lengths in LENGTHS:
        inputs = batch(model, lengths, rng)
        one, other, rounded = onnx(inputs), of_torch(inputs), int8(inputs)
        rows = inputs["attention_mask"].astype(bool) if head in ("words", "answers") else slice(None)
        assert np.isfinite(rounded[rows]).all()
        worst = max(worst, float(np.abs(one - other)[rows].max() / max(1.0, np.abs(other[rows]).max())))
    return [family, head, ", ".join(sorted(onnx.names)), f"{worst:.1e}", f"{seconds:.1f}"]


def main() -> None:
    """Print the table; families on the command line replace all of them."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    with TemporaryDirectory() as folder:
        for family in sys.argv[1:] or FAMILIES:
            for head in (*HEADS, "vectors"):
                rows.append(measure(family, head, Path(folder)))
                print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    print(markdown_table(["family", "head", "inputs", "largest difference", "seconds"], rows, text_columns=3))
    print(", ".join(f"{name} {number}" for name, number in versions().items()))


if __name__ == "__main__":
    main()
