"""Train only those embedding rows whose tokens occur in a task's texts; the other rows only decay.

A vocabulary of 30,000 tokens is most of a small student, and most of these tokens occur in no text of the task. Without
a gradient, an AdamW step only scales a row by 1 - lr * weight_decay, so all steps are applied at once at the end. This
is exact, except that steps skipped by fp16's loss scaling are applied here, although they should not decay anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
