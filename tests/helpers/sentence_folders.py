"""Tiny folders of sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertModel, BertTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "query", ":", *"abcdefghij"]
TYPES = {"classic": "sentence_transformers.models", "today": "sentence_transformers.base.modules"}


def folder_with(
    folder: Path,
    pooling: dict[str, Any],
    dense: tuple[int, str] | None = None,
    normalize: bool = True,
    prompts: dict[str, Any] | None = None,
    naming: str = "classic",
) -> Path:
    """A folder of sentence-transformers with a tiny encoder of width 16."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 40, "initializer_range": 0.5}
    config = BertConfig(vocab_size=len(WORDS), **sizes)
    BertModel(config).save_pretrained(folder)
    BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)}).save_pretrained(folder)
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalize else [])]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds) if number)]
    for path in paths[1:]:
        (folder / path).mkdir(exist_ok=True)
    (folder / paths[1] / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, **pooling}))
    if dense:
        width, activation = dense
        entry = {"in_features": 16, "out_features": width, "bias": True, "activation_function": activation}
        (folder / paths[2] / "config.json").write_text(json.dumps(entry))
        weights = {"linear.weight": torch.randn(width, 16), "linear.bias": torch.randn(width)}
        save_file(weights, folder / paths[2] / "model.safetensors")
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": f"{TYPES[naming]}.{kind}"}
        for number, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16, "do_lower_case": False}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts or {}))
    return folder


def table_of(folder: Path, form: str, tokenizer: Any) -> Path:
    """A table of tokens as sentence-transformers saves it, today or earlier, or as model2vec does."""
    rows, n = torch.randn(len(tokenizer), 6, generator=torch.manual_seed(0)), len(tokenizer)
    place = folder / ("0_StaticEmbedding" if form == "nested" else "")
    place.mkdir(parents=True)
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(4) if form == "cut" else backend.no_truncation()
    backend.save(str(place / "tokenizer.json"))
    if form in ("clusters", "early"):
        tensors = {"embeddings": rows[:5].half(), "mapping": torch.arange(n) % 5, "weights": torch.rand(n).double()}
        (folder / "config.json").write_text('{"model_type": "model2vec", "normalize": true, "hidden_dim": 6}')
    save_file(tensors if form in ("clusters", "early") else {"embedding.weight": rows}, place / "model.safetensors")
    kinds = {"StaticEmbedding": place.relative_to(folder).as_posix(), "Normalize": "1_Normalize"}
    if form == "dense":
        kinds["Dense"] = "2_Dense"
        (folder / "2_Dense").mkdir()
        entry = {"in_features": 6, "out_features": 3, "bias": False, "activation_function": "torch.nn.Tanh"}
        (folder / "2_Dense/config.json").write_text(json.dumps(entry))
        save_file({"linear.weight": rows[:3].clone()}, folder / "2_Dense/model.safetensors")
    entries = [{"name": one, "path": kinds[one], "type": f"sentence_transformers.models.{one}"} for one in kinds]
    (folder / "modules.json").write_text(json.dumps(entries[:1] if form == "plain" else entries))
    return folder
