"""Vocabularies that are larger than a task's texts need: trimmed to their tokens, or trained only for them.

``trim_tokenizer`` and ``trim_embeddings`` remove the tokens that texts do not use, from tokenizer and model.

These texts keep their tokens, and so a model its outputs for them, since none of the tokenizers ever chose a token that
is removed:

- WordPiece takes the longest token that fits. A removed token was never the longest one.
- Byte pair encoding applies the first of its merges that fits, again and again. The merges that build a used token are
  kept, with the tokens in between, so the first merge that fits stays the same one.
- Unigram takes the most probable segmentation, of which all tokens are kept. The least probable token is kept too: the
  cost of an unknown character follows from it.

Any other text still has tokens: single bytes or the characters of used tokens, or the unknown token.

``train_used_rows`` keeps all tokens, and trains only the embeddings of those that occur; the other rows only decay. A
vocabulary of 30,000 tokens is most of a small student. Without a gradient, an AdamW step only scales a row by
1 - lr * weight_decay, so all steps are applied at once at the end. This is exact, except that steps skipped by fp16's
loss scaling are applied here, although they should not decay anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from distill_runner.common.errors import UserError
from distill_runner.common.seeds import preserved_random_state
from distill_runner.models.features import MPNET, OFFSET_POSITIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KEY, TRIM = ".model.vocabulary", "trim"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
"""Tokens of single bytes, for characters that have no token."""
Merge = tuple[str, str]


def trim_tokenizer(tokenizer: Any, used_ids: np.ndarray, folder: Path) -> np.ndarray:
    """Save a tokenizer without the tokens that texts do not use.

    Args:
        used_ids: ids (U,) of the tokens that the texts use. Special tokens, bytes and the characters of used tokens
            remain too.
        folder: folder for the files of the tokenizer.
    Returns:
        The ids of the remaining tokens, sorted: the tokens are numbered in this order from 0.
    Raises:
        UserError: the tokenizer is not of a type that can be trimmed.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content: dict[str, Any] = {"model": {"type": "of Python code"}}
    if backend is not None:
        content = json.loads(backend.to_str())
    model, ids = content["model"], tokenizer.get_vocab()
    marks_parts = model["type"] == "BPE" and (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
    if model["type"] not in ("WordPiece", "BPE", "Unigram") or marks_parts:
        problem = f"the tokenizer is {model['type']}, not WordPiece, Unigram or plain byte pair encoding"
        raise UserError(_KEY, TRIM, problem, "Leave it out.")
    added = {entry["content"]: entry for entry in content["added_tokens"]}
    name_of = {number: token for token, number in ids.items()}
    used = {name_of[number] for number in used_ids.tolist() if number in name_of}
    remaining = used | {name_of[number] for number in tokenizer.all_special_ids}
    remaining |= {token for token, entry in added.items() if entry["special"]}
    remaining |= _needed(model, used - added.keys())
    tokens = sorted(remaining & ids.keys(), key=ids.__getitem__)
    new_ids = {token: number for number, token in enumerate(tokens)}
    content["added_tokens"] = [entry | {"id": new_ids[token]} for token, entry in added.items() if token in new_ids]
    content["post_processor"] = _renumbered(content.get("post_processor"), new_ids)
    content["padding"] = content["truncation"] = None
    _trim_model(model, new_ids)
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    if AutoTokenizer.from_pretrained(folder).get_vocab() != new_ids:
        raise UserError(_KEY, TRIM, f"{type(tokenizer).__name__} reads other tokens than are saved", "Leave it out.")
    return np.array([ids[token] for token in tokens], dtype=np.int64)


def _needed(model: Mapping[str, Any], used: set[str]) -> set[str]:
    """Return the tokens besides ``used`` that the model of a tokenizer needs, for the same texts and for any other."""
    if model["type"] == "WordPiece":
        prefix = model["continuing_subword_prefix"]
        characters = {character for token in used for character in token.removeprefix(prefix)}
        return characters | {prefix + character for character in characters} | {model["unk_token"]}
    characters = {character for token in used for character in token}
    single = characters | set(_BYTES) if model["byte_fallback"] else characters
    if model["type"] == "Unigram":
        pieces = model["vocab"]
        least, _ = min(pieces, key=lambda piece: piece[1])
        return single | {least} | ({pieces[model["unk_id"]][0]} if model["unk_id"] is not None else set())
    if not model["byte_fallback"]:
        single = {token for token in model["vocab"] if len(token) == 1}
    ranks = {merge: rank for rank, merge in enumerate(map(_merge, model["merges"]))}
    parts = {part for token in used for merge in _merges_of(token, ranks) for part in merge}
    return single | parts | ({model["unk_token"]} if model["unk_token"] else set())


def _merge(entry: str | list[str]) -> Merge:
    first, second = entry.split(" ") if isinstance(entry, str) else entry
    return first, second


def _merges_of(token: str, ranks: Mapping[Merge, int]) -> list[Merge]:
    """Return the merges that build a token from its characters.

    Within any word they are the same: a merge across the token's bounds would have taken it apart.
    """
    parts, merges = list(token), list[Merge]()
    while len(parts) > 1:
        rank, first = min((ranks.get(pair, inf), number) for number, pair in enumerate(pairwise(parts)))
        if rank == inf:  # an added token, a byte, or a word that is a token without merges
            break
        merges.append((parts[first], parts[first + 1]))
        parts[first : first + 2] = ["".join(merges[-1])]
    return merges


def _trim_model(model: dict[str, Any], new_ids: Mapping[str, int]) -> None:
    """Remove all tokens without a new id from the model of a tokenizer."""
    if model["type"] == "Unigram":
        unknown = None if model["unk_id"] is None else model["vocab"][model["unk_id"]][0]
        model["vocab"] = [piece for piece in model["vocab"] if piece[0] in new_ids]
        model["unk_id"] = None if unknown is None else new_ids[unknown]
        return
    model["vocab"] = {token: new_ids[token] for token in model["vocab"] if token in new_ids}
    if model["type"] == "BPE":
        model["merges"] = [[a, b] for a, b in map(_merge, model["merges"]) if {a, b, a + b} <= model["vocab"].keys()]


def _renumbered(part: Any, new_ids: Mapping[str, int]) -> Any:
    """Return the post-processor of a tokenizer, or a part of it, with new ids of its special tokens."""
    if isinstance(part, list):
        is_pair = len(part) == 2 and isinstance(part[0], str) and isinstance(part[1], int)  # as in RobertaProcessing
        return [part[0], new_ids[part[0]]] if is_pair else [_renumbered(entry, new_ids) for entry in part]
    if not isinstance(part, Mapping):
        return part
    if "ids" in part and "tokens" in part:  # as in TemplateProcessing
        return {**part, "ids": [new_ids[token] for token in part["tokens"]]}
    return {name: _renumbered(entry, new_ids) for name, entry in part.items()}


@torch.no_grad()
def trim_embeddings(model: PreTrainedModel, remaining_ids: np.ndarray) -> None:
    """Leave only the rows of ``remaining_ids`` (n,) in a model's embeddings, and in an output layer over them.

    Raises:
        UserError: the model counts positions from the id of its padding token, which would change.
    """
    network: Any = model.base_model if not hasattr(model, "resize_token_embeddings") else model
    config, rows = network.config, torch.as_tensor(remaining_ids)
    new_ids = {number: row for row, number in enumerate(remaining_ids.tolist())}
    padding = getattr(config, "pad_token_id", None)
    if config.model_type in OFFSET_POSITIONS | {MPNET} and new_ids.get(padding) != padding:
        problem = f"a model of type {config.model_type} counts positions from its padding token, id {padding}"
        raise UserError(_KEY, TRIM, f"{problem}, which would get another id", "Leave it out.")
    old_tensors = network.state_dict()
    with preserved_random_state():
        network.resize_token_embeddings(len(rows))
    for name, tensor in network.state_dict().items():
        old = old_tensors[name]
        for axis in (axis for axis, size in enumerate(tensor.shape) if size != old.shape[axis]):
            tensor.copy_(old.index_select(axis, rows.to(old.device)))
    network.get_input_embeddings().padding_idx = new_ids.get(padding)
    if hasattr(config, "ignored_ids"):
        config.ignored_ids = [new_ids[number] for number in config.ignored_ids]
    for name, value in vars(config).copy().items():
        if name.endswith("_token_id") and isinstance(value, int):
            setattr(config, name, new_ids.get(value))


def num_changed(trimmed: Any, full: Any, remaining_ids: np.ndarray) -> int:
    """Return how many texts have other tokens with a trimmed tokenizer.

    Args:
        trimmed, full: the texts as both tokenizers encode them; splits with ``ids`` and ``offsets``, as ``TokenSplit``.
        remaining_ids: as ``trim_tokenizer`` returns them.
    """
    old = [full.ids[slice(*bounds)] for bounds in pairwise(full.offsets.tolist())]
    new = [remaining_ids[trimmed.ids[slice(*bounds)]] for bounds in pairwise(trimmed.offsets.tolist())]
    if len(old) == len(new):
        return sum(not np.array_equal(*pair) for pair in zip(old, new, strict=True))
    old_tokens = {ids.astype(np.int64).tobytes() for ids in old}  # a long text has another number of windows
    return max(1, sum(ids.tobytes() not in old_tokens for ids in new))


class UsedRows(nn.Module):
    """Replacement for an embedding (V, E) that trains only the rows of ``token_ids`` (U,); others stay fixed."""

    row_of_token: Tensor
    unused_weight: Tensor

    def __init__(self, embedding: nn.Embedding, token_ids: Tensor) -> None:
        super().__init__()
        weight = embedding.weight.detach()
        self.is_used = torch.zeros(len(weight), dtype=torch.bool, device=weight.device).index_fill_(0, token_ids, True)
        self.padding_idx, self.num_embeddings = embedding.padding_idx, len(weight)
        self.weight = nn.Parameter(weight[self.is_used])
        self.register_buffer("unused_weight", weight[~self.is_used])
        # An unused token id points after the last row, so that looking it up fails.
        row_of_token = (self.is_used.cumsum(0) - 1).masked_fill_(~self.is_used, len(self.weight))
        self.register_buffer("row_of_token", row_of_token, persistent=False)
        has_padding = self.padding_idx is not None and bool(self.is_used[self.padding_idx])
        self.padding_row = int(self.row_of_token[self.padding_idx]) if has_padding else None

    def forward(self, input_ids: Tensor) -> Tensor:
        return nn.functional.embedding(self.row_of_token[input_ids], self.weight, self.padding_row)

    def full_embedding(self, decay: float) -> nn.Embedding:
        """Return the embedding (V, E) after training, with the unused rows scaled by ``decay``."""
        weight = self.weight.new_empty(len(self.is_used), self.weight.shape[1])
        parts = (self.is_used, self.weight.detach()), (~self.is_used, self.unused_weight * decay)
        for mask, rows in parts:  # copies whole rows, where indexing by the mask itself would copy number by number
            weight.index_copy_(0, mask.nonzero()[:, 0], rows)
        return nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=self.padding_idx)


def train_used_rows(model: PreTrainedModel, token_ids: Tensor) -> UsedRows | None:
    """Replace the embedding of ``model`` by one that knows only ``token_ids``, and return the replacement.

    Return None, and leave the model unchanged, if all tokens are used. Do the same for a model with an output layer
    over its vocabulary, which needs all rows.
    """
    embedding: Any = model.get_input_embeddings()
    if model.get_output_embeddings() is not None or len(token_ids) >= embedding.num_embeddings:
        return None
    rows = UsedRows(embedding, token_ids)
    model.set_input_embeddings(rows)
    return rows


@contextmanager
def full_vocabulary(model: PreTrainedModel, decay: float) -> Iterator[PreTrainedModel]:
    """Give ``model`` its full vocabulary within this context, for saving."""
    if not any(isinstance(module, UsedRows) for module in model.modules()):  # image networks have no embedding at all
        yield model
        return
    embedding: Any = model.get_input_embeddings()
    model.set_input_embeddings(embedding.full_embedding(decay))
    try:
        yield model
    finally:
        model.set_input_embeddings(embedding)
