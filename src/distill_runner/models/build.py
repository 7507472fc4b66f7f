"""Build the models of a run from a hub id, a folder, an earlier stage or new weights, with fewer layers if asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import AutoModel, PreTrainedConfig

from distill_runner.common.errors import UserError, brief
from distill_runner.models.config import Init, ModelConfig, chosen_layers
from distill_runner.models.head import Head
from distill_runner.models.images import reads_images
from distill_runner.models.source_config import read_config
from distill_runner.models.sources import load, trusts_code

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build(model: ModelConfig, head: Head, vocab_size: int | None = None) -> PreTrainedModel:
    """Build a model in float32 with a head.

    New weights are drawn from torch's global generator, so seed it first.

    Args:
        vocab_size: vocabulary size of a new model whose tokenizer was trained by the run itself.
    Raises:
        UserError: the source is not available, or a kept head does not fit ``head``.
    """
    from distill_runner.models import resnet  # noqa: F401, registers it with AutoModelForImageClassification

    auto: Any = getattr(transformers, head.auto)
    if model.head == "keep" and model.source is not None:
        if head.task:
            return _fine_tuned(model, head, auto)
        language_model: PreTrainedModel = load(auto.from_pretrained, model.source, dtype=torch.float32)
        return language_model
    config = read_config(model)
    if model.source is not None and reads_images(config):
        return _whole_network(model, head, auto, config)
    if vocab_size is not None:
        config.vocab_size = vocab_size
    head.describe(config)
    built = auto.from_config(config, dtype=torch.float32)
    if model.source is not None and model.layers != "random":
        source = load(AutoModel.from_pretrained, model.source, dtype=torch.float32)
        _copy_layers(source, built, model.layers)
    return built


def require_cuttable(model: ModelConfig) -> None:
    """Check that the source of a model can be cut to its layers, without reading weights.

    A model whose code comes with it is not checked, since its class is known only after loading.

    Raises:
        UserError: the family does not have the depth that is asked for, or names its layers in another way.
    """
    if model.source is None or model.num_layers is None or model.layers == "random" or trusts_code():
        return
    cut, whole = read_config(model), read_config(model.model_copy(update={"num_layers": None}))
    try:
        with torch.device("meta"):
            _copy_layers(AutoModel.from_config(whole), AutoModel.from_config(cut), model.layers)
    except Exception as error:  # each family refuses in its own way
        why = error.problem if isinstance(error, UserError) else brief(error)
        problem = f"a model of type {cut.model_type} cannot be cut to some of its layers ({why})"
        remedy = "Leave it out, or take a model of another family."
        raise UserError(".model.num_layers", model.num_layers, problem, remedy) from error


def _whole_network(model: ModelConfig, head: Head, auto: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """Build an image network with all of its layers and a new head; ``layers=random`` copies no weights."""
    head.describe(config)
    if model.layers == "random":
        return auto.from_config(config, dtype=torch.float32)
    how: dict[str, Any] = {"config": config, "dtype": torch.float32, "ignore_mismatched_sizes": True}
    built: PreTrainedModel = load(auto.from_pretrained, str(model.source), **how)
    output = output_layer(built)
    output.reset_parameters()  # with as many classes as the source, the weights would be those of another task
    return built


def _copy_layers(source: PreTrainedModel, target: PreTrainedModel, init: Init) -> None:
    """Copy embeddings, the chosen layers and the pooler (**reading**: it comes with the backbone, as in PKD's code).

    If the layers of a family share their weights (ALBERT), all weights are copied. ModernBERT's first layer has no norm
    before its attention, so a layer that becomes the first one loses this norm. A pooler that the source does not have
    (NomicBERT) gets new weights.
    """
    chosen = chosen_layers(source.config.num_hidden_layers, target.config.num_hidden_layers, init)
    place = {layer - 1: number for number, layer in enumerate(chosen)}
    prefix = _layers_prefix(source)
    weights = {}
    for name, tensor in source.state_dict().items():
        if prefix and name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            if int(number) in place:
                weights[f"{prefix}{place[int(number)]}.{rest}"] = tensor
        elif chosen or name.startswith("embeddings."):
            weights[name] = tensor
    missing, unexpected = target.base_model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if chosen and not name.startswith("pooler.")]
    left_out = ("pooler.", f"{prefix}0.attn_norm.")
    unexpected = [name for name in unexpected if not name.startswith(left_out)]
    if missing or unexpected:
        problem = f"its weights do not fit: {', '.join([*missing, *unexpected][:3])}"
        raise UserError(".model.source", source.config.name_or_path, problem)


def _layers_prefix(backbone: PreTrainedModel) -> str | None:
    """Return the prefix of the layers' weight names, before the layer number; None if layers share their weights.

    It is the name of the first ``ModuleList`` with one module per layer; lists within a layer come after it.
    """
    depth = backbone.config.num_hidden_layers
    if getattr(backbone.config, "num_hidden_groups", None) is not None:
        return None
    lists = (name for name, part in backbone.named_modules() if isinstance(part, nn.ModuleList) and len(part) == depth)
    return f"{next(lists)}."


def _fine_tuned(model: ModelConfig, head: Head, auto: Any) -> PreTrainedModel:
    assert model.source is not None
    built, info = load(auto.from_pretrained, model.source, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"]:
        raise UserError(
            "teacher.fine_tuned",
            True,
            f"{model.source} has no head for the task {head.task} (no {min(info['missing_keys'])})",
            "Set teacher.fine_tuned=false to fine-tune it first.",
        )
    names = dict(enumerate(model.labels)) if model.labels else built.config.id2label
    if (order := head.order(names)) is not None:
        outputs = output_layer(built)
        with torch.no_grad():
            outputs.weight.copy_(outputs.weight[order].clone())
            outputs.bias.copy_(outputs.bias[order].clone())
    head.describe(built.config)
    return built


def output_layer(model: nn.Module) -> nn.Linear:
    """Return the layer (C, H) that computes the logits of a sequence classification model, found by its name.

    The order of the modules does not identify it: XLM-R and CamemBERT register their head before the encoder.

    Raises:
        UserError: the family uses another name for it.
    """
    for name in ("classifier.out_proj", "classifier.1", "classifier"):
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            continue
        if isinstance(layer, nn.Linear):
            return layer
    problem = f"the head of a {type(model).__name__} has no layer 'classifier' or 'classifier.out_proj'"
    raise UserError("teacher.fine_tuned", True, problem, "Take a teacher of another family.")


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters; tied parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters())
