"""What methods read of a model (``FeatureRequest``), and what is read (``Features``)."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

Projection = Literal["query", "key", "value"]
"""What an attention layer makes of its input, after the bias and before the attention; all heads side by side."""
PROJECTIONS = get_args(Projection)


@dataclass(frozen=True)
class FeatureRequest:
    """What is read of a model: its logits, the [CLS] outputs of layers, projections in layers, outputs of all tokens.

    Layers count from 1; the embeddings are no layer, but ``states`` of 0 are what the first layer reads. The last
    layer's are what the encoder gives away, behind a final norm where it has one. Scores and probabilities of attention
    follow from queries and keys (``attention_maps``). ``next_sentence`` is the second head of BERT's own pre-training,
    beside the ``logits`` of its tokens. Layers below ``first_trained``, the embeddings with them, get no gradient; one
    more than there are layers leaves the head alone.
    """

    logits: bool = False
    cls: frozenset[int] = frozenset()
    projections: frozenset[tuple[Projection, int]] = frozenset()
    states: frozenset[int] = frozenset()
    next_sentence: bool = False
    first_trained: int = 0

    @property
    def of_tokens(self) -> bool:
        """Whether any of it is of every token."""
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
    """What was asked for: ``logits`` (B, C), ``cls`` by layer (B, H), ``projections`` and ``states`` (T, H), packed.

    Queries and keys of rotary positions are turned: their products are the scores that the layer itself computes.
    ``next_sentence`` is (B, 2).
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
        """Some examples, their tokens and outputs, in the precision of losses: float32 at least.

        Args:
            outputs: of the head; those of ``rows`` by default.
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
