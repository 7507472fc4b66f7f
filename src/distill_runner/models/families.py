"""The packed path of BERT and its kin, DistilBERT and ModernBERT: embeddings, layers, heads.

Shapes: a pack has T tokens of H features; R is any number of rows of tokens, and Q the number of rows after an
attention. A head reads the B first tokens, the B means of the sequences, or selected tokens. An attention head has d
features.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from distill_runner.datasets.batches import Batch

Projection = Literal["query", "key", "value"]
"""A projection of an attention layer's input, after the bias and before the attention; all heads side by side."""
PROJECTIONS: tuple[Projection, ...] = get_args(Projection)
Drop = Callable[[Any, Tensor, int], Tensor]
"""Function that applies a dropout module to rows. The number tells which dropout it is: 1 or 2 in a layer, 0 for the
embeddings, 0 or 1 in a head."""
Weights = tuple[Tensor, Tensor | None]


class Layer(ABC):
    """One Transformer layer on the packed path.

    Args:
        module: the layer's module in ``transformers``.

    Attributes:
        window: maximum distance between a token and the tokens it attends to; None for all tokens.
        rotary: type of the layer's rotary positions; None without rotary positions.
    """

    window: int | None = None
    rotary: str | None = None

    def __init__(self, module: Any) -> None:
        self.module = module

    attention_dropout: float
    """Dropout probability of attention probabilities in training."""

    @abstractmethod
    def weights(self, names: Sequence[Projection]) -> Weights:
        """Return the weight (len(names) * H, H) and the bias of the projections ``names``, concatenated."""

    @abstractmethod
    def finish(self, h_QH: Tensor, context_QH: Tensor, drop: Drop) -> Tensor:
        """Return the layer's output from its input ``h_QH`` and the attention's output ``context_QH``."""

    def attention_input(self, h_TH: Tensor) -> Tensor:
        """Return the input of the projections: the layer's input, which pre-norm families normalize first."""
        return h_TH


def concatenated_weights(layers: Sequence[Any]) -> Weights:
    """Return the weights and biases of linear layers, concatenated along their outputs."""
    if len(layers) == 1:
        return layers[0].weight, layers[0].bias
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return torch.cat([layer.weight for layer in layers]), torch.cat(biases) if biases else None


class BertLayer(Layer):
    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.attention_dropout = module.attention.self.dropout.p

    def weights(self, names: Sequence[Projection]) -> Weights:
        return concatenated_weights([getattr(self.module.attention.self, name) for name in names])

    def finish(self, h_QH: Tensor, context_QH: Tensor, drop: Drop) -> Tensor:
        first, last = self.module.attention.output, self.module.output
        h_QH = first.LayerNorm(drop(first.dropout, first.dense(context_QH), 1) + h_QH)
        return last.LayerNorm(drop(last.dropout, last.dense(self.module.intermediate(h_QH)), 2) + h_QH)


class DistilBertLayer(Layer):
    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.attention_dropout = module.attention.dropout.p

    def weights(self, names: Sequence[Projection]) -> Weights:
        return concatenated_weights([getattr(self.module.attention, f"{name[0]}_lin") for name in names])

    def finish(self, h_QH: Tensor, context_QH: Tensor, drop: Drop) -> Tensor:
        layer, ffn = self.module, self.module.ffn
        h_QH = layer.sa_layer_norm(layer.attention.out_lin(context_QH) + h_QH)
        hidden = ffn.activation(ffn.lin1(h_QH))
        return layer.output_layer_norm(drop(ffn.dropout, ffn.lin2(hidden), 2) + h_QH)


class ModernBertLayer(Layer):
    """Pre-norm layer with rotary positions and GeGLU; two of three layers attend locally."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.rotary, self.attention_dropout = module.attention_type, module.attn.attention_dropout
        if module.attention_type == "sliding_attention":
            self.window = module.config.sliding_window

    def attention_input(self, h_TH: Tensor) -> Tensor:
        return self.module.attn_norm(h_TH)

    def weights(self, names: Sequence[Projection]) -> Weights:
        qkv = self.module.attn.Wqkv
        if len(names) == len(PROJECTIONS):
            return qkv.weight, qkv.bias
        indices = [PROJECTIONS.index(name) for name in names]
        weight = qkv.weight.unflatten(0, (len(PROJECTIONS), -1))[indices].flatten(0, 1)
        bias = None if qkv.bias is None else qkv.bias.unflatten(0, (len(PROJECTIONS), -1))[indices].flatten()
        return weight, bias

    def finish(self, h_QH: Tensor, context_QH: Tensor, drop: Drop) -> Tensor:
        layer, mlp = self.module, self.module.mlp
        h_QH = h_QH + drop(layer.attn.out_drop, layer.attn.Wo(context_QH), 1)
        hidden, gate = mlp.Wi(layer.mlp_norm(h_QH)).chunk(2, dim=-1)
        return h_QH + mlp.Wo(drop(mlp.drop, mlp.act(hidden) * gate, 2))


class Family:
    """BERT; subclasses override the parts in which their family differs.

    Attributes:
        layer: class of the family's layers.
        offset_positions: whether position ids start after the padding id, as in RoBERTa.
        may_read_mean: whether ``classifier_pooling`` says if a classifier reads the mean of a sequence, not its first
            token.
    """

    layer: ClassVar[type[Layer]] = BertLayer
    offset_positions: ClassVar[bool] = False
    may_read_mean: ClassVar[bool] = False

    def layers(self, backbone: Any) -> list[Layer]:
        return [self.layer(module) for module in backbone.encoder.layer]

    def embed(self, model: Any, batch: Batch, drop: Drop) -> Tensor:
        """Return the embeddings (T, H), which are the input of the first layer."""
        embeddings = model.base_model.embeddings
        segments = batch.segments if model.config.type_vocab_size > 1 else torch.zeros_like(batch.segments)
        h_TH = embeddings.word_embeddings(batch.input_ids) + embeddings.token_type_embeddings(segments)
        first = int(model.config.pad_token_id) + 1 if self.offset_positions else 0
        h_TH = h_TH + embeddings.position_embeddings(batch.positions + first if first else batch.positions)
        return drop(embeddings.dropout, embeddings.LayerNorm(h_TH), 0)

    def angles(self, backbone: Any, h_TH: Tensor, positions_T: Tensor, rotary: str) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (T, d) of the rotary positions of this type, for layers that have some."""
        raise NotImplementedError

    def final_norm(self, backbone: Any, h_RH: Tensor) -> Tensor:
        """Return the output of the last layer after the final norm, if the family has one."""
        return h_RH

    def logits(self, model: Any, h_RH: Tensor, drop: Drop) -> Tensor:
        """Return the output of the model's head for the rows ``h_RH``."""
        if type(model).__name__.endswith("ForTokenClassification"):
            return self.token_labels(model, h_RH, drop)
        if not hasattr(model, "qa_outputs"):
            return self.head(model, h_RH, drop)
        dropout = getattr(model, "dropout", None)  # only DistilBERT has dropout here
        return model.qa_outputs(h_RH if dropout is None else drop(dropout, h_RH, 0))

    def token_labels(self, model: Any, h_RH: Tensor, drop: Drop) -> Tensor:
        """Return the output of a head that classifies each token."""
        return model.classifier(drop(model.dropout, h_RH, 0))

    def head(self, model: Any, h_RH: Tensor, drop: Drop) -> Tensor:
        """Return the output of a head for classification or masked language modeling.

        It is also called for a head for spans that is not named ``qa_outputs``.
        """
        if hasattr(model, "cls"):
            return model.cls.predictions(h_RH)
        return model.classifier(drop(model.dropout, model.base_model.pooler(h_RH[:, None]), 0))


class Roberta(Family):
    offset_positions = True

    def head(self, model: Any, h_RH: Tensor, drop: Drop) -> Tensor:
        if hasattr(model, "lm_head"):
            return model.lm_head(h_RH)
        return _two_layer_head(model.classifier, h_RH, torch.tanh, drop)


class Electra(Family):
    def embed(self, model: Any, batch: Batch, drop: Drop) -> Tensor:
        h_TE = super().embed(model, batch, drop)
        project = getattr(model.base_model, "embeddings_project", None)  # for embeddings narrower than the layers
        return h_TE if project is None else project(h_TE)

    def head(self, model: Any, h_RH: Tensor, drop: Drop) -> Tensor:
        if hasattr(model, "generator_lm_head"):
            return model.generator_lm_head(model.generator_predictions(h_RH))
        return _two_layer_head(model.classifier, h_RH, model.classifier.activation, drop)


def _two_layer_head(head: Any, h_RH: Tensor, activation: Callable[[Tensor], Tensor], drop: Drop) -> Tensor:
    return head.out_proj(drop(head.dropout, activation(head.dense(drop(head.dropout, h_RH, 0))), 1))


class DistilBert(Family):
    layer = DistilBertLayer

    def layers(self, backbone: Any) -> list[Layer]:
        return [self.layer(module) for module in backbone.transformer.layer]

    def embed(self, model: Any, batch: Batch, drop: Drop) -> Tensor:
        embeddings = model.base_model.embeddings
        h_TH = embeddings.word_embeddings(batch.input_ids) + embeddings.position_embeddings(batch.positions)
        return drop(embeddings.dropout, embeddings.LayerNorm(h_TH), 0)

    def head(self, model: Any, h_RH: Tensor, drop: Drop) -> Tensor:
        if hasattr(model, "vocab_projector"):
            return model.vocab_projector(model.vocab_layer_norm(model.activation(model.vocab_transform(h_RH))))
        return model.classifier(drop(model.dropout, model.pre_classifier(h_RH).relu(), 0))


class ModernBert(Family):
    layer = ModernBertLayer
    may_read_mean = True

    def layers(self, backbone: Any) -> list[Layer]:
        return [self.layer(module) for module in backbone.layers]

    def embed(self, model: Any, batch: Batch, drop: Drop) -> Tensor:
        embeddings = model.base_model.embeddings
        return drop(embeddings.drop, embeddings.norm(embeddings.tok_embeddings(batch.input_ids)), 0)

    def angles(self, backbone: Any, h_TH: Tensor, positions_T: Tensor, rotary: str) -> tuple[Tensor, Tensor]:
        cos, sin = backbone.rotary_emb(h_TH, positions_T[None], rotary)
        return cos[0], sin[0]

    def final_norm(self, backbone: Any, h_RH: Tensor) -> Tensor:
        return backbone.final_norm(h_RH)

    def token_labels(self, model: Any, h_RH: Tensor, drop: Drop) -> Tensor:
        return self.head(model, h_RH, drop)

    def head(self, model: Any, h_RH: Tensor, drop: Drop) -> Tensor:
        hidden = model.head(h_RH)
        return model.decoder(hidden) if hasattr(model, "decoder") else model.classifier(drop(model.drop, hidden, 0))


class Static(Family):
    """A table of tokens, without layers (``models.static``)."""

    def layers(self, backbone: Any) -> list[Layer]:
        return []

    def embed(self, model: Any, batch: Batch, drop: Drop) -> Tensor:
        h_TH: Tensor = model.base_model.embed(batch.input_ids)
        return h_TH


TABLE = "model2vec"
"""Model type of a table of tokens."""
PACKED: dict[str, Family] = {
    "bert": Family(),
    "electra": Electra(),
    "roberta": Roberta(),
    "xlm-roberta": Roberta(),
    "camembert": Roberta(),
    "distilbert": DistilBert(),
    "modernbert": ModernBert(),
    TABLE: Static(),
}
"""Packed families by model type. Other types run padded, through their own ``forward``."""
HOOKED = {
    "deberta": ("attention.self", ("in_proj",)),
    "deberta-v2": ("attention.self", ("query_proj", "key_proj", "value_proj")),
    "mpnet": ("attention.attn", ("q", "k", "v")),
}
"""Padded families that ``AttentionInterface`` of ``transformers`` does not serve: the attention module of a layer, and
the linear layers in it that make queries, keys and values, by model type."""
