"""The features that methods request from a model (``FeatureRequest``), and their values (``Features``)."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

Projection = Literal["query", "key", "value"]
"""A projection of an attention layer's input, after the bias and before the attention; all heads side by side."""
PROJECTIONS = get_args(Projection)


@dataclass(frozen=True)
class FeatureRequest:
    """Features to read from a model: logits, [CLS] outputs of layers, projections in layers, outputs of all tokens.

    Layers count from 1. The embeddings are no layer, but ``states`` of 0 are the input of the first layer. Outputs of
    the last layer include the encoder's final norm, if it has one. Attention scores and probabilities follow from
    queries and keys (``attention_maps``). ``next_sentence`` is the output of the second head of BERT's pre-training, in
    addition to the ``logits`` of its tokens. If ``first_trained`` is above 0, the embeddings and the layers below it
    get no gradient; a value above the number of layers trains the head only.
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

    def full(
        self,
        rows: Tensor | slice = slice(None),
        tokens: Tensor | slice = slice(None),
        outputs: Tensor | slice | None = None,
    ) -> "Features":
        """Return the features of some examples, tokens and outputs, in the precision of losses: float32 at least.

        Args:
            rows: indices of the examples.
            tokens: indices of the tokens.
            outputs: indices of the head's outputs; ``rows`` by default.
        """

        def part(values: Tensor, chosen: Tensor | slice) -> Tensor:
            return values[chosen].to(torch.promote_types(values.dtype, torch.float32))

        return Features(
            None if self.logits is None else part(self.logits, rows if outputs is None else outputs),
            {layer: part(cls, rows) for layer, cls in self.cls.items()},
            {place: part(states, tokens) for place, states in self.projections.items()},
            {layer: part(states, tokens) for layer, states in self.states.items()},
            None if self.next_sentence is None else part(self.next_sentence, rows),
        )
