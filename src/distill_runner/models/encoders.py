"""FeatureRequest -> Features: what methods read of a model, computed once and no more than asked for.

Together with ``models`` the only module that knows attribute names of ``transformers``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from distill_runner.datasets.batches import Batch
from distill_runner.models.attention import PackedAttention
from distill_runner.models.dropout import DropoutMasks
from distill_runner.models.features import PROJECTIONS, FeatureRequest, Features, Projection
from distill_runner.models.padded import extract_padded

PACKED_FAMILIES = frozenset({"bert", "electra", "roberta", "xlm-roberta", "camembert"})
"""Model types whose layers are read attribute by attribute below; the others run padded."""
SITES = 4
"""Numbers of a layer's places for dropout; those below are the embeddings', those from ``HEAD`` on the head's."""
HEAD = 1


@dataclass(frozen=True)
class EncoderShape:
    """The sizes of an encoder, as far as a method may have to know them."""

    num_layers: int
    width: int
    num_heads: int
    num_labels: int
    vocab_size: int
    model_type: str

    max_length: int = 512

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "EncoderShape":
        return cls(
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads,
            config.num_labels or 0,
            config.vocab_size,
            config.model_type,
            config.max_position_embeddings - _first_position(config),
        )


def _first_position(config: PreTrainedConfig) -> int:
    """RoBERTa's positions start behind the padding index."""
    return config.pad_token_id + 1 if config.model_type in PACKED_FAMILIES - {"bert", "electra"} else 0


def extract(model: PreTrainedModel, batch: Batch, needs: FeatureRequest) -> Features:
    """Run ``model`` on ``batch`` as far as ``needs`` asks, padding-free where its family allows."""
    read = _extract_packed if model.config.model_type in PACKED_FAMILIES else extract_padded
    return read(model, batch, needs)


def _extract_packed(model: PreTrainedModel, batch: Batch, needs: FeatureRequest) -> Features:
    backbone: Any = model.base_model
    layers = backbone.encoder.layer
    num_tokens = len(batch.input_ids)
    if torch.is_autocast_enabled(batch.input_ids.device.type):
        batch = batch.rounded()  # a CPU's kernels for low precision are compiled for each number of rows
    noise = DropoutMasks.of(batch) if model.training else None
    whole = len(layers) if needs.logits or needs.next_sentence else max(needs.cls, default=0)
    deepest = max([whole, *(number for _, number in needs.projections)])
    h_TH, features = _embed(model, batch, noise), Features()
    heads = PackedAttention(batch, model.config.num_attention_heads, noise)
    for number, layer in enumerate(layers[:deepest], start=1):
        wanted = [name for name in PROJECTIONS if (name, number) in needs.projections]
        if number == deepest > whole:  # nobody reads what this layer makes of its projections
            features.projections |= {(name, number): _project(layer, [name], h_TH)[:num_tokens] for name in wanted}
            break
        # Nobody reads the other tokens of the last layer, unless the head is token-wise.
        only_cls = number == deepest and batch.rows is None
        run = partial(_layer, layer, heads, number * SITES, batch.starts if only_cls else None, wanted)
        h_TH, read = checkpoint(run, h_TH, use_reentrant=False) if _computed_twice(layer) else run(h_TH)
        features.projections |= {(name, number): read[name][:num_tokens] for name in wanted}
        if number in needs.cls:
            features.cls[number] = h_TH if only_cls else h_TH.index_select(0, batch.starts)
    if needs.logits:
        features.logits = _head(model, h_TH if batch.rows is None else h_TH.index_select(0, batch.rows), noise)
    if needs.next_sentence:
        cls_BH = h_TH if batch.rows is None else h_TH.index_select(0, batch.starts)
        head: Any = model.cls
        features.next_sentence = head.seq_relationship(backbone.pooler(cls_BH[:, None]))
    return features


def _embed(model: Any, batch: Batch, noise: DropoutMasks | None) -> Tensor:
    embeddings = model.base_model.embeddings
    segments = batch.segments if model.config.type_vocab_size > 1 else torch.zeros_like(batch.segments)
    h_TH = embeddings.word_embeddings(batch.input_ids) + embeddings.token_type_embeddings(segments)
    h_TH = h_TH + embeddings.position_embeddings(batch.positions + _first_position(model.config))
    h_TH = _drop(embeddings.dropout, embeddings.LayerNorm(h_TH), noise, 0)
    if hasattr(model.base_model, "embeddings_project"):  # ELECTRA's embeddings are narrower than its layers
        h_TH = model.base_model.embeddings_project(h_TH)
    return h_TH


def predicts_next_sentence(model: Any) -> bool:
    """Whether the model has BERT's head for it."""
    return hasattr(getattr(model, "cls", None), "seq_relationship")


def _project(layer: Any, names: Sequence[Projection], h_RH: Tensor) -> Tensor:
    """The named projections (R, names * H) side by side, in one matrix product."""
    parts = [getattr(layer.attention.self, name) for name in names]
    return linear(h_RH, torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts]))


def _computed_twice(layer: Any) -> bool:
    """Whether its activations are not kept for the backward pass (``activation_checkpointing_enable``)."""
    return layer.training and getattr(layer, "gradient_checkpointing", False)


def _layer(
    layer: Any, heads: PackedAttention, site: int, starts: Tensor | None, wanted: Sequence[Projection], h_TH: Tensor
) -> tuple[Tensor, Mapping[Projection, Tensor]]:
    """One post-norm Transformer layer over packed tokens, or over the first ones, and the projections that are read.

    Its dropouts are at ``site`` and behind.
    """
    attention = layer.attention.self
    p = attention.dropout.p if attention.training else 0.0
    if starts is None:
        projected = _project(layer, PROJECTIONS, h_TH)
        read = dict(zip(PROJECTIONS, projected.chunk(3, -1), strict=True))
        h_QH, context_QH = h_TH, heads.attend(projected, p, site)
    else:
        read = {name: _project(layer, [name], h_TH) for name in wanted}
        h_QH = h_TH.index_select(0, starts)
        context_QH = heads.attend_first(h_TH, attention.query(h_QH), attention.key, attention.value, p, site)
    h_QH = _add(layer.attention.output, context_QH, h_QH, heads.noise, site + 1)
    return _add(layer.output, layer.intermediate(h_QH), h_QH, heads.noise, site + 2), read


def _add(block: Any, x: Tensor, residual_QH: Tensor, noise: DropoutMasks | None, site: int) -> Tensor:
    """The end of a block: project, drop, add what went around it, normalise."""
    normed: Tensor = block.LayerNorm(_drop(block.dropout, block.dense(x), noise, site) + residual_QH)
    return normed


def _drop(dropout: nn.Dropout, x_RH: Tensor, noise: DropoutMasks | None, site: int) -> Tensor:
    dropped: Tensor = dropout(x_RH) if noise is None else noise.rows(x_RH, dropout.p, site)
    return dropped


def _head(model: Any, h_RH: Tensor, noise: DropoutMasks | None) -> Tensor:
    """The model's own head on the rows that it reads: [CLS] of each sequence, or tokens for a language model."""
    if hasattr(model, "cls"):
        return model.cls.predictions(h_RH)
    if hasattr(model, "generator_lm_head"):
        return model.generator_lm_head(model.generator_predictions(h_RH))
    if hasattr(model, "lm_head"):
        return model.lm_head(h_RH)
    if getattr(model.base_model, "pooler", None) is not None:
        return model.classifier(_drop(model.dropout, model.base_model.pooler(h_RH[:, None]), noise, HEAD))
    head = model.classifier
    hidden = head.dense(_drop(head.dropout, h_RH, noise, HEAD))
    hidden = head.activation(hidden) if hasattr(head, "activation") else hidden.tanh()  # ELECTRA's, RoBERTa's
    return head.out_proj(_drop(head.dropout, hidden, noise, HEAD + 1))
