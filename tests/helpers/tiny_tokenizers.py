"""Small tokenizers of each type in the shapes that the families ship, trained on the documentation of Python."""

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertTokenizer, PreTrainedTokenizerFast, RobertaTokenizer, XLMRobertaTokenizer

from distill_runner.datasets.embedded import embedded_columns

BERT_NAMES = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
ROBERTA_NAMES = ["<s>", "<pad>", "</s>", "<unk>"]
TYPES = ("bert", "roberta", "modernbert", "xlm-roberta", "mmbert")


@cache
def texts(split: str = "train") -> list[str]:
    """Lines of the documentation, with characters of several bytes between them."""
    lines = embedded_columns("text", split)[0]["text"][:400]
    return [f"{line} \u00e9t\u00e9 {number}" if number % 10 == 0 else line for number, line in enumerate(lines)]


def byte_pairs(special: list[str], size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def framed(tokenizer: Tokenizer, first: str, last: str) -> None:
    """Let the tokenizer put special tokens around texts and pairs."""
    ids = [(name, tokenizer.token_to_id(name)) for name in (first, last)]
    tokenizer.post_processor = processors.TemplateProcessing(f"{first} $A {last}", f"{first} $A {last} $B {last}", ids)


@cache
def make(kind: str, size: int = 900) -> Any:
    """A tokenizer in the shape of a family of ``TYPES``."""
    if kind == "bert":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        special = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        tokenizer.train_from_iterator(texts(), trainers.WordPieceTrainer(vocab_size=size, special_tokens=special))
        return BertTokenizer(vocab=tokenizer.get_vocab(with_added_tokens=False))
    if kind == "roberta":
        model = json.loads(byte_pairs(ROBERTA_NAMES, size).to_str())["model"]
        merges: Any = [tuple(merge) for merge in model["merges"]]
        return RobertaTokenizer(vocab=model["vocab"], merges=merges)
    if kind == "xlm-roberta":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        options: dict[str, Any] = {"vocab_size": size, "special_tokens": ROBERTA_NAMES, "unk_token": "<unk>"}
        tokenizer.train_from_iterator(texts(), trainers.UnigramTrainer(**options))
        pieces = json.loads(tokenizer.to_str())["model"]["vocab"]
        return XLMRobertaTokenizer(vocab=[(piece, score) for piece, score in pieces])
    if kind == "modernbert":  # special tokens and runs of blanks come after the others
        tokenizer = byte_pairs([], size)
        tokenizer.add_tokens(["    ", "  ", "|||EMAIL_ADDRESS|||"])
        tokenizer.add_special_tokens([*BERT_NAMES.values(), "[MASK]"])
        framed(tokenizer, "[CLS]", "[SEP]")
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="[MASK]", **BERT_NAMES)
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, limit_alphabet=70)
    tokenizer.train_from_iterator([text.replace(" ", "\u2581") for text in texts()[:100]], trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    framed(tokenizer, "<bos>", "<eos>")
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, cls_token="<bos>", sep_token="<eos>", **names)
