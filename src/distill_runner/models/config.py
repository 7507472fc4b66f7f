"""What a model is made from."""

from typing import Annotated, Any, Literal

from pydantic import Field

from distill_runner.common.readings import Reading
from distill_runner.common.schema import Schema

Init = Literal["first", "group_top", "alternate", "random", "embeddings_only"]


class ModelConfig(Schema):
    """Where a model comes from.

    Args:
        source: a hub id, one with its revision (``<id>@<revision>``), a folder, ``package:<module>/<folder>`` inside an
            installed package, ``stage:<name>`` for what an earlier stage yields, or None for a fresh model of
            ``architecture``.
        tokenizer: as ``source``, or ``corpus`` for a vocabulary trained on the stage's corpus; the source's own by
            default.
        num_layers: keep that many layers; all by default. A model that copies none may have more than its source.
        layers: which of the source's layers are copied (METHODS "Shared terms"): ``first`` (ALP-KD, PKD), ``group_top``
            (internal representations), ``alternate`` (DistilBERT), ``random`` or ``embeddings_only``.
        head: ``new``, or ``keep`` the one of a fine-tuned source, its outputs put in the task's order by name.
        labels: names of a kept head's outputs, for heads that do not say (LABEL_0, ...).
        architecture: configuration of a fresh model, with its ``model_type``.
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
        """Whether it takes over layers of a source, of which it then cannot have more."""
        return self.source is not None and self.layers not in ("random", "embeddings_only")


def chosen_layers(source_layers: int, num_layers: int, init: Init) -> list[int]:
    """Numbers (from 1) of the source's layers that a student of ``num_layers`` copies; empty if it copies none.

    Where ``num_layers`` does not divide, the groups' bounds are rounded down.
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
