"""Vectors of texts: an encoder with pooling, dense layers and normalization after it.

Shapes: B texts of T tokens in total, packed, or padded to L tokens; H features of a state, C numbers of a vector.
``models.sentence_folder`` reads and writes these modules in the layout of sentence-transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from distill_runner.datasets.batches import Batch
from distill_runner.models.config import VectorOptions
from distill_runner.models.sentence_folder import write_modules
from distill_runner.models.vector_modules import DenseLayer, Normalization, VectorModules


@dataclass
class VectorOutput(ModelOutput):
    """Output of ``SentenceEncoder``: the vectors (B, C) as ``sentence_embedding``."""

    sentence_embedding: Tensor | None = None


class SentenceEncoder(nn.Module):
    """An encoder of ``transformers`` with the modules that make one vector of a text.

    It has the members of a ``PreTrainedModel`` that training and saving use.

    Args:
        encoder: model without a head.
        modules: what follows the encoder. The caller loads the weights of dense layers.
        settings: further content of the saved folder, see ``sentence_folder.write_modules``.
    """

    base_model_prefix = "encoder"

    def __init__(self, encoder: Any, modules: VectorModules, settings: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.encoder, self.modules_after, self.settings = encoder, modules, settings or {}
        self.head = nn.Sequential(
            *(Normalization() if layer is None else DenseLayer(layer) for layer in modules.layers)
        )

    # What a ``PreTrainedModel`` has

    @property
    def config(self) -> Any:
        return self.encoder.config

    @property
    def base_model(self) -> Any:
        return self.encoder

    @property
    def supports_gradient_checkpointing(self) -> bool:
        return bool(self.encoder.supports_gradient_checkpointing)

    def activation_checkpointing_enable(self) -> None:
        self.encoder.activation_checkpointing_enable()

    def set_attn_implementation(self, name: str) -> None:
        self.encoder.set_attn_implementation(name)

    def get_input_embeddings(self) -> Any:
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, embeddings: nn.Module) -> None:
        self.encoder.set_input_embeddings(embeddings)

    def get_output_embeddings(self) -> None:
        """Return None: a vector has no output layer over the vocabulary."""

    def save_pretrained(self, folder: Path) -> None:
        """Save the encoder and its modules in the layout of sentence-transformers."""
        self.encoder.save_pretrained(folder)
        write_modules(Path(folder), self)

    # Vectors

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> VectorOutput:
        """Return the vectors of padded texts. Tokens of a prompt that the pooling leaves out are not known here."""
        segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        states_BLH = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **segments).last_hidden_state
        return VectorOutput(self.head(self._pool_padded(states_BLH, attention_mask)))

    def _pool_padded(self, states_BLH: Tensor, mask_BL: Tensor) -> Tensor:
        if self.modules_after.pooling == "mean":
            weight_BL1 = mask_BL[..., None].to(states_BLH.dtype)
            return (states_BLH * weight_BL1).sum(1) / weight_BL1.sum(1)
        if self.modules_after.pooling == "cls":
            return states_BLH[:, 0]
        last_B = mask_BL.sum(1) - 1  # the padding is on the right
        return states_BLH.gather(1, last_B[:, None, None].expand(-1, 1, states_BLH.shape[-1])).squeeze(1)

    @property
    def skips_prompt(self) -> bool:
        """Whether the pooling leaves out tokens of a prompt; padded texts then give other vectors than packed ones."""
        is_skipped = not self.modules_after.include_prompt and self.modules_after.pooling != "last"
        return is_skipped and any(self.settings.get("prompts", {}).values())

    @property
    def reads_first_only(self) -> bool:
        """Whether the pooling reads the first token alone."""
        return self.modules_after.pooling == "cls" and self.modules_after.include_prompt

    def pool(self, h_TH: Tensor, batch: Batch) -> Tensor:
        """Return the pooled states (B, H) of packed texts, in float32 at least, from the states of all their tokens."""
        lengths_B = batch.sequence_lengths
        skipped_B = None if self.modules_after.include_prompt else batch.skipped
        if self.modules_after.pooling == "last":
            return h_TH.index_select(0, batch.starts + lengths_B - 1)
        if self.modules_after.pooling == "cls":
            return h_TH.index_select(0, batch.starts if skipped_B is None else batch.starts + skipped_B)
        h_TH = h_TH.to(torch.promote_types(h_TH.dtype, torch.float32))
        texts = torch.arange(batch.size, device=h_TH.device)
        text_T = texts.repeat_interleave(lengths_B, output_size=batch.num_tokens)
        if skipped_B is not None:
            h_TH, lengths_B = h_TH * (batch.positions >= skipped_B[text_T])[:, None], lengths_B - skipped_B
        return h_TH.new_zeros(batch.size, h_TH.shape[1]).index_add(0, text_T, h_TH) / lengths_B[:, None]


def sentence_encoder(encoder: Any, modules: VectorModules, options: VectorOptions) -> SentenceEncoder:
    """Return the encoder with its modules; dense layers are read from their folders."""
    model = SentenceEncoder(encoder, modules, {"prompts": dict(options.prompts), "max_length": options.max_length})
    for dense, layer in zip(modules.layers, model.head, strict=True):
        if dense is not None and dense.folder is not None and isinstance(layer, DenseLayer):
            layer.load_state_dict(load_file(dense.folder / "model.safetensors"))
    return model
