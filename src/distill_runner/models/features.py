"""What methods read of a model: its sizes (``EncoderShape``), requested features and their values (``Features``)."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from distill_runner.common.errors import UserError, override
from distill_runner.models.families import HOOKED, PACKED, TABLE, Projection
from distill_runner.models.images import depth_and_width, image_size, reads_images

OFFSET_POSITIONS = frozenset(name for name, family in PACKED.items() if family.offset_positions) | {
    *("data2vec-text", "ibert", "longformer", "luke", "roberta-prelayernorm", "xlm-roberta-xl", "xmod")
}
"""Model types whose position ids start after the id of the padding token."""
SHIFTED_POSITIONS = frozenset(
    ("albert", "bart", "bert", "big_bird", "convbert", "distilbert", "electra", "ernie", "flaubert", "gpt2", "layoutlm")
) | {"mbart", "megatron-bert", "mobilebert", "rembert", "splinter", "xlm", "deberta", "deberta-v2", "nystromformer"}
"""Model types whose positions count the padding before a text in ``transformers``, as they do nowhere here."""
UNLIMITED = 2**31 - 1
"""Length of a text for a family without a table of positions, such as T5."""
MPNET = "mpnet"
"""Model type whose position ids start after 1, whatever padding token its configuration names."""


@dataclass(frozen=True)
class FeatureRequest:
    """Features to read from a model: logits, [CLS] outputs of layers, projections in layers, outputs of all tokens.

    Layers count from 1. The embeddings are no layer, but ``states`` of 0 are the input of the first layer. Outputs of
    the last layer include the encoder's final norm, if it has one. Attention scores and probabilities follow from
    queries and keys. ``next_sentence`` is the output of the second head of BERT's pre-training, in addition to the
    ``logits`` of its tokens. If ``first_trained`` is above 0, the embeddings and the layers below it get no gradient; a
    value above the number of layers trains the head only.
    """

    logits: bool = False
    cls: frozenset[int] = frozenset()
    projections: frozenset[tuple[Projection, int]] = frozenset()
    states: frozenset[int] = frozenset()
    next_sentence: bool = False
    first_trained: int = 0

    @property
    def of_tokens(self) -> bool:
        """Whether any requested feature has a row for every token."""
        return bool(self.projections or self.states)

    def __or__(self, other: "FeatureRequest") -> "FeatureRequest":
        return FeatureRequest(
            self.logits or other.logits,
            self.cls | other.cls,
            self.projections | other.projections,
            self.states | other.states,
            self.next_sentence or other.next_sentence,
            max(self.first_trained, other.first_trained),
        )

    def __bool__(self) -> bool:
        return self.logits or bool(self.cls) or self.of_tokens or self.next_sentence


@dataclass
class Features:
    """Features of a batch: ``logits`` (B, C), ``cls`` (B, H) by layer, ``projections`` and ``states`` (T, H), packed.

    A token-wise head has one row of ``logits`` for each token that it reads. Queries and keys with rotary positions are
    rotated, so their products are the scores that the layer itself computes. ``next_sentence`` is (B, 2).
    """

    logits: Tensor | None = None
    cls: dict[int, Tensor] = field(default_factory=dict)
    projections: dict[tuple[Projection, int], Tensor] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)
    next_sentence: Tensor | None = None

    @property
    def logits_OC(self) -> Tensor:
        """The logits, of features that have some."""
        assert self.logits is not None
        return self.logits

    def full(
        self,
        examples: Tensor | slice = slice(None),
        tokens: Tensor | slice = slice(None),
        outputs: Tensor | slice | None = None,
    ) -> "Features":
        """Return the features of some examples, tokens and outputs, in the precision of losses: float32 at least.

        Args:
            examples: indices of the examples; ``slice(None)`` takes all, here and below.
            tokens: indices of the tokens.
            outputs: indices of the head's outputs; ``examples`` by default.
        """

        def part(values: Tensor, indices: Tensor | slice) -> Tensor:
            # A slice takes all; as an operation, its gradient would be a copy.
            selected = values[indices] if isinstance(indices, Tensor) else values
            return selected.to(torch.promote_types(values.dtype, torch.float32))

        return Features(
            None if self.logits is None else part(self.logits, examples if outputs is None else outputs),
            {layer: part(cls, examples) for layer, cls in self.cls.items()},
            {key: part(states, tokens) for key, states in self.projections.items()},
            {layer: part(states, tokens) for layer, states in self.states.items()},
            None if self.next_sentence is None else part(self.next_sentence, examples),
        )


@dataclass(frozen=True)
class EncoderShape:
    """Sizes of an encoder, as far as a method may need them.

    An image network has ``num_channels``, but no heads, vocabulary or positions.

    Attributes:
        projection_width: width of queries, keys and values if they are narrower than the states (MobileBERT).
        shares_keys: whether several heads share their keys and values (grouped-query attention, EuroBERT).
        image_size: (height, width) if an image network accepts no other size.
        gives_logits_only: whether nothing but the model's own outputs is read, as of a decoder with a head for classes.
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
    gives_logits_only: bool = False

    @property
    def reads_images(self) -> bool:
        return self.num_channels > 0

    def require_positions(self, key: str, length: int) -> None:
        """Raise a UserError if texts are longer, with ``key=length``, than the model reads."""
        if length > self.max_length:
            problem = f"the model reads at most {self.max_length} tokens"
            raise UserError(key, length, problem, "Take " + override(key, self.max_length) + ".")

    @property
    def num_products(self) -> int:
        """The multiplications that a token takes in the layers, and so the number of their weights."""
        return 12 * self.num_layers * self.width**2

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "EncoderShape":
        if reads_images(config):
            depth, width = depth_and_width(config)
            sizes: dict[str, Any] = {"num_channels": config.num_channels, "image_size": image_size(config)}
            return cls(depth, width, 0, config.num_labels or 0, 0, config.model_type, 0, **sizes)
        if config.model_type == TABLE:
            return cls(0, config.hidden_size, 1, config.num_labels or 0, config.vocab_size, TABLE, UNLIMITED)
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

    @classmethod
    def of_classifier(cls, config: PreTrainedConfig) -> "EncoderShape":
        """Return the shape of a model of which nothing but its logits is read; unknown sizes are 0."""
        text = config.get_text_config()
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
        layers, width, heads, words, positions = (getattr(text, name, None) or 0 for name in names)
        labels = config.num_labels or 0
        max_length = positions - _first_position(config) if positions > 0 else UNLIMITED
        return cls(layers, width, heads, labels, words, config.model_type, max_length, gives_logits_only=True)

    def require(self, needs: FeatureRequest, side: str) -> None:
        """Check that a model of this shape provides the features ``needs``.

        Args:
            side: ``teacher`` or ``student``, for the message.
        Raises:
            UserError: an image network or a classifier of another kind needs to provide more than logits, or the family
                does not provide queries, keys and values of every head, or the family cannot keep lower layers
                unchanged in training.
        """
        logits_only = needs == FeatureRequest(logits=needs.logits)
        who, remedy = f"a {side} of type {self.model_type}", "Take a model of another family, or a method on logits."
        if self.gives_logits_only and not logits_only:
            remedy = "Take a method on logits (kd, rkd, vanilla, dkd, dist), or BERT or a similar encoder."
            raise UserError(".", None, f"{who} gives logits only, but the method reads more", remedy)
        problem = None
        if self.reads_images and not logits_only:
            problem = f"{who} is an image network: only its logits can be compared"
            remedy = "Take a method on logits: rkd, vanilla, takd, rco, annealing, prokd."
        elif needs.first_trained and self.model_type not in PACKED:
            problem = f"{who} cannot train one layer and keep the layers below unchanged"
            remedy = "Take " + override("schedule.trains", "all", "schedule.trains_at_end", "all") + "."
        elif needs.projections and self.shares_keys:
            problem = f"several heads of {who} share their keys and values"
        elif needs.projections and self.model_type not in (*PACKED, *HOOKED):  # then through AttentionInterface
            network = MODEL_MAPPING[CONFIG_MAPPING[self.model_type]] if self.model_type in CONFIG_MAPPING else None
            if not getattr(network, "_supports_attention_backend", False):  # private: else only a failed pass tells
                problem = f"{who} does not expose its queries, keys and values"
        if problem is not None:
            raise UserError(side, None, problem, remedy)


def is_other_classifier(config: PreTrainedConfig) -> bool:
    """Return whether a model is no bidirectional encoder, but has a head for classes of texts in ``transformers``."""
    if config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        return False
    return config.is_encoder_decoder or config.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def reads_segments(config: PreTrainedConfig) -> bool:
    """Return whether the ids of segments change what a model of texts computes; XLNet compares them."""
    return getattr(config, "type_vocab_size", 0) > 1 or config.model_type == "xlnet"


def _first_position(config: PreTrainedConfig) -> int:
    if config.model_type == MPNET:
        return 2
    return config.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0


def has_next_sentence_head(model: Any) -> bool:
    """Return whether the model has BERT's head for next sentence prediction."""
    return hasattr(getattr(model, "cls", None), "seq_relationship")
