"""Needs -> Features: what methods read of a model, computed once and no more than asked for.

Together with ``models`` the only module that knows attribute names of ``transformers``.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from distill_runner.batches import Batch
from distill_runner.errors import UserError

PACKED_FAMILIES = frozenset({"bert", "electra", "roberta", "xlm-roberta", "camembert"})
"""Model types whose layers are read attribute by attribute below; the others run padded."""
Projection = Literal["query", "key", "value"]
"""What an attention layer makes of its input, after the bias and before the attention; all heads side by side."""
PROJECTIONS = get_args(Projection)
RECORDING = "distill_runner_recording"


@dataclass(frozen=True)
class Needs:
    """What is read of a model: its logits, the [CLS] outputs of layers, and projections in layers.

    Layers count from 1; the embeddings are no layer. ``next_sentence`` is the second head of BERT's own pre-training,
    beside the ``logits`` of its tokens.
    """

    logits: bool = False
    cls: frozenset[int] = frozenset()
    projections: frozenset[tuple[Projection, int]] = frozenset()
    next_sentence: bool = False

    def __or__(self, other: "Needs") -> "Needs":
        return Needs(
            self.logits or other.logits,
            self.cls | other.cls,
            self.projections | other.projections,
            self.next_sentence or other.next_sentence,
        )

    def __bool__(self) -> bool:
        return self.logits or bool(self.cls) or bool(self.projections) or self.next_sentence


@dataclass
class Features:
    """What ``Needs`` asked for: ``logits`` (B, C), ``cls`` by layer (B, H), and ``projections`` (T, H), packed.

    ``next_sentence`` is (B, 2).
    """

    logits: Tensor | None = None
    cls: dict[int, Tensor] = field(default_factory=dict)
    projections: dict[tuple[Projection, int], Tensor] = field(default_factory=dict)
    next_sentence: Tensor | None = None

    def full(self, rows: Tensor | slice = slice(None), tokens: Tensor | slice = slice(None)) -> "Features":
        """Some examples and their tokens, in the precision in which losses are computed: float32 at least."""

        def part(values: Tensor, chosen: Tensor | slice) -> Tensor:
            return values[chosen].to(torch.promote_types(values.dtype, torch.float32))

        return Features(
            None if self.logits is None else part(self.logits, rows),
            {layer: part(cls, rows) for layer, cls in self.cls.items()},
            {place: part(states, tokens) for place, states in self.projections.items()},
            None if self.next_sentence is None else part(self.next_sentence, rows),
        )


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
    whole = len(layers) if needs.logits or needs.next_sentence else max(needs.cls, default=0)
    deepest = max([whole, *(number for _, number in needs.projections)])
    positions = batch.positions + _first_position(model.config)
    segments = batch.segments if model.config.type_vocab_size > 1 else torch.zeros_like(batch.segments)
    h_1TH = backbone.embeddings(batch.input_ids[None], segments[None], positions[None])
    if hasattr(backbone, "embeddings_project"):  # ELECTRA's embeddings are narrower than its layers
        h_1TH = backbone.embeddings_project(h_1TH)
    h_TH, features = h_1TH[0], Features()
    for number, layer in enumerate(layers[:deepest], start=1):
        read = {name: _project(layer, name, h_TH) for name in PROJECTIONS if (name, number) in needs.projections}
        features.projections |= {(name, number): states for name, states in read.items()}
        if number == deepest > whole:
            break  # nobody reads what this layer makes of its projections
        # Nobody reads the other tokens of the last layer, unless the head is token-wise.
        only_cls = number == deepest and batch.rows is None
        h_TH = _layer(layer, h_TH, batch, only_cls, read)
        if number in needs.cls:
            features.cls[number] = h_TH if only_cls else h_TH[batch.starts]
    if needs.logits:
        features.logits = _head(model, h_TH if batch.rows is None else h_TH[batch.rows])
    if needs.next_sentence:
        cls_BH = h_TH if batch.rows is None else h_TH[batch.starts]
        head: Any = model.cls
        features.next_sentence = head.seq_relationship(backbone.pooler(cls_BH[:, None]))
    return features


def predicts_next_sentence(model: Any) -> bool:
    """Whether the model has BERT's head for it."""
    return hasattr(getattr(model, "cls", None), "seq_relationship")


def _project(layer: Any, name: Projection, h_TH: Tensor) -> Tensor:
    projected: Tensor = getattr(layer.attention.self, name)(h_TH)
    return projected


def _layer(layer: Any, h_TH: Tensor, batch: Batch, only_cls: bool, read: dict[Projection, Tensor]) -> Tensor:
    """One post-norm Transformer layer over packed tokens; with ``only_cls`` its output at the [CLS] rows alone.

    ``read`` has those of its projections (T, H) that are computed already.
    """
    attention = layer.attention.self
    queried_QH = h_TH[batch.starts] if only_cls else h_TH
    if "query" in read:
        query_QH = read["query"][batch.starts] if only_cls else read["query"]
    else:
        query_QH = _project(layer, "query", queried_QH)
    heads = (-1, attention.num_attention_heads, attention.attention_head_size)
    context_QH = _attend(
        query_QH.view(heads),
        (read["key"] if "key" in read else _project(layer, "key", h_TH)).view(heads),
        (read["value"] if "value" in read else _project(layer, "value", h_TH)).view(heads),
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


def _extract_padded(model: PreTrainedModel, batch: Batch, needs: Needs) -> Features:
    """The same through the model's own forward on padded input: the reference, and the way for other families."""
    input_ids, segments, mask = batch.padded()
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": mask}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = segments
    tape: list[tuple[Tensor, ...]] = []
    if needs.projections:
        model.set_attn_implementation(RECORDING)
        inputs["tape"] = tape
    output: Any = model(**inputs, output_hidden_states=bool(needs.cls))
    if needs.projections and not tape:
        problem = f"models of type {model.config.model_type} do not give away their queries, keys and values"
        raise UserError("method", None, problem, "Take a model of another family, or a method without attention.")
    logits = output.logits if needs.logits else None
    if logits is not None and batch.rows is not None:
        logits = logits[mask.bool()][batch.rows]
    return Features(
        logits,
        {layer: output.hidden_states[layer][:, 0] for layer in needs.cls},
        {
            (name, layer): tape[layer - 1][PROJECTIONS.index(name)].transpose(1, 2).flatten(2)[mask.bool()]
            for name, layer in needs.projections
        },
    )


def _recording_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """``sdpa``, which puts its inputs, each (B, heads, L, d), on the list ``tape`` that the caller gave the model."""
    if (tape := options.pop("tape", None)) is not None:
        tape.append((query, key, value))
    context, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return context, None


AttentionInterface.register(RECORDING, _recording_attention)
AttentionMaskInterface.register(RECORDING, sdpa_mask)  # without it padding would silently be attended to
