"""Tiny models with random weights as other programs save them, and labeled examples for them."""

import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from distill_runner.models.vectors import POOLING_FLAGS
from helpers import tiny_tokenizers
from helpers.families import config_of
from helpers.words import WORDS

HEADS = {
    "classes": "AutoModelForSequenceClassification",
    "words": "AutoModelForTokenClassification",
    "answers": "AutoModelForQuestionAnswering",
    "vectors": "AutoModel",
}
TOKENIZERS = {
    "roberta": "roberta",
    "mpnet": "roberta",
    "modernbert": "modernbert",
    "xlm-roberta": "xlm-roberta",
    "qwen3": "modernbert",
}
"""Tokenizers of the families that have another one than BERT."""
FAMILIES = ("bert", "roberta", "distilbert", "modernbert", "deberta-v2", "xlm-roberta", "mpnet", "electra", "albert")
NAMES = {"classes": ["bad", "good", "so-so"], "words": ["O", "B-place", "I-place"]}


def save(folder: Path, head: str, family: str = "bert", pooling: str = "mean", **options: Any) -> Path:
    """Save a model of a family, or a ``qwen3``, with its tokenizer in ``folder``."""
    torch.manual_seed(1)
    tokenizer = tiny_tokenizers.make(TOKENIZERS.get(family, "bert"))
    options = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **options}
    if head in NAMES:
        options = {"id2label": dict(enumerate(NAMES[head])), **options}
    if family == "qwen3":
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
        sizes |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 80}
        config = AutoConfig.for_model(family, **sizes, initializer_range=0.3, **options)
    else:
        config = config_of(family, **{"num_labels": 2} | options if head == "answers" else options)
    getattr(transformers, HEADS[head]).from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if head == "vectors":
        kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        modules = [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (kind, path) in enumerate(kinds.items())
        ]
        for path in kinds.values():
            (folder / path).mkdir(exist_ok=True)
        flags = {flag: mode == pooling for flag, mode in POOLING_FLAGS.items()}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **flags}))
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
        settings = {"prompts": {"own": "the "}, "default_prompt_name": "own", "similarity_fn_name": "cosine"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


def examples(file: Path, head: str, count: int = 40, seed: int = 0) -> Path:
    """Write labeled examples as JSON lines."""
    rng = random.Random(seed)

    def text(longest: int = 12) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))

    def row(number: int) -> dict[str, Any]:
        words = text(30).split()
        if head == "classes":
            return {"id": f"r{number}", "text": " ".join(words), "label": rng.choice(NAMES[head])}
        if head == "words":
            return {"tokens": words, "tags": [rng.choice(["O", "O", "B-place"]) for _ in words]}
        if head == "answers":
            answers = {"text": [words[0]], "answer_start": [0]}
            return {"id": f"q{number}", "question": text(), "context": " ".join(words * 5), "answers": answers}
        return {"sentence1": text(), "sentence2": text(), "label": rng.random()}

    file.write_text("\n".join(json.dumps(row(number)) for number in range(count)), encoding="utf-8")
    return file
