"""Folders of sentence-transformers: the modules after the encoder, prompts and the maximum length, read and written."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from distill_runner.common.errors import UserError, root_cause
from distill_runner.models.config import VectorOptions
from distill_runner.models.vector_modules import (
    ACTIVATIONS,
    POOLING_MODES,
    Dense,
    DenseLayer,
    PoolingMode,
    VectorModules,
)

if TYPE_CHECKING:
    from distill_runner.models.config import ModelConfig

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
LENGTHS = tuple(f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "xlnet"))
"""Files with the maximum length, of which a folder has one."""
TYPE = "sentence_transformers.models."
POOLING_FLAGS: dict[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
NAMES: dict[str, PoolingMode] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
REMEDY = f"Poolings that are read: {', '.join(POOLING_MODES)}; modules: Pooling, Dense and Normalize."


@dataclass(frozen=True)
class SentenceFolder:
    """What a folder of sentence-transformers says besides its encoder.

    Attributes:
        modules: the modules after the encoder.
        max_length: maximum number of tokens of a text; None if the folder names none.
        prompts: text by name that is put before the texts of a use, such as ``query``.
        default_prompt: name of the prompt that texts get if none is named; None for no prompt.
    """

    modules: VectorModules
    max_length: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def is_sentence_folder(folder: Path) -> bool:
    """Return whether the folder has modules after its encoder."""
    return (folder / MODULES).is_file()


def read_sentence_folder(folder: Path, name: str) -> SentenceFolder:
    """Return what the folder says.

    Args:
        name: what the user typed for the folder.
    Raises:
        UserError: the folder is damaged, or has modules that are not read.
    """
    try:
        return _content(folder, name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"its files of sentence-transformers are damaged: {root_cause(error)}"
        raise UserError(".model.source", name, problem, "Save it again with SentenceTransformer.save.") from error


def _content(folder: Path, name: str) -> SentenceFolder:
    entries = sorted(json.loads((folder / MODULES).read_text(encoding="utf-8")), key=lambda entry: entry["idx"])
    kinds = [str(entry["type"]).rpartition(".")[2] for entry in entries]
    if kinds[:2] != ["Transformer", "Pooling"] or entries[0].get("path"):
        problem = f"begins with the modules {', '.join(kinds[:2])}"
        if entries[0].get("path"):
            problem = f"has its encoder in the subfolder {entries[0]['path']}"
        raise UserError(".model.source", name, problem, f"Only an encoder and its pooling are read. {REMEDY}")
    pooling, include_prompt = _pooling(_config(folder / entries[1]["path"]), name)
    layers: list[Dense | None] = []
    for kind, entry in zip(kinds[2:], entries[2:], strict=True):
        if kind == "Normalize":
            layers.append(None)
        elif kind == "Dense":
            layers.append(_dense(folder / entry["path"], name))
        elif kind != "Dropout":  # does nothing in evaluation
            raise UserError(".model.source", name, f"has a module {kind}, which is not read", REMEDY)
    lengths = next((_json(folder / file) for file in LENGTHS if (folder / file).is_file()), {})
    if lengths.get("do_lower_case"):
        problem = "has do_lower_case=true, which only sentence-transformers reads"
        raise UserError(".model.source", name, problem, "Take a tokenizer that lowercases, and set it to false.")
    settings = _json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    prompts = {key: str(text) for key, text in (settings.get("prompts") or {}).items() if text}
    default = settings.get("default_prompt_name")
    return SentenceFolder(
        VectorModules(pooling, include_prompt, tuple(layers)),
        lengths.get("max_seq_length"),
        prompts,
        default if default in prompts else None,
    )


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _config(folder: Path) -> dict[str, Any]:
    return _json(folder / "config.json")


def _pooling(config: dict[str, Any], name: str) -> tuple[PoolingMode, bool]:
    """Return the pooling mode, in today's or the older spelling, and whether it reads the tokens of a prompt."""
    modes = config.get("pooling_mode") or [mode for key, mode in POOLING_FLAGS.items() if config.get(key)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in NAMES:
        raise UserError(".model.source", name, f"has the pooling {' + '.join(modes)}, which is not read", REMEDY)
    return NAMES[modes[0]], bool(config.get("include_prompt", True))


def _dense(folder: Path, name: str) -> Dense:
    config = _config(folder)
    activation = str(config.get("activation_function") or "torch.nn.Identity").rpartition(".")[2]
    extra = config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != "sentence_embedding"
    if activation not in ACTIVATIONS or extra:
        problem = f"has a dense layer with {'a residual or another input' if extra else activation}"
        remedy = f"Read are those with {', '.join(ACTIVATIONS)}, from vector to vector."
        raise UserError(".model.source", name, f"{problem}, which is not read", remedy)
    if not (folder / "model.safetensors").is_file():
        problem = f"has no {folder.name}/model.safetensors"
        raise UserError(".model.source", name, problem, "Save it again with SentenceTransformer.save.")
    return Dense(config["in_features"], config["out_features"], config.get("bias", True), activation, folder)


def vector_modules(model: ModelConfig, options: VectorOptions, folder: Path | None, name: str) -> VectorModules:
    """Return the modules after the encoder of a model to build.

    A kept head has those of its folder. A new one has them too, but for options of the task; without a folder of
    sentence-transformers, it has a normalized mean.

    Args:
        folder: folder of the model's source; None for a new model.
        name: what the user typed for it.
    Raises:
        UserError: a kept head is no folder of sentence-transformers, or the folder and the task disagree.
    """
    if folder is None or not is_sentence_folder(folder):
        if model.head == "keep":
            problem = f"holds no {MODULES}: how its states become a vector is not known"
            remedy = "Take a folder of sentence-transformers, or teacher.fine_tuned=false to choose by task.pooling."
            raise UserError(".model.source", name, problem, remedy)
        modules = VectorModules()
    else:
        content = read_sentence_folder(folder, name)
        _require_agreement(content, options, name)
        modules = content.modules
        if model.head == "keep":
            return modules
    layers = modules.layers
    if options.normalize is not None and options.normalize != modules.is_normalized:
        layers = (*layers, None) if options.normalize else layers[:-1]
    prompt = modules.include_prompt if options.include_prompt is None else options.include_prompt
    return replace(modules, pooling=options.pooling or modules.pooling, include_prompt=prompt, layers=layers)


def _require_agreement(content: SentenceFolder, options: VectorOptions, name: str) -> None:
    """Raise a UserError if texts would get another prompt, or more tokens, than sentence-transformers gives them."""
    default = content.prompts.get(content.default_prompt or "")
    if default is not None and default not in options.prompts.values():
        problem = f"is not the default prompt of {name}, {default!r}"
        raise UserError("task.prompt", options.prompts.get("text", ""), problem, f"task.prompt='{default}'")
    if content.max_length is not None and options.max_length > content.max_length:
        problem = f"{name} was made for {content.max_length} tokens, at which sentence-transformers cuts"
        raise UserError("task.max_length", options.max_length, problem, f"task.max_length={content.max_length}")


def write_modules(folder: Path, model: Any) -> None:
    """Write the modules of a ``SentenceEncoder`` beside its encoder, as ``SentenceTransformer(folder)`` reads them."""
    modules, width = model.modules_after, int(model.config.hidden_size)
    entries = [{"idx": 0, "name": "0", "path": "", "type": f"{TYPE}Transformer"}]

    def add(kind: str, config: dict[str, Any] | None) -> Path:
        number = len(entries)
        path = folder / f"{number}_{kind}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        if config is not None:
            _write_json(path / "config.json", config)
        entries.append({"idx": number, "name": str(number), "path": path.name, "type": f"{TYPE}{kind}"})
        return path

    mode = next(name for name, own in NAMES.items() if own == modules.pooling)
    flags = {key: name == mode for key, name in POOLING_FLAGS.items()}
    add("Pooling", {"word_embedding_dimension": width, **flags, "include_prompt": modules.include_prompt})
    for dense, layer in zip(modules.layers, model.head, strict=True):
        if dense is None or not isinstance(layer, DenseLayer):
            add("Normalize", None)
            continue
        activation = ACTIVATIONS[dense.activation]
        config = {name: getattr(dense, name) for name in ("in_features", "out_features", "bias")}
        path = add("Dense", config | {"activation_function": f"{activation.__module__}.{activation.__name__}"})
        weights = {
            key: value.detach().to(torch.float32).contiguous().cpu() for key, value in layer.state_dict().items()
        }
        save_file(weights, path / "model.safetensors")
    _write_json(folder / MODULES, entries)
    _write_json(folder / LENGTHS[0], {"max_seq_length": model.settings.get("max_length"), "do_lower_case": False})
    prompts = {name: text for name, text in model.settings.get("prompts", {}).items() if text}
    default = "text" if "text" in prompts else None
    content = {"prompts": prompts, "default_prompt_name": default, "similarity_fn_name": "cosine"}
    _write_json(folder / SETTINGS, content)


def _write_json(file: Path, content: Any) -> None:
    file.unlink(missing_ok=True)  # the file may be a hard link to a file in the store
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
