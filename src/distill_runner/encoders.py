"""Needs -> Features: what methods read of a model, computed once and no more than asked for.

Together with ``models`` the only module that knows attribute names of ``transformers``.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel

from distill_runner.batches import Batch

PACKED_FAMILIES = frozenset({"bert", "electra", "roberta", "xlm-roberta", "camembert"})
"""Model types whose layers are read attribute by attribute below; the others run padded."""


@dataclass(frozen=True)
class Needs:
    """What is read of a model: its logits, and the [CLS] outputs of layers (1-based; the embeddings are no layer).

    ``next_sentence`` is the second head of BERT's own pre-training, beside the ``logits`` of its tokens.
    """

    logits: bool = False
    cls: frozenset[int] = frozenset()
    next_sentence: bool = False

    def __or__(self, other: "Needs") -> "Needs":
        next_sentence = self.next_sentence or other.next_sentence
        return Needs(self.logits or other.logits, self.cls | other.cls, next_sentence)

    def __bool__(self) -> bool:
        return self.logits or bool(self.cls) or self.next_sentence


@dataclass
class Features:
    """What ``Needs`` asked for: ``logits`` (B, C), ``cls`` by layer, each (B, H), and ``next_sentence`` (B, 2)."""

    logits: Tensor | None = None
    cls: dict[int, Tensor] = field(default_factory=dict)
    next_sentence: Tensor | None = None

    def full(self, rows: Tensor | slice = slice(None)) -> "Features":
        """Some rows, in the precision in which losses are computed: float32 at least."""

        def part(values: Tensor) -> Tensor:
            return values[rows].to(torch.promote_types(values.dtype, torch.float32))

        logits = None if self.logits is None else part(self.logits)
        next_sentence = None if self.next_sentence is None else part(self.next_sentence)
        return Features(logits, {layer: part(cls) for layer, cls in self.cls.items()}, next_sentence)


@dataclass(frozen=True)
class Shape:
    """The sizes of an encoder, as far as a method may have to know them."""

    num_layers: int
    width: int
    num_heads: int
    num_labels: int
    vocab_size: int
    model_type: str

    max_length: int = 512

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Shape":
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


def extract(model: PreTrainedModel, batch: Batch, needs: Needs) -> Features:
    """Run ``model`` on ``batch`` as far as ``needs`` asks, padding-free where its family allows."""
    read = _extract_packed if model.config.model_type in PACKED_FAMILIES else _extract_padded
    return read(model, batch, needs)


def _extract_packed(model: PreTrainedModel, batch: Batch, needs: Needs) -> Features:
    backbone: Any = model.base_model
    layers = backbone.encoder.layer
    depth = len(layers) if needs.logits or needs.next_sentence else max(needs.cls, default=0)
    positions = batch.positions + _first_position(model.config)
    segments = batch.segments if model.config.type_vocab_size > 1 else torch.zeros_like(batch.segments)
    h_1TH = backbone.embeddings(batch.input_ids[None], segments[None], positions[None])
    if hasattr(backbone, "embeddings_project"):  # ELECTRA's embeddings are narrower than its layers
        h_1TH = backbone.embeddings_project(h_1TH)
    h_TH, features = h_1TH[0], Features()
    for number, layer in enumerate(layers[:depth], start=1):
        # Nobody reads the other tokens of the last layer, unless the head is token-wise.
        only_cls = number == depth and batch.rows is None
        h_TH = _layer(layer, h_TH, batch, only_cls)
        if number in needs.cls:
            features.cls[number] = h_TH if only_cls else h_TH[batch.starts]
    if needs.logits:
        features.logits = _head(model, h_TH if batch.rows is None else h_TH[batch.rows])
    if needs.next_sentence:
        cls_BH = h_TH if batch.rows is None else h_TH[batch.starts]
        features.next_sentence = model.cls.seq_relationship(backbone.pooler(cls_BH[:, None]))
    return features


def predicts_next_sentence(model: Any) -> bool:
    """Whether the model has BERT's head for it."""
    return hasattr(getattr(model, "cls", None), "seq_relationship")


def _layer(layer: Any, h_TH: Tensor, batch: Batch, only_cls: bool) -> Tensor:
    """One post-norm Transformer layer over packed tokens; with ``only_cls`` its output at the [CLS] rows alone."""
    attention = layer.attention.self
    queried_QH = h_TH[batch.starts] if only_cls else h_TH
    heads = (-1, attention.num_attention_heads, attention.attention_head_size)
    context_QH = _attend(
        attention.query(queried_QH).view(heads),
        attention.key(h_TH).view(heads),
        attention.value(h_TH).view(heads),
        batch,
        only_cls,
        dropout=attention.dropout.p if attention.training else 0.0,
    )
    h_QH = layer.attention.output(context_QH, queried_QH)
    return layer.output(layer.intermediate(h_QH), h_QH)


def _attend(q: Tensor, k: Tensor, v: Tensor, batch: Batch, only_cls: bool, dropout: float) -> Tensor:
    """Attention within each sequence of a pack.

    ``q`` is (Q, heads, d) with Q = B if ``only_cls``, else T; ``k``, ``v`` are (T, heads, d). Returns (Q, heads * d).
    """
    contexts = []
    for group in batch.groups:
        keys = k[group.tokens][group.gather].transpose(1, 2)
        values = v[group.tokens][group.gather].transpose(1, 2)
        # The query is doubled because for a single one the CPU kernel splits the keys by the size of the batch, and
        # the result of an example would depend on its neighbours.
        queries = q[group.sequences, None].expand(-1, 2, -1, -1) if only_cls else q[group.tokens][group.gather]
        context = scaled_dot_product_attention(
            queries.transpose(1, 2), keys, values, group.real[:, None, None], dropout_p=dropout
        ).transpose(1, 2)
        contexts.append(context[:, 0] if only_cls else context[group.real])
    return torch.cat(contexts).flatten(1)


def _head(model: Any, h_RH: Tensor) -> Tensor:
    """The model's own head on the rows that it reads: [CLS] of each sequence, or tokens for a language model."""
    if hasattr(model, "cls"):
        return model.cls.predictions(h_RH)
    if hasattr(model, "generator_lm_head"):
        return model.generator_lm_head(model.generator_predictions(h_RH))
    if hasattr(model, "lm_head"):
        return model.lm_head(h_RH)
    if getattr(model.base_model, "pooler", None) is not None:
        return model.classifier(model.dropout(model.base_model.pooler(h_RH[:, None])))
    return model.classifier(h_RH[:, None])


def _extract_padded(model: nn.Module, batch: Batch, needs: Needs) -> Features:
    """The same through the model's own forward on padded input: the reference, and the way for other families."""
    input_ids, segments, mask = batch.padded()
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = segments
    output = model(**inputs, output_hidden_states=bool(needs.cls))
    logits = output.logits if needs.logits else None
    if logits is not None and batch.rows is not None:
        logits = logits[mask.bool()][batch.rows]
    return Features(logits, {layer: output.hidden_states[layer][:, 0] for layer in needs.cls})
