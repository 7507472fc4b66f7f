"""Options for the source and the initial weights of a model."""

from typing import Annotated, Any, Literal

from pydantic import Field

from distill_runner.common.readings import Reading
from distill_runner.common.schema import Schema

Init = Literal["first", "group_top", "alternate", "random", "embeddings_only"]


class ModelConfig(Schema):
    """Source and initial weights of a model.

    Args:
        source: a hub id, optionally with a revision (``<id>@<revision>``), or a folder. ``package:<module>/<folder>``
            names a folder in an installed package, ``stage:<name>`` the model of an earlier stage. None makes a new
            model of ``architecture``.
        tokenizer: source of the tokenizer, in the same forms as ``source``, or ``corpus`` for a vocabulary trained on
            the stage's corpus. None takes the tokenizer of ``source``.
        num_layers: number of layers of the model; None keeps the number of the source or of ``architecture``. A model
            that copies no layers may have more layers than its source.
        layers: layers of the source to copy. ``first`` copies the lowest layers (ALP-KD, PKD). The other two divide the
            source's layers into as many equal groups as the model has layers: ``group_top`` copies the top layer of
            each group (internal representations), ``alternate`` the bottom layer (DistilBERT). ``embeddings_only``
            copies no layers but the embeddings; ``random`` copies no weights.
        head: ``new`` for a new head, or ``keep`` for the head of a fine-tuned source. The outputs of a kept head are
            put in the task's order by name.
        labels: names of a kept head's outputs, for a head whose configuration does not name them (LABEL_0, ...).
        architecture: configuration of a new model, with its ``model_type``.
    """

    source: str | None = None
    tokenizer: str | None = None
    num_layers: int | None = Field(None, ge=1)
    layers: Annotated[
        Init,
        Reading("bounds of groups that do not divide evenly are rounded down", "internal representations", "group_top"),
        Reading("bounds of groups that do not divide evenly are rounded down", "DistilBERT", "alternate"),
    ] = "first"
    head: Literal["new", "keep"] = "new"
    labels: list[str] | None = None
    architecture: dict[str, Any] | None = None

    @property
    def copies_layers(self) -> bool:
        """Whether the model copies layers of a source, so that it cannot have more layers than the source."""
        return self.source is not None and self.layers not in ("random", "embeddings_only")


def chosen_layers(source_layers: int, num_layers: int, init: Init) -> list[int]:
    """Return the numbers (from 1) of the source's layers that a student of ``num_layers`` copies; empty if none.

    If ``num_layers`` does not divide ``source_layers``, the bounds of the groups are rounded down.
    """
    n, m = source_layers, num_layers
    match init:
        case "first":
            return list(range(1, m + 1))
        case "group_top":
            return [j * n // m for j in range(1, m + 1)]
        case "alternate":
            return [j * n // m + 1 for j in range(m)]
    return []
