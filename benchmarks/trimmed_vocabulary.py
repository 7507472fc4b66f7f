"""What ``student.vocabulary=trim`` leaves of encoders with a large vocabulary: parameters, file sizes, equal outputs.

The encoders have random weights in the sizes of mmBERT-small and XLM-R-base (as published), cut to some layers. Their
tokenizers have as many tokens as the published ones: pieces trained on Python's documentation, and made-up ones that no
text uses. Texts are those of ``task=demo_sentences``.

    python -m benchmarks.trimmed_vocabulary
    python -m benchmarks.trimmed_vocabulary --save made_xlmr    # a small XLM-R of this kind, as a folder for runs
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    XLMRobertaTokenizer,
)

from distill_runner.common.terminal import markdown_table
from distill_runner.datasets.embedded import SPLITS, embedded_columns
from distill_runner.models.build import count_parameters
from distill_runner.models.vocabulary import trim_embeddings, trim_tokenizer

MADE_UP = 0x4E00
"""First character of made-up tokens: two Chinese characters each."""
SHAPES: dict[str, dict[str, Any]] = {
    "mmBERT-small, 2 layers": {
        "model_type": "modernbert", "vocab_size": 256000, "hidden_size": 384, "intermediate_size": 1152,
        "num_attention_heads": 6, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
        "cls_token_id": 2, "sep_token_id": 1,
    },
    "XLM-R-base, 2 layers": {
        "model_type": "xlm-roberta", "vocab_size": 250002, "hidden_size": 768, "intermediate_size": 3072,
        "num_attention_heads": 12, "num_hidden_layers": 2, "max_position_embeddings": 514, "type_vocab_size": 1,
        "pad_token_id": 1,
    },
}  # fmt: skip


SMALL = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 4}
"""Sizes of the model that ``--save`` makes, with 50,000 tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="only save a small model with its tokenizer")
    torch.set_num_threads(1)
    if (folder := parser.parse_args().save) is not None:
        save_small(folder)
        return
    texts: dict[str, list[str]] = {split: embedded_columns("sentences", split)[0]["sentence"] for split in SPLITS[:2]}
    rows = [
        ["encoder", "tokens", "parameters", "MB", "largest difference", "validation texts with other tokens", "seconds"]
    ]
    for name, shape in SHAPES.items():
        tokenizer = (byte_pairs if shape["model_type"] == "modernbert" else unigram)(
            texts["train"], shape["vocab_size"]
        )
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**shape)).eval()
        with TemporaryDirectory() as folder:
            rows += measured(name, model, tokenizer, texts, Path(folder))
    print(markdown_table(rows[0], rows[1:]))


def save_small(folder: Path) -> None:
    """Save a small XLM-R of random weights, and its tokenizer of 50,000 tokens."""
    shape = SHAPES["XLM-R-base, 2 layers"] | SMALL
    tokenizer = unigram(embedded_columns("sentences", "train")[0]["sentence"], 50_000)
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model(**shape | {"vocab_size": len(tokenizer)})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measured(name: str, model: Any, tokenizer: Any, texts: dict[str, list[str]], folder: Path) -> list[list[str]]:
    """Return a row for the full encoder and one for the trimmed one."""
    outputs, sizes = [logits(model, tokenizer, texts["train"])], [size(model, folder / "full")]
    ids = {split: tokenizer(own)["input_ids"] for split, own in texts.items()}
    started = time.perf_counter()
    remaining = trim_tokenizer(tokenizer, np.unique(np.concatenate(ids["train"])), folder)
    trim_embeddings(model, remaining)
    seconds = time.perf_counter() - started
    small = AutoTokenizer.from_pretrained(folder)
    assert [remaining[new].tolist() for new in small(texts["train"])["input_ids"]] == ids["train"]
    new_ids = small(texts["validation"])["input_ids"]
    changed = sum(remaining[new].tolist() != old for new, old in zip(new_ids, ids["validation"], strict=True))
    outputs.append(logits(model, small, texts["train"]))
    sizes.append(size(model, folder / "trimmed"))
    difference = (outputs[0] - outputs[1]).abs().max().item()
    (full, trimmed), count = sizes, f"{changed:,} of {len(new_ids):,}"
    return [
        [name, f"{len(tokenizer):,}", *full, "", "", ""],
        ["trimmed", f"{len(small):,}", *trimmed, f"{difference:.1e}", count, f"{seconds:.1f}"],
    ]


def size(model: Any, folder: Path) -> list[str]:
    model.save_pretrained(folder)
    megabytes = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6
    return [f"{count_parameters(model) / 1e6:.1f}M", f"{megabytes:.1f}"]


@torch.inference_mode()
def logits(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """Return the outputs for 100 of the texts."""
    batches = (texts[start : start + 10] for start in range(0, 100, 10))
    return torch.cat([model(**tokenizer(batch, padding=True, return_tensors="pt")).logits for batch in batches])


def made_up(count: int) -> list[str]:
    """Return made-up tokens that no text uses."""
    return [chr(MADE_UP + number // 600) + chr(MADE_UP + 1000 + number % 600) for number in range(count)]


def unigram(texts: list[str], size: int) -> Any:
    """Return a tokenizer in the shape of XLM-R's."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    options: dict[str, Any] = {"vocab_size": 8000, "special_tokens": special, "unk_token": "<unk>"}
    tokenizer.train_from_iterator(texts, trainers.UnigramTrainer(**options))
    pieces = json.loads(tokenizer.to_str())["model"]["vocab"]
    pieces += [[token, -20.0] for token in made_up(size - 1 - len(pieces))]
    return XLMRobertaTokenizer(vocab=[(piece, score) for piece, score in pieces])


def byte_pairs(texts: list[str], size: int) -> Any:
    """Return a tokenizer in the shape of mmBERT's, which is that of Gemma 2."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=[AddedToken(token, special=True) for token in special]
    )
    tokenizer.train_from_iterator([text.replace(" ", "\u2581") for text in texts], trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    others = [f"<0x{byte:02X}>" for byte in range(256)]
    others += made_up(size - len(vocabulary) - len(others))
    vocabulary |= {token: len(vocabulary) + number for number, token in enumerate(others)}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        "<bos> $A <eos>", "<bos> $A <eos> $B <eos>", [("<bos>", 2), ("<eos>", 1)]
    )
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, cls_token="<bos>", sep_token="<eos>", **names)


if __name__ == "__main__":
    main()
