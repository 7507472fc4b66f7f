"""Tiny models of every family that the documentation names, with weights drawn wide enough to differ."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification, PreTrainedModel

from distill_runner.models.families import PACKED, TABLE

_SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
_COMMON = {"vocab_size": 100, "num_labels": 3, "max_position_embeddings": 80, "initializer_range": 0.3}
_BEHIND_PADDING: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_DEBERTA = {
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["p2c", "c2p"],
}
_OWN: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": _BEHIND_PADDING | {"type_vocab_size": 1},
    "xlm-roberta": _BEHIND_PADDING | {"type_vocab_size": 1},
    "camembert": _BEHIND_PADDING | {"type_vocab_size": 1},
    "electra": {"embedding_size": 16},
    "distilbert": {},
    "modernbert": {
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "local_attention": 16,
    },
    "nomic_bert": {},
    "mpnet": _BEHIND_PADDING,
    "deberta": _DEBERTA,
    "deberta-v2": _DEBERTA | {"position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    "albert": {"embedding_size": 16},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16},
}
FAMILIES = list(_OWN)
PACKED_FAMILIES = sorted(PACKED.keys() - {TABLE})
"""A table of tokens has no layers to pack."""


def config_of(family: str, num_layers: int | None = None, **options: Any) -> Any:
    """The configuration of a tiny model: 3 layers of 32, 4 heads, 3 labels, 100 words."""
    is_distilbert = family == "distilbert"
    sizes: dict[str, Any] = {"n_layers": 3, "dim": 32, "n_heads": 4, "hidden_dim": 64} if is_distilbert else _SIZES
    config = AutoConfig.for_model(family, **sizes | _COMMON | _OWN[family] | options)
    config.num_hidden_layers = num_layers or config.num_hidden_layers
    if family == "modernbert" and num_layers == 4:
        config.layer_types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    return config


def make(
    family: str, masked_lm: bool = False, dtype: torch.dtype = torch.float32, seed: int = 1, **options: Any
) -> PreTrainedModel:
    """A tiny model in eval mode, with a head for classification or for masked language modeling."""
    torch.manual_seed(seed)
    auto: Any = AutoModelForMaskedLM if masked_lm else AutoModelForSequenceClassification
    model: PreTrainedModel = auto.from_config(config_of(family, **options)).to(dtype).eval()
    return model
