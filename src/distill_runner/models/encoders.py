"""Sizes of an encoder, and the features that its family can provide."""

from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_MAPPING, PreTrainedConfig

from distill_runner.common.errors import UserError
from distill_runner.models.extract import PACKED
from distill_runner.models.features import FeatureRequest
from distill_runner.models.images import depth_and_width, image_size, reads_images

PACKED_FAMILIES = frozenset(PACKED)
"""Model types that ``extract`` runs packed, layer by layer; other types run padded."""
BEHIND_PADDING = frozenset(name for name, family in PACKED.items() if family.behind_padding) | {
    *("data2vec-text", "ibert", "longformer", "luke", "roberta-prelayernorm", "xlm-roberta-xl", "xmod")
}
"""Model types that number positions from behind the id of the padding token."""
MPNET = "mpnet"
"""Model type that does the same, but pads with token 1 whatever its configuration says."""


@dataclass(frozen=True)
class EncoderShape:
    """Sizes of an encoder, as far as a method may need them.

    ``projection_width`` is the width of queries, keys and values if they are narrower than the states (MobileBERT).
    ``shares_keys`` tells that several heads share their keys and values (grouped-query attention, EuroBERT).
    An image network has ``num_channels``, but no heads, vocabulary or positions. ``image_size`` is (height, width) if
    the network accepts no other size.
    """

    num_layers: int
    width: int
    num_heads: int
    num_labels: int
    vocab_size: int
    model_type: str

    max_length: int = 512
    projection_width: int | None = None
    num_channels: int = 0
    image_size: tuple[int, int] | None = None
    shares_keys: bool = False

    @property
    def reads_images(self) -> bool:
        return self.num_channels > 0

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "EncoderShape":
        if reads_images(config):
            depth, width = depth_and_width(config)
            sizes = {"num_channels": config.num_channels, "image_size": image_size(config)}
            return cls(depth, width, 0, config.num_labels or 0, 0, config.model_type, 0, **sizes)
        heads = config.num_attention_heads
        return cls(
            config.num_hidden_layers,
            config.hidden_size,
            heads,
            config.num_labels or 0,
            config.vocab_size,
            config.model_type,
            config.max_position_embeddings - _first_position(config),
            getattr(config, "true_hidden_size", None),
            shares_keys=(getattr(config, "num_key_value_heads", None) or heads) != heads,
        )

    def require(self, needs: FeatureRequest, side: str) -> None:
        """Check that a model of this shape provides the features ``needs``.

        Args:
            side: ``teacher`` or ``student``, for the message.
        Raises:
            UserError: an image network needs to provide more than logits, or the family does not provide queries, keys
                and values of every head, or the family cannot keep lower layers unchanged in training.
        """
        if self.reads_images and needs != FeatureRequest(logits=needs.logits):
            problem = f"a {side} of type {self.model_type} is an image network: only its logits can be compared"
            raise UserError(side, None, problem, "Take a method on logits: rkd, vanilla, takd, rco, annealing, prokd.")
        if needs.first_trained and self.model_type not in PACKED_FAMILIES:
            problem = f"a {side} of type {self.model_type} cannot train one layer and keep the layers below unchanged"
            raise UserError(side, None, problem, "Take schedule.trains=all, or a model of another family.")
        if needs.projections and self.shares_keys:
            problem = f"several heads of a {side} of type {self.model_type} share their keys and values"
            raise UserError(side, None, problem, "Take a model of another family, or a method that reads no attention.")
        if needs.projections and not _gives_projections(self.model_type):
            problem = f"a {side} of type {self.model_type} does not expose its queries, keys and values"
            raise UserError(side, None, problem, "Take a model of another family, or a method that reads no attention.")


def _first_position(config: PreTrainedConfig) -> int:
    if config.model_type == MPNET:
        return 2
    return config.pad_token_id + 1 if config.model_type in BEHIND_PADDING else 0


def _gives_projections(model_type: str) -> bool:
    """Return whether queries, keys and values can be read: in a packed family or through ``AttentionInterface``."""
    if model_type in PACKED_FAMILIES or model_type not in CONFIG_MAPPING:
        return model_type in PACKED_FAMILIES
    return bool(getattr(MODEL_MAPPING[CONFIG_MAPPING[model_type]], "_supports_attention_backend", False))


def predicts_next_sentence(model: Any) -> bool:
    """Return whether the model has BERT's head for next sentence prediction."""
    return hasattr(getattr(model, "cls", None), "seq_relationship")
