"""Train only those embedding rows whose tokens occur in a task's texts; the other rows merely decay.

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
    """Replacement for an embedding (V, E) that trains only the rows of token ids ``used`` (U,); others stay fixed."""

    place: Tensor
    others: Tensor

    def __init__(self, embedding: nn.Embedding, used: Tensor) -> None:
        super().__init__()
        weight = embedding.weight.detach()
        self.is_used = torch.zeros(len(weight), dtype=torch.bool, device=weight.device).index_fill_(0, used, True)
        self.padding_idx = embedding.padding_idx
        self.weight = nn.Parameter(weight[self.is_used])
        self.register_buffer("others", weight[~self.is_used])
        # An unused token id points after the last row, so that looking it up fails.
        place = (self.is_used.cumsum(0) - 1).masked_fill_(~self.is_used, len(self.weight))
        self.register_buffer("place", place, persistent=False)
        has_padding = self.padding_idx is not None and bool(self.is_used[self.padding_idx])
        self.place_of_padding = int(self.place[self.padding_idx]) if has_padding else None

    def forward(self, input_ids: Tensor) -> Tensor:
        return nn.functional.embedding(self.place[input_ids], self.weight, self.place_of_padding)

    def put_together(self, decay: float) -> nn.Embedding:
        """Return the whole embedding after training, with the unused rows scaled by ``decay``."""
        weight = self.weight.new_empty(len(self.is_used), self.weight.shape[1])
        weight[self.is_used], weight[~self.is_used] = self.weight.detach(), self.others * decay
        return nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=self.padding_idx)


def train_used_rows(model: PreTrainedModel, used: Tensor) -> UsedRows | None:
    """Replace the embedding of ``model`` by one that knows only the token ids ``used``, and return the replacement.

    Return None, and leave the model unchanged, if all tokens are used. Do the same for a model with an output layer
    over its vocabulary, which needs all rows.
    """
    embedding: Any = model.get_input_embeddings()
    if model.get_output_embeddings() is not None or len(used) >= embedding.num_embeddings:
        return None
    rows = UsedRows(embedding, used)
    model.set_input_embeddings(rows)
    return rows


@contextmanager
def whole(model: PreTrainedModel, decay: float) -> Iterator[PreTrainedModel]:
    """Give ``model`` its whole vocabulary within this context, for saving."""
    if not any(isinstance(module, UsedRows) for module in model.modules()):  # image networks have no embedding at all
        yield model
        return
    embedding: Any = model.get_input_embeddings()
    model.set_input_embeddings(embedding.put_together(decay))
    try:
        yield model
    finally:
        model.set_input_embeddings(embedding)
