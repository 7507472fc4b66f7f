"""The rows of an embedding that occur in a task's texts, trained without the others, which merely decay.

A vocabulary of 30,000 words is most of a small student, and most of it is in no text of the task. Without gradient an
AdamW step does nothing to a row but scale it by 1 - lr * weight_decay, all steps at once in the end. (Exact but for
steps that fp16's loss scaling skips, which decay nothing.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class UsedRows(nn.Module):
    """In the place of an embedding (V, E): its rows of the token ids ``used`` (U,), sorted; the others stand by."""

    place: Tensor
    others: Tensor

    def __init__(self, embedding: nn.Embedding, used: Tensor) -> None:
        super().__init__()
        weight = embedding.weight.detach()
        self.is_used = torch.zeros(len(weight), dtype=torch.bool, device=weight.device).index_fill_(0, used, True)
        self.padding_idx = embedding.padding_idx
        self.weight = nn.Parameter(weight[self.is_used])
        self.register_buffer("others", weight[~self.is_used])
        # Any other token id has its place behind the last row, where looking it up fails.
        place = (self.is_used.cumsum(0) - 1).masked_fill_(~self.is_used, len(self.weight))
        self.register_buffer("place", place, persistent=False)
        has_padding = self.padding_idx is not None and bool(self.is_used[self.padding_idx])
        self.place_of_padding = int(self.place[self.padding_idx]) if has_padding else None

    def forward(self, input_ids: Tensor) -> Tensor:
        return nn.functional.embedding(self.place[input_ids], self.weight, self.place_of_padding)

    def put_together(self, decay: float) -> nn.Embedding:
        """The whole embedding as training has left it, the other rows scaled by ``decay``."""
        weight = self.weight.new_empty(len(self.is_used), self.weight.shape[1])
        weight[self.is_used], weight[~self.is_used] = self.weight.detach(), self.others * decay
        return nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=self.padding_idx)


def train_used_rows(model: PreTrainedModel, used: Tensor) -> UsedRows | None:
    """From now on ``model`` knows the token ids ``used`` and no others; returns what now stands for its embedding.

    A model whose word embedding is also its output layer reads all of its rows, and stays as it is.
    """
    embedding: Any = model.get_input_embeddings()
    if model.get_output_embeddings() is not None or len(used) >= embedding.num_embeddings:
        return None
    rows = UsedRows(embedding, used)
    model.set_input_embeddings(rows)
    return rows


@contextmanager
def whole(model: PreTrainedModel, decay: float) -> Iterator[PreTrainedModel]:
    """The model with its whole vocabulary, for saving it."""
    if not any(isinstance(module, UsedRows) for module in model.modules()):  # image networks know no words at all
        yield model
        return
    embedding: Any = model.get_input_embeddings()
    model.set_input_embeddings(embedding.put_together(decay))
    try:
        yield model
    finally:
        model.set_input_embeddings(embedding)
