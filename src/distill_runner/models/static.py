"""Static students: a vector for each token, whose mean is the vector of a text, as those of model2vec (Tulkens 2024).

One folder serves three: this package, ``StaticModel.from_pretrained`` of model2vec, and sentence-transformers, which
reads it as a ``StaticEmbedding``. Tables that those two wrote are read by ``as_own_folder``. Importing this module
registers configuration and model with ``transformers``.

Shapes: V tokens of the vocabulary with H numbers each.
"""

import json
import shutil
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import BaseModelOutput

from distill_runner.models.families import TABLE
from distill_runner.models.metadata import CONFIG, MODULES, SETTINGS, read_json

STATIC = "StaticEmbedding"
TOKENS_AT_ONCE = 512
SIF = 1e-4
"""Smoothing of the weights by frequency (Arora et al. 2017, Eq. 2), as in model2vec."""


@strict
class StaticConfig(PreTrainedConfig):
    """Sizes of a ``StaticModel``.

    Args:
        hidden_dim: numbers of a vector.
        ignored_ids: special tokens, which add nothing to the vector of a text; model2vec does not even read them.
        normalize, seq_length: for model2vec: vectors have length 1, and texts are not cut.
    """

    model_type = TABLE
    attribute_map: ClassVar[dict[str, str]] = {"hidden_size": "hidden_dim"}

    vocab_size: int = 30522
    hidden_dim: int = 256
    ignored_ids: list[int] | tuple[int, ...] = ()
    num_attention_heads: int = 1
    normalize: bool = True
    seq_length: int = 1_000_000


class StaticModel(PreTrainedModel):
    """A table of tokens: ``input_ids`` (B, L) -> ``last_hidden_state`` (B, L, H), the row of each token."""

    config_class = StaticConfig
    config: StaticConfig
    base_model_prefix = "table"

    def __init__(self, config: StaticConfig) -> None:
        super().__init__(config)
        self.embeddings: Any = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings = value

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_ignored: object) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.embed(input_ids))

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the row of each token (..., H); 0 for ignored tokens."""
        counts = torch.ones_like(input_ids, dtype=torch.bool)
        for number in self.config.ignored_ids:
            counts = counts & (input_ids != number)
        return self.embeddings(input_ids) * counts[..., None]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight)


@torch.no_grad()
def fill_table(table: StaticModel, teacher: Any, tokenizer: Any) -> None:
    """Give each token its vector by a model of vectors, centered, and weighted by its rank (model2vec's Zipf weights).

    The vocabulary is taken to be in the order of frequency, as most are.

    Args:
        teacher: model whose ``sentence_embedding`` is the vector of a text; it reads each token as a text.
    """
    special, size = tokenizer("")["input_ids"], table.config.vocab_size
    vectors = []
    for ids_n in torch.arange(size).split(TOKENS_AT_ONCE):
        specials = [torch.full_like(ids_n, number) for number in special]
        input_ids = torch.stack([*specials[:1], ids_n, *specials[1:]], dim=1)
        vectors.append(teacher(input_ids, torch.ones_like(input_ids)).sentence_embedding)
    vectors_VH, ignored = torch.cat(vectors), torch.tensor(table.config.ignored_ids, dtype=torch.long)
    counts_V1 = torch.ones(size, 1).index_fill_(0, ignored, 0)
    vectors_VH = vectors_VH - (vectors_VH * counts_V1).sum(0) / counts_V1.sum()
    share_V1 = 1 / torch.arange(2, size + 2, dtype=torch.float64)[:, None]
    table.embeddings.weight.copy_(vectors_VH * counts_V1 * (SIF / (SIF + share_V1 / share_V1.sum())))


# Tables of other programs


def is_of_others(folder: Path) -> bool:
    """Return whether a folder holds a table of tokens that another program wrote."""
    with suppress(ValueError, LookupError, TypeError, AttributeError):  # damaged files are reported where they are read
        modules, config = read_json(folder / MODULES), read_json(folder / CONFIG)
        is_table = str(modules[0]["type"]).endswith(f".{STATIC}") if modules else config.get("model_type") == TABLE
        return is_table and "ignored_ids" not in config
    return False


def as_own_folder(folder: Path) -> TemporaryDirectory[str]:
    """Return a copy of such a folder as this package writes it, which gives the vectors of sentence-transformers.

    No special tokens are added, and texts are cut where ``tokenizer.json`` says. Of a table with clusters of tokens,
    each token gets the row of its cluster, times its weight.
    """
    kinds = [STATIC, "Normalize"][: 1 + bool(read_json(folder / CONFIG).get("normalize"))]  # early ones of model2vec
    modules = [{"name": kind, "path": kind, "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    entries = read_json(folder / MODULES) or [modules[0] | {"path": ""}, *modules[1:]]
    scratch = TemporaryDirectory(prefix="distill-table-", ignore_cleanup_errors=True)
    Finalize(None, scratch.cleanup, exitpriority=0)  # processes of a sweep end without the finalizers of Python
    target, source = Path(scratch.name), folder / entries[0]["path"]
    file = source / "model.safetensors"
    tensors = load_file(file) if file.is_file() else torch.load(source / "pytorch_model.bin", weights_only=True)
    rows_VH = tensors["embedding.weight" if "embedding.weight" in tensors else "embeddings"].float()
    rows_VH = rows_VH[tensors["mapping"].long()] if "mapping" in tensors else rows_VH
    rows_VH = rows_VH * tensors["weights"].float()[:, None] if "weights" in tensors else rows_VH
    table = StaticModel(StaticConfig(vocab_size=len(rows_VH), hidden_dim=rows_VH.shape[1]))
    table.embeddings = nn.Embedding.from_pretrained(rows_VH)
    table.save_pretrained(target)
    tokenizer = json.loads(Tokenizer.from_file(str(source / "tokenizer.json")).to_str())
    limit = (tokenizer["truncation"] or {}).get("max_length")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"model_max_length": limit} if limit else {})
    tokenizer |= dict.fromkeys(("post_processor", "padding", "truncation"))
    contents = {"tokenizer.json": tokenizer, "tokenizer_config.json": settings, SETTINGS: read_json(folder / SETTINGS)}
    for name, content in (contents | {MODULES: [entries[0] | {"path": "."}, *entries[1:]]}).items():
        (target / name).write_text(json.dumps(content), encoding="utf-8")
    for entry in entries[1:]:
        if (folder / entry["path"]).is_dir():
            shutil.copytree(folder / entry["path"], target / entry["path"])
    return scratch


AutoConfig.register(StaticConfig.model_type, StaticConfig)
AutoModel.register(StaticConfig, StaticModel)
register_checkpoint_conversion_mapping(
    StaticConfig.model_type, [WeightRenaming("^embeddings", "embeddings.weight")]
)  # model2vec's name
