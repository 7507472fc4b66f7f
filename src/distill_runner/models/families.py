"""Where the families that run packed keep their parts: embeddings, layers, heads.

T tokens of H features in all, R rows of them; a head reads B first tokens, means of sequences, or chosen tokens.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from distill_runner.datasets.batches import Batch
from distill_runner.models.layers import BertLayer, DistilBertLayer, Drop, Layer, ModernBertLayer, NomicBertLayer


class Family:
    """BERT; the others say where they differ."""

    layer: ClassVar[type[Layer]] = BertLayer
    behind_padding: ClassVar[bool] = False
    """Whether positions start behind the padding index, as RoBERTa's."""

    def layers(self, backbone: Any) -> list[Layer]:
        return [self.layer(module) for module in backbone.encoder.layer]

    def embed(self, model: Any, batch: Batch, drop: Drop) -> Tensor:
        """(T, H), the input of the first layer."""
        embeddings = model.base_model.embeddings
        segments = batch.segments if model.config.type_vocab_size > 1 else torch.zeros_like(batch.segments)
        h_TH = embeddings.word_embeddings(batch.input_ids) + embeddings.token_type_embeddings(segments)
        h_TH = h_TH + embeddings.position_embeddings(batch.positions + self.first_position(model.config))
        return drop(embeddings.dropout, embeddings.LayerNorm(h_TH), 0)

    def first_position(self, config: Any) -> int:
        return int(config.pad_token_id) + 1 if self.behind_padding else 0

    def angles(self, backbone: Any, h_TH: Tensor, positions_T: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines (T, d) of rotary positions of a kind.

        Raises:
            TypeError: the family's positions are embedded, and none of its layers asks for this.
        """
        raise TypeError(f"{type(self).__name__} has no rotary positions")

    def normed(self, backbone: Any, h_RH: Tensor) -> Tensor:
        """The output of the last layer as the family gives it away."""
        return h_RH

    def reads_mean(self, model: Any) -> bool:
        """Whether its head for classification reads the mean of a sequence instead of its first token."""
        return False

    def logits(self, model: Any, h_RH: Tensor, drop: Drop) -> Tensor:
        """What the model's own head makes of the rows that it reads."""
        if not hasattr(model, "qa_outputs"):
            return self.head(model, h_RH, drop)
        dropout = getattr(model, "dropout", None)  # DistilBERT's alone
        spans: Tensor = model.qa_outputs(h_RH if dropout is None else drop(dropout, h_RH, 0))
        return spans

    def head(self, model: Any, h_RH: Tensor, drop: Drop) -> Tensor:
        """The head for classification or for masked language modelling; for spans where it is no ``qa_outputs``."""
        if hasattr(model, "cls"):
            logits: Tensor = model.cls.predictions(h_RH)
        else:
            logits = model.classifier(drop(model.dropout, model.base_model.pooler(h_RH[:, None]), 0))
        return logits


class Roberta(Family):
    behind_padding = True

    def head(self, model: Any, h_RH: Tensor, drop: Drop) -> Tensor:
        if hasattr(model, "lm_head"):
            logits: Tensor = model.lm_head(h_RH)
            return logits
        return _two_layers(model.classifier, h_RH, torch.tanh, drop)


class Electra(Family):
    def embed(self, model: Any, batch: Batch, drop: Drop) -> Tensor:
        h_TE = super().embed(model, batch, drop)
        project = getattr(model.base_model, "embeddings_project", None)  # where they are narrower than the layers
        return h_TE if project is None else project(h_TE)

    def head(self, model: Any, h_RH: Tensor, drop: Drop) -> Tensor:
        if hasattr(model, "generator_lm_head"):
            logits: Tensor = model.generator_lm_head(model.generator_predictions(h_RH))
            return logits
        return _two_layers(model.classifier, h_RH, model.classifier.activation, drop)


def _two_layers(head: Any, h_RH: Tensor, activation: Callable[[Tensor], Tensor], drop: Drop) -> Tensor:
    hidden = activation(head.dense(drop(head.dropout, h_RH, 0)))
    logits: Tensor = head.out_proj(drop(head.dropout, hidden, 1))
    return logits


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
            hidden = model.activation(model.vocab_transform(h_RH))
            logits: Tensor = model.vocab_projector(model.vocab_layer_norm(hidden))
        else:
            logits = model.classifier(drop(model.dropout, model.pre_classifier(h_RH).relu(), 0))
        return logits


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


PACKED: dict[str, Family] = {
    "bert": Family(),
    "electra": Electra(),
    "roberta": Roberta(),
    "xlm-roberta": Roberta(),
    "camembert": Roberta(),
    "distilbert": DistilBert(),
    "modernbert": ModernBert(),
    "nomic_bert": NomicBert(),
}
"""By model type. The others run padded, through their own forward."""
