"""Configuration and sizes of a model to build, with or without a source."""

from copy import deepcopy
from functools import lru_cache
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from distill_runner.common.errors import UserError, brief, nearest
from distill_runner.models.config import ModelConfig, chosen_layers
from distill_runner.models.encoders import BEHIND_PADDING, MPNET, EncoderShape
from distill_runner.models.images import reads_images
from distill_runner.models.sizes import check
from distill_runner.models.sources import folder_of, load, trusts_code


def fresh_architecture(model: ModelConfig) -> dict[str, Any]:
    """Return the architecture of a model without a source, including its ``num_layers``."""
    depth = {"num_hidden_layers": model.num_layers} if model.num_layers else {}
    return {**(model.architecture or {"model_type": "bert"}), **depth}


def with_padding(model: ModelConfig, tokenizer: str, padding: int | None) -> ModelConfig:
    """Return the new model ``model`` with its tokenizer's padding token, unless its architecture names one.

    The embedding of the padding token is never trained, so another id would leave a token without an embedding. Models
    like RoBERTa number positions from behind that id, so their table of positions grows or shrinks with it.

    Args:
        padding: id of the padding token of ``tokenizer``; None if it has none.
    Raises:
        UserError: the tokenizer has no padding token, but models of this type have one.
    """
    architecture, config = fresh_architecture(model), read_config(model)
    default = getattr(config, "pad_token_id", None)  # networks for images have none
    if "pad_token_id" in architecture or default in (None, padding) or config.model_type == MPNET:
        return model
    if padding is None:
        remedy = "Name one: stages.<stage>.model.architecture.pad_token_id=<the id of a token that no text has>."
        raise UserError(".model.tokenizer", tokenizer, "has no padding token, which a new model needs", remedy)
    changed = {"pad_token_id": padding}
    if config.model_type in BEHIND_PADDING:
        changed["max_position_embeddings"] = config.max_position_embeddings + padding - default
    return model.model_copy(update={"architecture": {**architecture, **changed}})


def read_config(model: ModelConfig) -> PreTrainedConfig:
    """Return the configuration of the model to build, without its weights.

    Raises:
        UserError: the source is not available, has too few layers, or has a configuration that is not valid.
    """
    if model.source is None:
        return _fresh_config(model)
    config = _config_of(model.source)
    if model.num_layers is not None and reads_images(config):
        problem = "an image network cannot be cut to some of its layers"
        raise UserError(
            ".model.num_layers", model.num_layers, problem, "Leave it out, or take a new network: student=resnet8."
        )
    if model.num_layers is not None:
        if model.copies_layers and model.num_layers > config.num_hidden_layers:
            problem = f"must be between 1 and {config.num_hidden_layers}, the layers of {model.source}"
            raise UserError(".model.num_layers", model.num_layers, problem)
        if kinds := getattr(config, "layer_types", None):  # ModernBERT: a copied layer stays local or global
            of_layers = chosen_layers(len(kinds), model.num_layers, model.layers)
            of_layers = of_layers or [j % len(kinds) + 1 for j in range(model.num_layers)]
            config.layer_types = [kinds[number - 1] for number in of_layers]
        config.num_hidden_layers = model.num_layers
        check(config, ".model.num_layers", model.num_layers)
    return config


def _config_of(source: str) -> PreTrainedConfig:
    """Return the checked configuration of ``source``, read again only if its file has changed.

    Each point of a sweep asks for it.
    """
    file = folder_of(source) / "config.json"
    changed = file.stat().st_mtime_ns if file.is_file() else 0
    return deepcopy(_read_once(source, str(file), changed))


@lru_cache(maxsize=64)
def _read_once(source: str, _file: str, _changed: int) -> PreTrainedConfig:
    config: PreTrainedConfig = load(AutoConfig.from_pretrained, source, weights=False)
    check(config, ".model.source", source)
    return config


def _fresh_config(model: ModelConfig) -> PreTrainedConfig:
    sizes = fresh_architecture(model)
    kind = sizes.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise UserError(".model.architecture.model_type", kind, "there is no such model", nearest(kind, CONFIG_MAPPING))
    try:
        config = AutoConfig.for_model(kind, **sizes)
    except UserError:
        raise
    except Exception as error:
        raise UserError(".model.architecture", None, f"does not describe a valid {kind} ({brief(error)})") from error
    check(config, ".model.architecture", None)
    return config


def read_shape(model: ModelConfig) -> EncoderShape:
    """Return the sizes of the model to build, for planning.

    Raises:
        UserError: for the reasons of ``read_config``, or the model is no encoder of texts or images.
    """
    config = read_config(model)
    if not reads_images(config) and not trusts_code() and config.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        problem = f"a {config.model_type} is not a bidirectional text encoder"
        raise UserError(".model.source", model.source, problem, "Take BERT or a similar encoder.")
    try:
        return EncoderShape.of(config)
    except (AttributeError, TypeError) as error:
        problem = f"a {config.model_type} is not a text encoder that this program supports ({brief(error)})"
        raise UserError(".model.source", model.source, problem, "Take BERT or a similar encoder.") from error
