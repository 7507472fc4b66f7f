"""The packed path of the families with rotary positions, ModernBERT and NomicBERT.

Shapes: a pack has T tokens of H features; Q is the number of rows after an attention; a head has d features.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distill_runner.datasets.batches import Batch
from distill_runner.models.bert import Drop, Family, Layer, Weights, side_by_side
from distill_runner.models.features import PROJECTIONS, Projection


class ModernBertLayer(Layer):
    """Pre-norm layer with rotary positions and GeGLU; two of three layers attend locally."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.rotary = module.attention_type
        if module.attention_type == "sliding_attention":
            self.window = module.config.sliding_window

    @property
    def attention_dropout(self) -> float:
        return float(self.module.attn.attention_dropout)

    def attended(self, h_TH: Tensor) -> Tensor:
        normed: Tensor = self.module.attn_norm(h_TH)
        return normed

    def weights(self, names: Sequence[Projection]) -> Weights:
        fused = self.module.attn.Wqkv
        if len(names) == len(PROJECTIONS):
            return fused.weight, fused.bias
        chosen = [PROJECTIONS.index(name) for name in names]
        weight = fused.weight.unflatten(0, (len(PROJECTIONS), -1))[chosen].flatten(0, 1)
        bias = None if fused.bias is None else fused.bias.unflatten(0, (len(PROJECTIONS), -1))[chosen].flatten()
        return weight, bias

    def finish(self, h_QH: Tensor, context_QH: Tensor, drop: Drop) -> Tensor:
        layer, mlp = self.module, self.module.mlp
        h_QH = h_QH + drop(layer.attn.out_drop, layer.attn.Wo(context_QH), 1)
        expanded, gate = mlp.Wi(layer.mlp_norm(h_QH)).chunk(2, dim=-1)
        added: Tensor = h_QH + mlp.Wo(drop(mlp.drop, mlp.act(expanded) * gate, 2))
        return added


class NomicBertLayer(Layer):
    """Post-norm layer with rotary positions and SwiGLU."""

    rotary = "full_attention"

    @property
    def attention_dropout(self) -> float:
        return float(self.module.self_attn.attention_dropout)

    def weights(self, names: Sequence[Projection]) -> Weights:
        return side_by_side([getattr(self.module.self_attn, f"{name[0]}_proj") for name in names])

    def finish(self, h_QH: Tensor, context_QH: Tensor, drop: Drop) -> Tensor:
        layer = self.module
        attended = drop(layer.post_attention_dropout, layer.self_attn.o_proj(context_QH), 1)
        h_QH = layer.post_attention_layernorm(h_QH + attended)
        normed: Tensor = layer.post_mlp_layernorm(h_QH + drop(layer.post_mlp_dropout, layer.mlp(h_QH), 2))
        return normed


class ModernBert(Family):
    layer = ModernBertLayer

    def layers(self, backbone: Any) -> list[Layer]:
        return [self.layer(module) for module in backbone.layers]

    def embed(self, model: Any, batch: Batch, drop: Drop) -> Tensor:
        embeddings = model.base_model.embeddings
        return drop(embeddings.drop, embeddings.norm(embeddings.tok_embeddings(batch.input_ids)), 0)

    def angles(self, backbone: Any, h_TH: Tensor, positions_T: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        cos, sin = backbone.rotary_emb(h_TH, positions_T[None], kind)
        return cos[0], sin[0]

    def normed(self, backbone: Any, h_RH: Tensor) -> Tensor:
        normed: Tensor = backbone.final_norm(h_RH)
        return normed

    def reads_mean(self, model: Any) -> bool:
        return hasattr(model, "classifier") and model.config.classifier_pooling == "mean"

    def head(self, model: Any, h_RH: Tensor, drop: Drop) -> Tensor:
        hidden = model.head(h_RH)
        if hasattr(model, "decoder"):
            logits: Tensor = model.decoder(hidden)
        else:
            logits = model.classifier(drop(model.drop, hidden, 0))
        return logits


class NomicBert(Family):
    layer = NomicBertLayer

    def layers(self, backbone: Any) -> list[Layer]:
        return [self.layer(module) for module in backbone.layers]

    def embed(self, model: Any, batch: Batch, drop: Drop) -> Tensor:
        embeddings = model.base_model.embeddings
        h_TH = embeddings.word_embeddings(batch.input_ids) + embeddings.token_type_embeddings(batch.segments)
        return drop(embeddings.dropout, embeddings.LayerNorm(h_TH), 0)

    def angles(self, backbone: Any, h_TH: Tensor, positions_T: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        cos, sin = backbone.rotary_emb(h_TH, positions_T[None])
        return cos[0], sin[0]
