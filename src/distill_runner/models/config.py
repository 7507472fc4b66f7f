"""What a model is made from."""

from typing import Any, Literal

from pydantic import Field

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
    layers: Init = "first"
    head: Literal["new", "keep"] = "new"
    labels: list[str] | None = None
    architecture: dict[str, Any] | None = None

    @property
    def copies_layers(self) -> bool:
        """Whether it takes over layers of a source, of which it then cannot have more."""
        return self.source is not None and self.layers not in ("random", "embeddings_only")
